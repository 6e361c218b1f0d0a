"""Canonical CBOR of a run of token blocks, without one encoder call per block.

Facts (RFC 8949, shortest form). An int n >= 0 is its head byte alone below 24, else a head byte
0x18, 0x19 or 0x1a followed by 1, 2 or 4 big-endian bytes. A tuple is `0x80 | length`, or 0x98,
0x99, 0x9a and the length, then its items. None is 0xf6. The encoder that names blocks is cbor2 with
`canonical=True`; `encode_runs` yields the same bytes several times faster, and `check_encoder`
refuses to start when the two, or a new release of cbor2, no longer agree with fixed vectors.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from array import array
from typing import TYPE_CHECKING, Any

import cbor2
import numpy as np

from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BYTES, TUPLE = 2, 4
"""CBOR major types whose heads a block needs: byte string and array."""

NONE = b"\xf6"

_ROW = np.dtype([("head", "u1"), ("value", ">u4")])

_VECTORS: tuple[tuple[object, str], ...] = (
    (0, "00"),
    (23, "17"),
    (24, "1818"),
    (255, "18ff"),
    (256, "190100"),
    (65535, "19ffff"),
    (65536, "1a00010000"),
    (2**31 - 1, "1a7fffffff"),
    (2**32, "1b0000000100000000"),
    (-1, "20"),
    (-25, "3818"),
    ("vllm-none-hash", "6e766c6c6d2d6e6f6e652d68617368"),
    ("é", "62c3a9"),
    ((b"\x00" * 16, (1,), None), "8350" + "00" * 16 + "8101f6"),
    (
        (b"\xff" * 32, (23, 24), (("mm", "a", -9),)),
        "835820" + "ff" * 32 + "8217181881" + "83626d6d616128",
    ),
)

# Token counts whose bytes pass 4096 and 32768, sizes near which releases of cbor2 failed, and the
# SHA-256 of the block that `check_encoder` builds from so many.
_LONG_VECTORS = (
    (1365, "8d29ab2d7bfeed0c612dcedd76f258b110b589a6ba86d1e5497430c9efdf14cd"),
    (4096, "3059adabbb1519f9ea0b1eda0143b4d9ca728cf16b1054ab2158879d2ab2c379"),
    (16384, "aa3321ec5ed33564b51682b3960ae68f3fd938b591e78ee3846769788c5eb37a"),
)


def encode(item: object) -> bytes:
    """Canonical CBOR of one item, by cbor2.

    Raises MisuseError for an item that CBOR cannot hold, such as text with a lone surrogate, which
    a client can send.
    """
    try:
        return cbor2.dumps(item, canonical=True)
    except (cbor2.CBOREncodeError, UnicodeEncodeError) as error:
        raise MisuseError(
            "a part of a block's name cannot be encoded", cause=str(error), type=type(item).__name__
        ) from error


def head(major: int, length: int) -> bytes:
    """The head of an item of major type `major`: BYTES or TUPLE with `length` bytes or items."""
    if length < 24:
        return bytes((major << 5 | length,))
    for size, code in ((1, 24), (2, 25), (4, 26)):
        if length < 1 << 8 * size:
            return bytes((major << 5 | code,)) + length.to_bytes(size, "big")
    return bytes((major << 5 | 27,)) + length.to_bytes(8, "big")


def as_words(token_ids: Sequence[int] | NDArray[Any]) -> NDArray[np.uint32] | None:
    """The token ids as 32-bit words, or None when one is not a plain int of 0 .. 2**31 - 1.

    `token_ids` is a sequence or a one-dimensional integer array (then up to 2**32 - 1). None is no
    verdict: the caller takes its slow path, which rejects what must be rejected. O(n).
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
        values = np.frombuffer(array("q", token_ids), np.int64)
    except OverflowError:
        return None
    if int(values.min()) < 0 or int(values.max()) >= 1 << 31:
        return None
    return values.astype(np.uint32)


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


def check_encoder() -> None:
    """Raise ConfigError unless cbor2 and the fast encoding still yield the bytes of fixed vectors.

    Call once before the first block is named: a release of cbor2 that encodes differently would
    otherwise write keys that nobody finds again. Costs a few milliseconds.
    """
    for item, expected in _VECTORS:
        found = cbor2.dumps(item, canonical=True).hex()
        if found != expected:
            raise _self_test_error(repr(item), expected, found)
    for length, expected in _LONG_VECTORS:
        tokens = [(i * i * 977) % 2**31 >> (i % 4 * 8) for i in range(length)]
        block = cbor2.dumps((bytes(32), tuple(tokens), None), canonical=True)
        found = hashlib.sha256(block).hexdigest()
        if found != expected:
            raise _self_test_error(f"{length} tokens", expected, found)
        words = as_words(tokens)
        if words is None:
            raise _self_test_error(f"{length} tokens", "words", "other words")
        fast = (
            b"\x83\x58\x20" + bytes(32) + head(TUPLE, length) + encode_runs(words, length)[0] + NONE
        )
        if fast != block:
            raise _self_test_error(f"{length} tokens, fast path", block[:64].hex(), fast[:64].hex())


def _self_test_error(item: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        "hash self-test failed: the CBOR encoder yields other bytes than its vectors",
        next_step="Install a cbor2 release that this version was tested with",
        item=item,
        expected=expected,
        found=found,
        cbor2=importlib.metadata.version("cbor2"),
    )
