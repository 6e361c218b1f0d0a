"""What names a block apart from its tokens: adapter, images, salt, prompt embeddings.

Facts (as vLLM 0.32): the parts are tuples whose first item is a tag, in this order:
`("lora", name, path)` in every block; `("mm", identifier, offset - block start)` in each block that
the item's placeholders overlap, so negative in later blocks; `("cache_salt", salt)` in the block of
token 0 only, inherited through the chain; `("prompt_embeds", digest)` in every block. A block
without any has None, never an empty tuple. The adapter's integer id is not part of the name.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SALT_CHARACTERS_MAX = 128
_SALT_REFUSED = frozenset("@/\\\0")

ExtraKeys = tuple[tuple[str | int | bytes, ...], ...]


class LoraAdapter(NamedTuple):
    """An adapter by name and path. Both are hashed: a name reloaded from elsewhere is another."""

    name: str
    path: str


class MultiModalItem(NamedTuple):
    """One image, clip or sound in a prompt.

    `identifier` is its whole content hash (or the id that the user gave), `offset` the position of
    its first placeholder token in the request, `length` the number of placeholders.
    """

    identifier: str
    offset: int
    length: int


def block_extra_keys(
    first_block: int,
    end_block: int,
    block_size: int,
    *,
    lora: LoraAdapter | None = None,
    mm_items: Sequence[MultiModalItem] = (),
    cache_salt: str | None = None,
    prompt_embeds: NDArray[Any] | None = None,
) -> list[ExtraKeys | None]:
    """The extra keys of blocks `first_block` .. `end_block - 1`, as vLLM 0.32 orders them.

    `mm_items` stand in prompt order. `prompt_embeds` has one row per prompt position (reduced types
    that numpy lacks come as a byte view); a block past its end gets the digest of the shorter or
    empty slice. An empty salt is no salt. Raises MisuseError for values of another type.
    O(blocks + overlaps of items with blocks).
    """
    _check_types(lora, mm_items, cache_salt)
    parts: list[list[tuple[str | int | bytes, ...]]] = [[] for _ in range(first_block, end_block)]
    if lora is not None:
        tag = ("lora", lora.name, lora.path)
        for part in parts:
            part.append(tag)
    for identifier, offset, length in mm_items:
        last_block = (offset + length - 1) // block_size
        for block in range(max(first_block, offset // block_size), min(end_block, last_block + 1)):
            parts[block - first_block].append(("mm", identifier, offset - block * block_size))
    if cache_salt and first_block == 0 and parts:
        parts[0].append(("cache_salt", cache_salt))
    if prompt_embeds is not None:
        for block, part in enumerate(parts, first_block):
            rows = prompt_embeds[block * block_size : (block + 1) * block_size]
            part.append(("prompt_embeds", hashlib.sha256(rows.tobytes()).digest()))
    return [tuple(part) or None for part in parts]


def check_cache_salt(text: object) -> str:
    """The salt, if a request may have it; a salt is optional, and None is for the caller to skip.

    1 to 128 characters, none of `@`, `/`, `\\` and NUL, as the front end of vLLM 0.32 has it; no
    lone surrogate either, which nothing could encode. The check belongs where a request comes in
    from outside: an engine's front end calls it once for each request that brings a salt.
    `hash_blocks` does not, as vLLM's engine does not: it names the blocks of any text.

    Raises MisuseError for anything else. The error tells the length and never shows the salt: who
    knows a salt can ask for the blocks of those who use it. O(length).
    """
    if type(text) is not str:
        raise MisuseError("a cache salt is text", type=type(text).__name__)
    if not 1 <= len(text) <= SALT_CHARACTERS_MAX:
        raise MisuseError(
            f"a cache salt has 1 to {SALT_CHARACTERS_MAX} characters",
            next_step="Leave the salt out, or send a digest of it",
            characters=len(text),
        )
    if not _SALT_REFUSED.isdisjoint(text) or any("\ud800" <= char <= "\udfff" for char in text):
        raise MisuseError(
            "a cache salt has none of @ / \\ NUL and no lone surrogate",
            next_step="Send it as hex or URL-safe base64",
            characters=len(text),
        )
    return text


def embeds_token_ids(
    num_rows: int,
    prompt_token_ids: Sequence[int] | None = None,
    is_token_id: Sequence[bool] | None = None,
) -> list[int]:
    """The token ids under which a prompt of `num_rows` embeddings is hashed, as vLLM 0.32.

    Zeros without ids; zero wherever `is_token_id` says that the position holds an embedding. Raises
    MisuseError when the lengths differ.
    """
    if prompt_token_ids is None:
        return [0] * num_rows
    mask = [True] * num_rows if is_token_id is None else is_token_id
    if not len(prompt_token_ids) == len(mask) == num_rows:
        raise MisuseError(
            "token ids, mask and prompt embeddings differ in length",
            token_ids=len(prompt_token_ids),
            mask=len(mask),
            rows=num_rows,
        )
    return [token if kept else 0 for token, kept in zip(prompt_token_ids, mask, strict=True)]


def _check_types(
    lora: LoraAdapter | None, mm_items: Sequence[MultiModalItem], cache_salt: str | None
) -> None:
    """Reject what would be hashed under another form, and so never be found again."""
    texts: list[object] = [item.identifier for item in mm_items]
    if lora is not None:
        texts += lora
    if cache_salt is not None:
        texts.append(cache_salt)
    for text in texts:
        if type(text) is not str:
            raise MisuseError("a block's name takes text here", type=type(text).__name__)
    for item in mm_items:
        if type(item.offset) is not int or type(item.length) is not int:
            raise MisuseError("placeholder positions are ints", item=item)
