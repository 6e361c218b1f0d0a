"""The records of a disk tier that serves, read back and verified: `fsck` beside a running store.

Whoever checks asks for one small piece after the other and so sets the pace; between two pieces the
store has forgotten it. Records keep their place in the order of eviction: to be checked is no use.
"""

from __future__ import annotations

import mmap
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.errors import EbbtideError, NoSpaceError, TierUnavailableError
from ebbtide.tiers.disk_record import DiskState, Get
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.disk_record import DiskRecord
    from ebbtide.tiers.store import Store

    Reply = Callable[[dict[str, Any] | EbbtideError], None]

RECORDS_MAX = 16  # of one piece
BYTES_MAX = 4 << 20  # of one piece, or one record
ROWS_MAX = 8192  # looked at for one piece
WAITING_MAX = 8

_BAD = {Miss.CORRUPT: "corrupt", Miss.IO_ERROR: "unreadable"}


class Checks:
    """The store's part for checking. One piece at a time, others wait. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[int, Reply]] = deque()
        self._running = False

    def check(self, start: int, reply: Reply) -> None:
        """Verify the next few records, from a row of the tier's table on; `reply` once, later.

        The report has counts of this piece, and `next`: where to go on, None at the end. A record
        that does not verify is discarded, as by every other read.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise NoSpaceError(
                "Too many commands check this store", next_step="Wait until one has ended."
            )
        self._waiting.append((start, reply))
        self._start_next()

    def _start_next(self) -> None:
        if self._running or not self._waiting:
            return
        start, reply = self._waiting.popleft()
        disk = self._store.disk
        if disk is None or disk.down:
            reply(_unavailable(disk))
            self._start_next()
            return
        self._running = True
        records, following = _piece(disk, start)
        self._read(disk, records, lambda results: self._ended(disk, results, following, reply))

    def _read(
        self,
        disk: DiskTier,
        records: list[DiskRecord],
        done: Callable[[list[tuple[DiskRecord, Miss | None]]], None],
    ) -> None:
        results: list[tuple[DiskRecord, Miss | None]] = []
        if not records:
            self._store.runtime.call_later(0.0, lambda: done(results))
            return
        strides = [disk.space.stride(record.length) for record in records]
        scratch, at = memoryview(mmap.mmap(-1, sum(strides))), 0  # aligned for direct I/O

        def read(record: DiskRecord, outcomes: list[Miss | None]) -> None:
            results.append((record, outcomes[0]))
            if len(results) == len(records):
                done(results)

        for record, stride in zip(records, strides, strict=True):
            disk.pin(record, hide=False)
            view = scratch[at : at + stride]
            at += stride
            # One by one: a bad sector must not cost the neighbours, as it would in a merged run.
            disk.get([Get(record, view)], partial(read, record))

    def _ended(
        self,
        disk: DiskTier,
        results: list[tuple[DiskRecord, Miss | None]],
        following: int | None,
        reply: Reply,
    ) -> None:
        self._running = False
        reply(_unavailable(disk) if disk.down else _report(disk, results, following))
        self._start_next()


def _piece(disk: DiskTier, start: int) -> tuple[list[DiskRecord], int | None]:
    """The next whole records from a row on, and the row behind them; None: it was the last."""
    table = disk.index.table
    if start >= table.used:
        return [], None
    end = min(start + ROWS_MAX, table.used)
    whole = np.flatnonzero(table.state[start:end] == DiskState.WHOLE) + start
    records: list[DiskRecord] = []
    room = BYTES_MAX
    for row in whole.tolist():
        stride = disk.index.stride(row)
        if records and (len(records) == RECORDS_MAX or stride > room):
            return records, row
        room -= stride
        records.append(disk.index.record(row))
    return records, end if end < table.used else None


def _report(
    disk: DiskTier, results: list[tuple[DiskRecord, Miss | None]], following: int | None
) -> dict[str, Any]:
    sound = [record for record, failure in results if failure is None]
    bad: dict[str, int] = {}
    for _, failure in results:
        if failure in _BAD:
            bad[_BAD[failure]] = bad.get(_BAD[failure], 0) + 1
    return {
        "records": len(results),
        "sound": len(sound),
        "bad": bad,
        "garbage": sum(failure is Miss.RESET for _, failure in results),
        "payload_bytes": sum(record.length for record in sound),
        "slot_bytes": sum(disk.space.stride(record.length) for record in sound),
        "next": following,
        "held": disk.records,
        "namespaces": len(disk.digests),
        "slab_bytes": disk.space.capacity_bytes,
    }


def _unavailable(disk: DiskTier | None) -> TierUnavailableError:
    if disk is None:
        return TierUnavailableError("The store has no disk tier")
    return TierUnavailableError("The disk tier is out of service", reason=disk.down)
