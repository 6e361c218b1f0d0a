"""The index of the disk tier: which record lies in which slot of the slab, and in what state.

Knows rows, slots, states and pins; moves no bytes. The same in LMDB is `tiers.index`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.errors import MisuseError
from ebbtide.tiers.disk_record import DiskRecord, DiskState
from ebbtide.tiers.key_index import KeyIndex
from ebbtide.tiers.record_table import RecordTable, epochs_of
from ebbtide.tiers.segments import SegmentSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.directory import Geometry
    from ebbtide.tiers.disk_record import Put
    from ebbtide.tiers.record_table import Columns
    from ebbtide.tiers.segments import Bools, Ints

LEAVING_ROWS_MIN = 64

_WRITING, _WHOLE = int(DiskState.WRITING), int(DiskState.WHOLE)
_LEAVING, _BAD = int(DiskState.LEAVING), int(DiskState.BAD)


class DiskIndex:
    """Control thread only; O(1) per record where nothing else is said."""

    def __init__(self, geometry: Geometry, records_max: int) -> None:
        self.space: SegmentSpace[int] = SegmentSpace(
            geometry.slab_bytes,
            alignment=geometry.alignment,
            segment_bytes=geometry.segment_bytes,
        )
        self.records_max = records_max
        # Rows of records that are leaving come on top of those that count.
        self.table = RecordTable(records_max + records_max // 4 + LEAVING_ROWS_MIN)
        self._keys = KeyIndex(self.table)
        self.whole = 0  # records that can be read

    # -- looking --------------------------------------------------------------------------------

    @property
    def records(self) -> int:
        """Records that are held or being written."""
        return self._keys.count

    def find(self, epoch: int, key: bytes) -> int:
        """The row of a record that is held or being written, or NO_ROW."""
        return self._keys.find(epoch, key)

    def find_many(self, epoch: int, keys: Sequence[bytes]) -> Ints:
        """The same of many, at a tenth of the cost per key."""
        return self._keys.find_many(epoch, keys)

    def rows_of(self, epoch: int) -> Ints:
        """Of the records of an epoch that are held or being written. O(rows), vectorised."""
        rows = self.table.rows_of(epoch)
        states = self.table.state[rows]
        found: Ints = rows[(states == _WRITING) | (states == _WHOLE)]
        return found

    def whole_of(self) -> dict[int, int]:
        """How many records can be read, by epoch. O(rows), vectorised."""
        used = self.table.used
        epochs = epochs_of(self.table.name[:used])[self.table.state[:used] == _WHOLE]
        epochs, counts = np.unique(epochs, return_counts=True)
        return dict(zip(epochs.tolist(), counts.tolist(), strict=True))

    def records_of(self, epoch: int) -> list[DiskRecord]:
        """The same, with all that is known of each. O(rows), a microsecond per record."""
        return [self.record(row) for row in self.rows_of(epoch).tolist()]

    def is_whole(self, row: int) -> bool:
        """Whether it can be read now."""
        return self.table.state_of[row] == _WHOLE

    def is_pinned(self, row: int) -> bool:
        """Whether somebody keeps its slot."""
        return self.table.pins_of[row] > 0

    def is_bad(self, row: int) -> bool:
        """Whether it has shown wrong bytes."""
        return self.table.state_of[row] == _BAD

    def record(self, row: int) -> DiskRecord:
        """What the row says."""
        table = self.table
        return DiskRecord(
            row,
            table.epoch_of(row),
            table.key(row),
            table.length_of[row],
            table.offset_of[row],
            table.sequence_of[row],
            table.digest_of(row),
            table.minute_of[row],
        )

    def columns(self, rows: Sequence[int]) -> Columns:
        """All that is known of these. Vectorised."""
        return self.table.columns(np.array(rows, np.int64))

    def stride(self, row: int) -> int:
        """Bytes of its slot."""
        alignment = self.space.alignment
        return -(-self.table.length_of[row] // alignment) * alignment

    def strides(self, rows: Ints | Sequence[int]) -> int:
        """Bytes of their slots together. Vectorised."""
        return int(self._strides(np.asarray(rows, np.int64)).sum())

    def _strides(self, rows: Ints) -> Ints:
        lengths, alignment = self.table.length[rows].astype(np.int64), self.space.alignment
        strides: Ints = -(-lengths // alignment) * alignment
        return strides

    # -- arriving -------------------------------------------------------------------------------

    def place(self, puts: Sequence[Put], first_sequence: int, minute: int) -> list[int]:
        """Rows and slots for records that are to be written: for as many as there is room for.

        All are of one epoch and one length, with keys of one width that nobody holds. 5 us for
        each of many.
        """
        first, table, shares = puts[0], self.table, self.space.shares
        rows = table.take(max(0, min(len(puts), self.records_max - self.records, table.left)))
        offsets = self.space.place_many(rows, first.length, shares.order(first.epoch))
        for row in rows[len(offsets) :]:
            table.free(row)
        placed, puts = rows[: len(offsets)], puts[: len(offsets)]
        if placed:
            table.fill(
                placed,
                first.epoch,
                [put.key for put in puts],
                length=first.length,
                offsets=offsets,
                sequences=range(first_sequence, first_sequence + len(placed)),
                digests=[put.digest for put in puts],
                minute=minute,
                state=_WRITING,
            )
            self._keys.add(placed)
            shares.take(first.epoch, self.stride(placed[0]) * len(placed))
        return placed

    def written(self, rows: Sequence[int]) -> None:
        """They can be read, and evicted, from now on."""
        at = np.array(rows, np.int64)
        self.table.state[at] = _WHOLE
        self.space.expose_many(self.table.offset[at].astype(np.int64))
        self.whole += len(rows)

    def adopt(self, columns: Columns, order: Ints) -> Bools:
        """Committed records, at opening, in a new index. Returns which of them could be.

        Where two cannot both be, the one that comes first in `columns` is. `order`: places in
        `columns`, coldest first. Vectorised: a second for a million.
        """
        table, count = self.table, min(len(columns.length), self.table.rows_max)
        placed = np.zeros(len(columns.length), np.bool_)
        table.adopt(columns.take(np.arange(count)), _WHOLE)
        sizes, offsets = columns.length[:count], columns.offset[:count]
        epochs = epochs_of(columns.name[:count]).astype(np.int64)
        orders = self._orders(epochs)
        placed[:count] = self.space.place_all(range(count), sizes, offsets, orders)
        for row in np.flatnonzero(~placed[:count]).tolist():
            table.free(row)
        self._keys.add_many(np.flatnonzero(placed))
        self.whole = int(placed.sum())
        self.space.expose_all(columns.offset[order[placed[order]]])
        for epoch in np.unique(epochs[placed[:count]]).tolist():
            rows = np.flatnonzero((epochs == epoch) & placed[:count])
            self.space.shares.take(epoch, self.strides(rows))
        return placed

    def _orders(self, epochs: Ints) -> Ints | None:
        """Per row its order of eviction; None: all are of the common one."""
        different, which = np.unique(epochs, return_inverse=True)
        orders = np.array([self.space.shares.order(e) for e in different.tolist()], np.int64)
        return orders[which] if orders.any() else None

    def expose(self, row: int) -> None:
        """It may be evicted from now on, as the most recent."""
        self.space.expose(self.table.offset_of[row])

    # -- staying --------------------------------------------------------------------------------

    def touch(self, row: int) -> None:
        """Somebody asked for it."""
        self.space.touch(self.table.offset_of[row])

    def pin(self, record: DiskRecord, *, hide: bool = True) -> None:
        """Keep the slot until `unpin`. Raises MisuseError for a record that has gone.

        With `hide` False the record keeps its place in the order of eviction, for whoever looks
        without using it: it may be evicted meanwhile, and its slot goes with the last pin.
        """
        self.check_present(record)
        if hide:
            self.space.hide(record.offset)
        self.table.pins_of[record.row] += 1

    def hold(self, epoch: int) -> Ints:
        """Pin every slot that has an epoch's bytes and is not on its way to be handed out again;
        their rows. Also slots that are being written, and bad ones. O(rows), vectorised.
        """
        rows = self.table.rows_of(epoch)
        going = (self.table.state[rows] == _LEAVING) & (self.table.pins[rows] == 0)
        held: Ints = rows[~going]
        self.table.pins[held] += 1
        return held

    def held_alone(self, rows: Ints) -> Bools:
        """Which of these rows have left the index and are kept by one pin only. Vectorised."""
        left = (self.table.state[rows] == _LEAVING) | (self.table.state[rows] == _BAD)
        alone: Bools = left & (self.table.pins[rows] == 1)
        return alone

    def unpin(self, row: int) -> bool:
        """Give one pin back. True: it was the last, and the slot is to be freed."""
        table = self.table
        table.pins_of[row] -= 1
        if table.pins_of[row]:
            return False
        if table.state_of[row] == _WHOLE:
            self.expose(row)
        return bool(table.state_of[row] == _LEAVING)

    def check_present(self, record: DiskRecord) -> None:
        """Raise MisuseError unless the record is still what it was when it was found."""
        row = record.row
        if not self.is_whole(row) or self.table.sequence_of[row] != record.sequence:
            raise MisuseError("The record has gone since it was found", row=row)

    def recency(self) -> Callable[[], Ints]:
        """A snapshot: what it returns gives the sequences of all records, coldest first, in
        whatever thread. 10 ms for a million records, and a second in that thread.
        """
        order, used = self.space.recency(), self.table.used
        held = self.table.state[:used] == _WHOLE
        sequences = self.table.sequence[:used].astype(np.int64)

        def coldest_first() -> Ints:
            rows = np.array(order(), np.int64)
            found: Ints = sequences[rows[held[rows]]]
            return found

        return coldest_first

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, rows: Sequence[int], *, bad: bool = False) -> list[int]:
        """Nobody finds them any more. Returns those that nobody reads either: their slots are to be
        freed.

        `bad`: their bytes were wrong, and their slots are not used again before the next opening.
        """
        table, at = self.table, np.array(rows, np.int64)
        self._keys.remove(rows)
        self._give(at)
        self.whole -= int(np.count_nonzero(table.state[at] == _WHOLE))
        table.state[at] = _BAD if bad else _LEAVING
        self.space.hide_many(table.offset[at].astype(np.int64))
        free: list[int] = at[table.pins[at] == 0].tolist()
        return [] if bad else free

    def _give(self, rows: Ints) -> None:
        """They do not count any more for their epochs."""
        epochs, strides = epochs_of(self.table.name[rows]).tolist(), self._strides(rows).tolist()
        by_epoch = Counter[int]()
        for epoch, stride in zip(epochs, strides, strict=True):
            by_epoch[epoch] += stride
        for epoch, stride in by_epoch.items():
            self.space.shares.give(epoch, stride)

    def condemn(self, row: int) -> None:
        """One that is leaving already has shown wrong bytes: its slot stays."""
        self.table.state_of[row] = _BAD

    def forget(self, row: int) -> None:
        """It was never written after all: no committed entry ever named its slot."""
        self._keys.remove([row])
        self.space.shares.give(self.table.epoch_of(row), self.stride(row))
        self.free([row])

    def free(self, rows: Sequence[int]) -> None:
        """Hand rows and slots out again."""
        table, at = self.table, np.array(rows, np.int64)
        lengths, offsets = table.length[at].astype(np.int64), table.offset[at].astype(np.int64)
        self.space.remove_many(rows, lengths, offsets)
        for row in rows:
            table.free(row)

    def check_integrity(self) -> None:
        """Raise MisuseError when slots, rows and keys contradict each other. O(slots)."""
        self.space.check_integrity()
        table = self.table
        owners = sorted(self.space.owners())
        in_use = np.flatnonzero(table.state[: table.used]).tolist()
        if owners != in_use:
            raise MisuseError("Rows and slots disagree", rows=len(in_use), slots=len(owners))
        if sum(table.length_of[row] for row in owners) != self.space.payload_bytes:
            raise MisuseError("The payload is miscounted", claimed=self.space.payload_bytes)
        live = [row for row in owners if table.state_of[row] in (_WRITING, _WHOLE)]
        if self.whole != sum(self.is_whole(row) for row in owners):
            raise MisuseError("The records that can be read are miscounted", claimed=self.whole)
        found = [self.find(table.epoch_of(row), table.key(row)) for row in live]
        used = Counter[int]()
        for row in live:
            used[table.epoch_of(row)] += self.stride(row)
        if used != self.space.shares.used_of:
            raise MisuseError("The share of a namespace is miscounted", counted=used)
        if live != found or len(live) != self.records:
            raise MisuseError("The disk index and the slots disagree", records=self.records)
