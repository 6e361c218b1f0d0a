"""From keys to rows of the record table: a hash index in one array, for thousands of keys at once.

Open addressing with linear probing. An entry is 8 bytes: 32 bits of the key's hash as a tag, and
the row. It grows while it is used: entries move to a larger array in small pieces, so that no call
takes longer than a fraction of a millisecond.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.tiers.record_table import KEY_BYTES_MAX, KEY_WORDS, last_word, names_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.record_table import RecordTable

Array = np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

NO_ROW = -1
ENTRIES_MIN = 1 << 10
MOVE_EVERY = 32  # additions
MOVE_ENTRIES = 1 << 10
SCALAR_MAX = 24  # keys that are asked faster one by one
INDEXED_MAX = 512  # rows: `take` is faster, but lets other threads in, however few it takes

_EMPTY = 0
_GONE = 0xFFFF_FFFF  # was an entry; probing goes on behind it. Neither has a tag
_ROW_MASK = 0xFFFF_FFFF
_HASH_MASK = 0xFFFF_FFFF_FFFF_FFFF
# Odd numbers without a pattern: fractional digits of square roots, as SHA-2 uses.
_FACTORS = (
    0x6A09E667F3BCC909,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
)
_MIX_FACTOR = 0x5BE0CD19137E2179
_KEY = struct.Struct(f"={KEY_WORDS}Q")


class KeyIndex:
    """(epoch, key) -> row. Control thread only."""

    def __init__(self, table: RecordTable) -> None:
        self._table = table
        self._old: Array | None = None  # entries are moving from here to `_entries`
        self._moved = 0  # entries of `_old` that have been
        self._additions = 0
        self._begin(ENTRIES_MIN)
        self.count = 0

    def find(self, epoch: int, key: bytes) -> int:
        """The row of a key, or NO_ROW. 3 us."""
        if len(key) > KEY_BYTES_MAX:
            return NO_ROW
        hashed = _hash_one(epoch, key)
        row = self._probe(self._entries, self._of, hashed, epoch, key)
        if row == NO_ROW and self._old is not None:
            row = self._probe(self._old, self._old.data, hashed, epoch, key)
        return row

    def find_many(self, epoch: int, keys: Sequence[bytes]) -> Ints:
        """Per key its row, or NO_ROW. 0.15 us a key. All keys have one width, as on the wire."""
        joined, width = b"".join(keys), len(keys[0]) if keys else 0
        uniform = len(joined) == width * len(keys) and width <= KEY_BYTES_MAX
        if len(keys) <= SCALAR_MAX or not uniform:
            return np.array([self.find(epoch, key) for key in keys], np.int64)
        names = names_of(epoch, joined, width)
        hashes = hashes_of(names)
        rows = self._probe_many(self._entries, hashes)
        if self._old is not None:
            left = np.flatnonzero(rows == NO_ROW)
            rows[left] = self._probe_many(self._old, hashes[left])
        found = np.flatnonzero(rows != NO_ROW)
        held = self._table.name
        if len(found) <= INDEXED_MAX:
            differ = held[rows[found]] != names[found]
        else:
            differ = held.take(rows[found], axis=0, mode="clip") != names[found]
        if differ.any():  # another key of the same tag: look behind it
            for number in found[differ.any(1)].tolist():
                rows[number] = self.find(epoch, keys[number])
        return rows

    def add(self, rows: Sequence[int]) -> None:
        """Rows whose names are not in the index. Vectorised: 20 us, and 0.6 us for each."""
        at = np.array(rows, np.int64)
        hashes = self._table.hash[at] = hashes_of(self._table.name[at])
        for row, hashed in zip(rows, hashes.tolist(), strict=True):
            self._add(row, hashed)

    def _add(self, row: int, hashed: int) -> None:
        if self._old is None and 2 * (self._filled + 1) > len(self._entries):
            self._old, self._moved = self._entries, 0
            # Not less than half: what is added before the move ends must find a place.
            wanted = max(_power_above(4 * (self.count + 1)), len(self._old) // 2)
            self._begin(max(ENTRIES_MIN, wanted))
        entries, mask = self._of, len(self._entries) - 1
        position = hashed & mask
        while entries[position] != _EMPTY:
            position = (position + 1) & mask
        entries[position] = _entry(hashed, row)
        self._filled += 1
        self.count += 1
        self._additions += 1
        if self._old is not None and self._additions % MOVE_EVERY == 0:
            self._move(MOVE_ENTRIES)

    def add_many(self, rows: Array) -> None:
        """Rows whose keys are not in the index, before anybody asks: all at once."""
        self._old = None
        self._table.hash[rows] = hashes_of(self._table.name[rows])
        present = self._rows_in(self._entries)
        self._begin(max(ENTRIES_MIN, _power_above(4 * (len(rows) + len(present)))))
        self._insert(np.concatenate([present, rows]))
        self.count = len(rows) + len(present)

    def remove(self, rows: Sequence[int]) -> None:
        """Rows that are in the index: a microsecond each."""
        hashes = self._table.hash[np.array(rows, np.int64)].tolist()
        for entries in (self._entries,) if self._old is None else (self._entries, self._old):
            one, mask = entries.data, len(entries) - 1
            for row, hashed in zip(rows, hashes, strict=True):
                position, wanted = hashed & mask, (hashed >> 32 | 1) << 32 | row + 1
                while (found := one[position]) != _EMPTY:
                    if found == wanted:
                        one[position] = _GONE
                        break
                    position = (position + 1) & mask
        self.count -= len(rows)

    # -- inside ---------------------------------------------------------------------------------

    def _begin(self, size: int) -> None:
        # Filled at random places: in huge pages, each of the first additions would clear 2 MiB.
        pages = mmap.mmap(-1, 8 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        self._entries: Array = np.frombuffer(pages, np.uint64)
        self._of = self._entries.data
        self._filled = 0  # entries that are not empty

    def _probe(self, entries: Array, one: memoryview, hashed: int, epoch: int, key: bytes) -> int:
        mask, tag = len(entries) - 1, _tag(hashed)
        position = hashed & mask
        while (entry := one[position]) != _EMPTY:
            if entry >> 32 == tag and self._table.names((entry & _ROW_MASK) - 1, epoch, key):
                return int(entry & _ROW_MASK) - 1
            position = (position + 1) & mask
        return NO_ROW

    @staticmethod
    def _probe_many(entries: Array, hashes: Array) -> Array:
        """Per hash the first row of the same tag, or NO_ROW."""
        mask = len(entries) - 1
        tags = _tags(hashes)
        positions = (hashes & np.uint64(mask)).astype(np.int64)
        found = entries[positions]
        todo = np.flatnonzero((found >> np.uint64(32) != tags) & (found != _EMPTY))
        while len(todo) > SCALAR_MAX:
            positions[todo] = (positions[todo] + 1) & mask
            entry = found[todo] = entries[positions[todo]]
            todo = todo[(entry >> np.uint64(32) != tags[todo]) & (entry != _EMPTY)]
        one = entries.data
        for number in todo.tolist():  # long ways, that few have to go
            position, tag = int(positions[number]), int(tags[number])
            while (held := one[position]) != _EMPTY and held >> 32 != tag:
                position = (position + 1) & mask
            found[number] = held
        return (found & np.uint64(_ROW_MASK)).astype(np.int64) - 1

    def _move(self, count: int) -> None:
        """Take the next entries of the old array over."""
        assert self._old is not None
        self._insert(self._rows_in(self._old[self._moved : self._moved + count]))
        self._moved += count
        if self._moved >= len(self._old):
            self._old = None

    @staticmethod
    def _rows_in(entries: Array) -> Array:
        taken = entries[entries > _GONE]
        return (taken & np.uint64(_ROW_MASK)).astype(np.int64) - 1

    def _insert(self, rows: Array) -> None:
        table, entries = self._table, self._entries
        mask = np.uint64(len(entries) - 1)
        hashes = table.hash[rows]
        wanted = _tags(hashes) << np.uint64(32) | (rows + 1).astype(np.uint64)
        positions = hashes & mask
        todo = np.arange(len(rows))
        while len(todo):
            at = positions[todo]
            todo_free = entries[at] == _EMPTY
            entries[at[todo_free]] = wanted[todo[todo_free]]  # of several for one place one stays
            todo = todo[entries[at] != wanted[todo]]
            positions[todo] = (positions[todo] + np.uint64(1)) & mask
        self._filled += len(rows)


def _power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _tag(hashed: int) -> int:
    return hashed >> 32 | 1


def _tags(hashes: Array) -> Array:
    return hashes >> np.uint64(32) | np.uint64(1)


def _entry(hashed: int, row: int) -> int:
    return _tag(hashed) << 32 | row + 1


def hashes_of(names: Array) -> Array:
    """uint64 [names]: what the index puts them by. The same as `_hash_one`, of many."""
    hashes = names[:, 0] * np.uint64(_FACTORS[0])
    for column, factor in enumerate(_FACTORS[1:], start=1):
        hashes += names[:, column] * np.uint64(factor)
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(_MIX_FACTOR)
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _hash_one(epoch: int, key: bytes) -> int:
    a, b, c, d, e = _KEY.unpack(key.ljust(_KEY.size, b"\0"))
    hashed = a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2] + d * _FACTORS[3]
    hashed += e * _FACTORS[4] + last_word(epoch, len(key)) * _FACTORS[5]
    hashed &= _HASH_MASK
    hashed ^= hashed >> 29
    hashed = hashed * _MIX_FACTOR & _HASH_MASK
    mixed: int = hashed ^ hashed >> 32
    return mixed
