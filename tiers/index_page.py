"""A page of the durable index: what it says of the records in neighbouring slots of a segment.

`docs/disk-format.md` is the format. A commit writes whole pages: records that are stored or evicted
one after the other lie beside each other, and together cost what one of them would.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ebbtide.tiers.digest import DIGEST_BYTES
from ebbtide.tiers.record_table import (
    KEY_BYTES_MASK,
    KEY_BYTES_MAX,
    NAME_BYTES,
    WIDTH_BITS,
    Columns,
    epochs_of,
)
from ebbtide.tiers.segments import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ebbtide.tiers.record_table import Array
    from ebbtide.tiers.segments import Bools, Ints

Rows = np.ndarray[Any, np.dtype[np.void]]  # of ROW_TYPE

ROW_TYPE = np.dtype(
    [
        ("key", "V36"),
        ("head", "<u4"),  # codec, and from the second byte on the minute
        ("epoch", "<u4"),
        ("length", "<u4"),
        ("offset", "<u8"),
        ("tail", "<u8"),  # sequence, and in the last byte the width of the key; 0: no record
        ("digest", "V16"),
    ]
)
PAGE_ROWS = 51  # with LMDB's own 16 bytes they fill 4,096
PAGE_BYTES_MAX = PAGE_ROWS * ROW_TYPE.itemsize
NAME_OF_PAGE_BYTES = 8
CODEC_RAW = 0

_CODEC_BITS = 8
_SEQUENCE_BITS = np.uint64(56)
_ROW_BITS = 6  # of a position
_ROW_MASK = (1 << _ROW_BITS) - 1
_WIDTH_AT = 63  # in a row
_PAGE_BITS = 16  # of a page's number: within its segment


class Entry(NamedTuple):
    """One committed record."""

    epoch: int
    key: bytes
    codec: int
    length: int
    offset: int
    sequence: int
    digest: bytes
    minute: int = 0  # when it was stored, see `minute_of`


# -- rows and what they say -----------------------------------------------------------------------


def rows_of(columns: Columns) -> Rows:
    """The rows of these records. Vectorised."""
    rows = np.zeros(len(columns.length), ROW_TYPE)
    named = np.ascontiguousarray(columns.name).view(np.uint8).reshape(-1, NAME_BYTES)
    rows["key"] = np.ascontiguousarray(named[:, :KEY_BYTES_MAX]).view("V36")[:, 0]
    rows["head"] = columns.minute << np.uint32(_CODEC_BITS)
    rows["epoch"] = epochs_of(columns.name)
    rows["length"] = columns.length
    rows["offset"] = columns.offset
    widths = columns.name[:, -1] & np.uint64(KEY_BYTES_MASK)
    rows["tail"] = widths << _SEQUENCE_BITS | columns.sequence.astype(np.uint64)
    rows["digest"] = np.ascontiguousarray(columns.digest).view("V16")[:, 0]
    return rows


def columns_of(rows: Rows) -> Columns:
    """The records in these rows, all of which have one. Vectorised: 0.1 s for a million."""
    named = np.zeros((len(rows), NAME_BYTES), np.uint8)
    named[:, :KEY_BYTES_MAX] = rows["key"].copy().view(np.uint8).reshape(-1, KEY_BYTES_MAX)
    names = named.view(np.uint64)
    names[:, -1] = rows["epoch"].astype(np.uint64) << np.uint64(WIDTH_BITS) | widths_of(rows)
    return Columns(
        name=names,
        length=rows["length"].astype(np.int64),
        offset=rows["offset"].astype(np.int64),
        sequence=sequences_of(rows),
        digest=rows["digest"].copy().view(np.uint8).reshape(-1, DIGEST_BYTES),
        minute=rows["head"] >> np.uint32(_CODEC_BITS),
    )


def empty_rows(offsets: Ints, lengths: Ints) -> Rows:
    """Rows that say: no record any more in the slots of those that were there."""
    rows = np.zeros(len(offsets), ROW_TYPE)
    rows["offset"], rows["length"] = offsets, lengths
    return rows


def rows_of_entries(entries: Iterable[Entry]) -> Rows:
    """The rows of these records. 3 us each."""
    found = list(entries)
    rows = np.zeros(len(found), ROW_TYPE)
    for row, entry in zip(rows, found, strict=True):
        row["key"], row["epoch"] = entry.key.ljust(KEY_BYTES_MAX, b"\0"), entry.epoch
        row["head"] = entry.minute << _CODEC_BITS | entry.codec
        row["length"], row["offset"] = entry.length, entry.offset
        row["tail"] = len(entry.key) << int(_SEQUENCE_BITS) | entry.sequence
        row["digest"] = entry.digest
    return rows


def entries_of(rows: Rows) -> list[Entry]:
    """One by one, what rows with a record say. 2 us each."""
    columns = (codecs_of(rows), sequences_of(rows), widths_of(rows))
    said = zip(*(column.tolist() for column in columns), strict=True)
    return [
        Entry(
            epoch,
            bytes(key)[:width],
            codec,
            length,
            offset,
            sequence,
            bytes(digest),
            head >> _CODEC_BITS,
        )
        for (key, head, epoch, length, offset, _, digest), (codec, sequence, width) in zip(
            rows.tolist(), said, strict=True
        )
    ]


def codecs_of(rows: Rows) -> Ints:
    codecs: Ints = (rows["head"] & np.uint32((1 << _CODEC_BITS) - 1)).astype(np.int64)
    return codecs


def sequences_of(rows: Rows) -> Ints:
    masked = rows["tail"] & ((np.uint64(1) << _SEQUENCE_BITS) - np.uint64(1))
    sequences: Ints = masked.astype(np.int64)
    return sequences


def widths_of(rows: Rows) -> Array:
    """uint64: of the keys, 0 where there is no record."""
    widths: Array = rows["tail"] >> _SEQUENCE_BITS
    return widths


def are_records(rows: Rows) -> Bools:
    """Which rows have one."""
    records: Bools = widths_of(rows) != 0
    return records


def are_formed(rows: Rows) -> Bools:
    """Which rows with a record can have been written by ebbtide."""
    widths = widths_of(rows)
    formed: Bools = (widths <= KEY_BYTES_MAX) & (rows["length"] > 0)
    short = np.flatnonzero(widths < KEY_BYTES_MAX)
    keys = rows["key"][short].copy().view(np.uint8).reshape(-1, KEY_BYTES_MAX)
    padding = np.arange(KEY_BYTES_MAX) >= widths[short, None]
    formed[short] &= ~(keys.astype(np.bool_) & padding).any(1)
    return formed


# -- where a row lies -----------------------------------------------------------------------------


def positions_of(rows: Rows, segment_bytes: int) -> Ints:
    """Per row its place in the index, by offset and length: its page, and the row in it. -1 for a
    slot that cannot be.
    """
    offsets, lengths = rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
    strides = np.maximum(-(-lengths // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES
    segments, inside = np.divmod(offsets, segment_bytes)
    slots, rest = np.divmod(inside, strides)
    pages, numbers = np.divmod(slots, PAGE_ROWS)
    positions = (segments << _PAGE_BITS | pages) << _ROW_BITS | numbers
    possible = (offsets >= 0) & (rest == 0) & (lengths > 0) & (pages < 1 << _PAGE_BITS)
    found: Ints = np.where(possible, positions, -1)
    return found


def positions_in(page: int, count: int) -> Ints:
    """Of the first rows of a page."""
    return np.arange(count, dtype=np.int64) | page << _ROW_BITS


def by_page(positions: Ints, rows: Rows) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """Per page of these positions, which rise: its number, and which of its rows become what."""
    size, packed = ROW_TYPE.itemsize, rows.tobytes()
    changes = (
        (position >> _ROW_BITS, position & _ROW_MASK, packed[at : at + size])
        for position, at in zip(positions.tolist(), range(0, len(packed), size), strict=True)
    )
    for page, mine in groupby(changes, key=itemgetter(0)):
        yield page, [(number, row) for _, number, row in mine]


def name_of_page(page: int) -> bytes:
    """The LMDB key."""
    return page.to_bytes(NAME_OF_PAGE_BYTES, "big")


def page_of_name(name: bytes) -> int:
    """Undoes `name_of_page`."""
    return int.from_bytes(name, "big")


def is_page(name: bytes, value: bytes) -> bool:
    """Whether an LMDB entry has the form of one."""
    named = len(name) == NAME_OF_PAGE_BYTES and not name[0]
    return named and len(value) <= PAGE_BYTES_MAX and len(value) % ROW_TYPE.itemsize == 0


def changed_page(old: bytes, changes: Sequence[tuple[int, bytes]]) -> bytes:
    """A page with these rows in place of those that it had; b"" when no record is left in it."""
    size, page = ROW_TYPE.itemsize, bytearray(old)
    page += bytes(max(0, (changes[-1][0] + 1) * size - len(old)))
    for number, row in changes:
        page[number * size : (number + 1) * size] = row
    end = len(page)
    while end and not page[end - size + _WIDTH_AT]:
        end -= size
    return bytes(page[:end])
