"""Bytes as tokens: ids 0 to 255 are the bytes of the UTF-8 text, two more mark its ends."""

from __future__ import annotations

BOS = 256
EOS = 257
VOCAB_SIZE = 260
"""Ids 258 and 259 mean nothing: they round the vocabulary to a multiple of four."""


def encode(text: str, *, bos: bool = True) -> list[int]:
    """The token ids of `text`, with `BOS` in front unless `bos` is false."""
    ids = list(text.encode())
    return [BOS, *ids] if bos else ids


def decode(token_ids: list[int]) -> str:
    """The text of `token_ids`. Ids that are no bytes are left out, broken UTF-8 is replaced."""
    return bytes(token for token in token_ids if token < BOS).decode(errors="replace")
