"""The compiled hasher, where it was built: SHA-256 over CBOR, the same names, several times faster.

`block_hash.c` is compiled when the package is installed and a C compiler is there; without one
everything works through numpy and hashlib. `EBBTIDE_PURE=1` leaves the compiled one out.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide.allocator import cbor
from ebbtide.compiled import compiled_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MODULE = "ebbtide.allocator._block_hash"


class Hasher(Protocol):
    """The compiled module. Its one function, as `block_hash.c` describes it."""

    def hash_blocks(
        self,
        token_ids: Sequence[int] | NDArray[Any],
        block_size: int,
        first: int,
        end: int,
        parent: bytes,
        suffixes: bytes | Sequence[bytes],
        portable: bool = False,
    ) -> list[bytes] | None:
        """Names of blocks `first` .. `end - 1`; None when it cannot, which is no verdict.

        `token_ids` is a list, a tuple or a contiguous array of int64. `suffixes` is the encoded
        extra keys of all of the blocks, or one for each.
        """
        ...


def is_right(found: Hasher) -> bool:
    """Whether both of its SHA-256 agree with hashlib on tokens of all widths and block sizes."""
    tokens = [(i * i * 977) % 2**62 >> (i % 8 * 8) for i in range(4096)]
    for block_size in (1, 5, 16, 23, 24, 256, 2048):
        for suffix in (cbor.NONE, cbor.encode((("cache_salt", "x" * 40),))):
            parent = first = hashlib.sha256(suffix).digest()
            expected = []
            for start in range(0, 2 * block_size, block_size):
                block = tuple(tokens[start : start + block_size])
                encoded = cbor.encode((parent, block, None))[: -len(cbor.NONE)] + suffix
                parent = hashlib.sha256(encoded).digest()
                expected.append(parent)
            for portable in (False, True):
                if found.hash_blocks(tokens, block_size, 0, 2, first, suffix, portable) != expected:
                    return False
    return True


hasher = compiled_module(MODULE, is_right, "compiled hasher")
"""The compiled hasher, or None; see `compiled_module`. The first call takes a millisecond."""
