"""Record contents that follow from the key alone, written to the arena and checked there.

A record is one fixed random sequence of 64-bit words, each combined (exclusive or) with 64 bits
of the key. Bytes of another key, of another place in the record or of another record length
differ from it in all but 1 of 256 places.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

KV_GROUP = bytes(4)  # traces know one KV-cache group
_WORD_BYTES = 8


def block_key(block_id: int) -> bytes:
    """The key of a trace's block id: a 32-byte hash and the KV group. About 1 us."""
    name = block_id.to_bytes(_WORD_BYTES, "little")
    return hashlib.blake2b(name, digest_size=32).digest() + KV_GROUP


class RecordContents:
    """Writes and checks records of one length in a mapped arena. One thread.

    Both cost one pass over the record: about 2 us for 4 KiB. Keeps the arena mapped while it lives.
    """

    def __init__(self, arena: memoryview, record_bytes: int) -> None:
        words = -(-record_bytes // _WORD_BYTES)
        draw = np.random.Generator(np.random.Philox(key=record_bytes))
        self._base: NDArray[np.uint64] = draw.integers(0, 2**64, words, dtype=np.uint64)
        self._words = np.empty(words, dtype=np.uint64)
        self._expected = self._words.view(np.uint8)[:record_bytes]
        self._differs = np.empty(record_bytes, dtype=np.bool_)
        self._arena = np.frombuffer(arena, dtype=np.uint8)
        self._record_bytes = record_bytes

    def write(self, key: bytes, offset: int) -> None:
        """Fill the slot at `offset` with the key's bytes."""
        self._expect(key)
        self._arena[offset : offset + self._record_bytes] = self._expected

    def wrong_bytes(self, key: bytes, offset: int) -> int:
        """How many bytes at `offset` are not the key's. Every byte is compared."""
        self._expect(key)
        found = self._arena[offset : offset + self._record_bytes]
        np.not_equal(found, self._expected, out=self._differs)
        return int(np.count_nonzero(self._differs))

    def _expect(self, key: bytes) -> None:
        seed = np.uint64(int.from_bytes(key[:_WORD_BYTES], "little"))
        np.bitwise_xor(self._base, seed, out=self._words)
