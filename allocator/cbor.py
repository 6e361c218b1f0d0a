"""Canonical CBOR of a run of token blocks, without one encoder call per block.

Facts (RFC 8949, shortest form). An int n >= 0 is its head byte alone below 24, else a head byte
0x18, 0x19 or 0x1a followed by 1, 2 or 4 big-endian bytes. A tuple is `0x80 | length`, or 0x98,
0x99, 0x9a and the length, then its items. None is 0xf6. The encoder that names blocks is cbor2 with
`canonical=True`; `encode_runs` yields the same bytes several times faster, and `encoder_check`
refuses to start when either no longer yields the bytes of fixed vectors.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BYTES, TUPLE = 2, 4
"""CBOR major types whose heads a block needs: byte string and array."""

NONE = b"\xf6"

_ROW = np.dtype([("head", "u1"), ("value", ">u4")])


def encode(item: object) -> bytes:
    """Canonical CBOR of one item, by cbor2.

    Raises MisuseError for an item that CBOR cannot hold, such as text with a lone surrogate, which
    a client can send. The error says nothing of the item's value: it may hold a cache salt.
    """
    try:
        return cbor2.dumps(item, canonical=True)
    except UnicodeEncodeError as error:
        cause = error.reason
    except cbor2.CBOREncodeError as error:
        cause = type(error).__name__
    # Raised out here, so that no error that holds the text hangs on this one.
    raise MisuseError(
        "a part of a block's name cannot be encoded", cause=cause, type=type(item).__name__
    )


def head(major: int, length: int) -> bytes:
    """The head of an item of major type `major`: BYTES or TUPLE with `length` bytes or items."""
    if length < 24:
        return bytes((major << 5 | length,))
    for size, code in ((1, 24), (2, 25), (4, 26)):
        if length < 1 << 8 * size:
            return bytes((major << 5 | code,)) + length.to_bytes(size, "big")
    return bytes((major << 5 | 27,)) + length.to_bytes(8, "big")


def as_words(token_ids: Sequence[int] | NDArray[Any]) -> NDArray[np.uint32] | None:
    """The token ids as 32-bit words, or None when one is not a plain int of 0 .. 2**32 - 1.

    `token_ids` is a sequence or a one-dimensional integer array. None is no verdict: the caller
    takes its slow path, which rejects what must be rejected. O(n).
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.size and (int(token_ids.min()) < 0 or int(token_ids.max()) >= 1 << 32):
            return None
        return token_ids.astype(np.uint32)
    # Neither array nor numpy tells a bool or a numpy int from an int, so the types are looked at
    # first.
    if set(map(type, token_ids)) != {int}:
        return None
    try:
        # Of all ways to unpack ints the fastest, and it refuses what is negative or wider.
        return np.frombuffer(array("I", token_ids), np.uint32)
    except OverflowError:
        return None


def encode_runs(words: NDArray[np.uint32], run: int) -> tuple[bytes, list[int]]:
    """The ints of `words` encoded back to back, and the end offset of every `run` of them.

    `len(words)` is a multiple of `run`. O(n): each word fills a fixed row (head byte, four value
    bytes) of which a mask keeps the bytes that the shortest form has.
    """
    above_head, above_u8, above_u16 = words >= 24, words >= 256, words >= 65536
    extra = above_head.view(np.uint8) + above_u8 + above_u16  # 0, 1, 2, 3: the width class
    rows = np.empty(len(words), _ROW)
    rows["head"] = extra + 0x17  # 0x18, 0x19, 0x1a; class 0 has no separate head byte
    rows["value"] = words
    keep = np.empty((len(words), _ROW.itemsize), np.bool_)
    keep[:, 0] = above_head
    keep[:, 1] = above_u16
    keep[:, 2] = above_u16
    keep[:, 3] = above_u8
    keep[:, 4] = True
    sizes = extra + above_u16.view(np.uint8) + 1  # 1, 2, 3 or 5 bytes
    ends = sizes.reshape(-1, run).sum(axis=1, dtype=np.int64).cumsum()
    return rows.view(np.uint8).compress(keep.reshape(-1)).tobytes(), ends.tolist()
