"""Writing to the disk tier: slots for records, room for those that come next, runs of payload.

Control thread only; payload is written in the runtime's I/O threads. No call waits, and none deals
with more than `PUTS_AT_A_TIME` records: whatever else the thread has to do comes between.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from ebbtide.tiers.index import minute_of
from ebbtide.tiers.index_page import rows_of
from ebbtide.tiers.key_index import NO_ROW
from ebbtide.tiers.reads_first import BESIDE_READS_BYTES
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.record_table import KEY_BYTES_MAX
from ebbtide.tiers.runs import RUN_BYTES_MAX, merge
from ebbtide.tiers.runtime import WRITE
from ebbtide.tiers.shares import COMMON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.commit import Committer
    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.disk_record import Put
    from ebbtide.tiers.runs import Outcomes
    from ebbtide.tiers.runtime import Runtime

PUTS_AT_A_TIME, PUTS_BESIDE_READS = 128, 64  # two milliseconds, and one while somebody reads
WRITE_PIECE_BYTES = 4 << 20  # a drive as slow as 20 MB/s takes it in a fifth of a second
TRIM_PIECE = 64
SPARE_SHARE = 16  # slots worth a sixteenth of the slab are evicted ahead, so that puts rarely wait


class DiskWriter:
    """The writing half of a `DiskTier`."""

    def __init__(self, tier: DiskTier, runtime: Runtime, committer: Committer) -> None:
        self._tier = tier
        self._index = tier.index
        self._space = tier.space
        self._runtime = runtime
        self._committer = committer
        self._waiting: deque[Put] = deque()  # puts without a slot yet
        self._putting = COMMON  # epoch of the latest put
        self._goes_on = False  # a call is due that deals with more of them

    @property
    def idle(self) -> bool:
        """Every put has a slot."""
        return not self._waiting

    def put(self, puts: Sequence[Put]) -> None:
        """See `DiskTier.put`."""
        self._waiting.extend(puts)
        if not self._goes_on:
            self.place_waiting()

    def place_waiting(self) -> None:
        """Write what there are slots for, of the first that wait; after all that may free one."""
        placed: list[tuple[Put, int]] = []
        wanted = 0
        at_a_time = PUTS_BESIDE_READS if self._tier.reads_first.reading else PUTS_AT_A_TIME
        while self._waiting and wanted < at_a_time:
            alike = self._next_alike(at_a_time - wanted)
            if not alike:
                continue
            wanted += len(alike)
            rows = self._place(alike)
            placed += zip(alike, rows, strict=False)
            for _ in rows:
                self._waiting.popleft()
            if len(rows) < len(alike):
                break  # whatever frees a slot comes back here
        else:
            self._go_on()
        self._write(placed)
        self._evict_ahead()

    def fail_all(self) -> None:
        """The tier is down."""
        waiting, self._waiting = self._waiting, deque()
        for put in waiting:
            put.done(Miss.IO_ERROR)

    def _go_on(self) -> None:
        if self._waiting and not self._goes_on:
            self._goes_on = True
            self._runtime.call_later(0.0, self._resume)

    def _resume(self) -> None:
        self._goes_on = False
        self.place_waiting()

    # -- slots ----------------------------------------------------------------------------------

    def _next_alike(self, at_most: int) -> list[Put]:
        """The first puts of one epoch, length and width of key, each key once, that are to be
        written. Those before them that are not are done; none: there were only such.
        """
        first = self._waiting[0]
        if not self._space.shares.is_common:
            at_most = 1  # each makes its own room below a cap
        alike: dict[bytes, Put] = {}
        for put in islice(self._waiting, at_most):
            if (put.epoch, put.length, len(put.key)) != (first.epoch, first.length, len(first.key)):
                break
            if put.key in alike:
                break
            alike[put.key] = put
        refused = self._refused(first)
        if refused is not None:
            for put in alike.values():
                self._waiting.popleft()
                put.done(refused)
            return []
        rows = self._index.find_many(first.epoch, list(alike)).tolist()
        if max(rows) == NO_ROW:
            return list(alike.values())
        wanted = []
        for put, row in zip(alike.values(), rows, strict=True):
            self._waiting.popleft()
            if row == NO_ROW:
                wanted.append(put)
            else:
                put.done(None)
        self._waiting.extendleft(reversed(wanted))
        return wanted

    def _refused(self, put: Put) -> Miss | None:
        tier = self._tier
        if tier.down:
            return Miss.IO_ERROR
        if put.epoch not in tier.digests:
            return Miss.RESET
        if not tier.takes(put.epoch, put.length):
            return Miss.OVER_QUOTA
        return Miss.NOT_ADMITTED if len(put.key) > KEY_BYTES_MAX else None

    def _place(self, alike: Sequence[Put]) -> list[int]:
        """Rows for the first of them."""
        first, tier = alike[0], self._tier
        self._putting = first.epoch
        if not self._make_room_below_cap(first):
            return []  # its own records are being written or read
        rows = self._index.place(alike, tier.sequence + 1, minute_of(self._runtime.wall()))
        tier.sequence += len(rows)
        if len(rows) < len(alike):
            self._evict_for(alike[len(rows)])
        return rows

    # -- room -----------------------------------------------------------------------------------

    def _make_room_below_cap(self, put: Put) -> bool:
        """See `SegmentSpace.make_room_below_cap`."""
        return self._space.make_room_below_cap(
            put.epoch, put.length, lambda row: self._tier.evict([row], put.epoch, Miss.OVER_QUOTA)
        )

    def _evict_for(self, put: Put) -> None:
        """Have a commit make room for one record, unless one that will is already under way."""
        if not self._tier.freeing_bytes:
            victims = self._space.victims(put.length, sake=put.epoch)
            if not victims:  # the number of records is the bound, and this size has none
                coldest = self._space.coldest_lawful(put.epoch)
                victims = [] if coldest is None else [coldest]
            self._tier.evict(victims, put.epoch)
        self._committer.hurry()

    def _evict_ahead(self) -> None:
        tier, space = self._tier, self._space
        if not space.classes or tier.down:
            return
        self._trim()
        spare = space.capacity_bytes // SPARE_SHARE
        over_records = tier.records - (tier.records_max - tier.records_max // SPARE_SHARE)
        free = space.capacity_bytes - space.used_bytes + tier.freeing_bytes + tier.held_bytes
        if free >= spare and over_records <= 0:
            return
        stride = next(reversed(space.classes))
        while free < spare or over_records > 0:
            count = max(-(-(spare - free) // stride), over_records)
            victims = space.victims(stride, sake=self._putting, count=count, strict=True)
            if not victims:
                return
            free += sum(map(self._index.stride, victims))
            over_records -= len(victims)
            tier.evict(victims, self._putting)

    def _trim(self) -> None:
        """Namespaces whose cap was lowered give up a few of their coldest with every put."""
        shares = self._space.shares
        for epoch in shares.over_cap():
            for _ in range(TRIM_PIECE):
                row = self._space.coldest_of((epoch,))
                if row is None or shares.excess(epoch, 0) <= 0:
                    break
                self._tier.evict([row], epoch, Miss.OVER_QUOTA)

    # -- payload --------------------------------------------------------------------------------

    def _write(self, placed: Sequence[tuple[Put, int]]) -> None:
        """In pieces, in order: what a slow drive has taken counts before the rest is there."""
        piece: list[tuple[Put, int]] = []
        size_bytes = 0
        for one in placed:
            piece.append(one)
            size_bytes += len(one[0].view)
            if size_bytes >= WRITE_PIECE_BYTES:
                self._write_piece(piece)
                piece, size_bytes = [], 0
        if piece:
            self._write_piece(piece)

    def _write_piece(self, placed: Sequence[tuple[Put, int]]) -> None:
        offset_of, slab = self._index.table.offset_of, self._tier.slab
        reads_first = self._tier.reads_first
        runs, members = merge([(offset_of[row], put.view) for put, row in placed])

        def write(share: slice) -> Outcomes:
            with reads_first.write(sum(run.size_bytes for run in runs[share])):
                return slab.write_runs(runs[share])

        self._tier.calls.start_runs(
            WRITE,
            write,
            runs,
            lambda outcomes: self._written(placed, members, outcomes),
            bytes_max=BESIDE_READS_BYTES if reads_first.reading else RUN_BYTES_MAX,
        )

    def _written(
        self,
        placed: Sequence[tuple[Put, int]],
        members: list[list[int]],
        outcomes: Outcomes,
    ) -> None:
        failed: set[int] = set()
        for numbers, error in zip(members, outcomes, strict=True):
            if error is not None:
                failed.update(numbers)
                self._tier.go_down(f"a write failed: {error}")
        whole: list[tuple[Put, int]] = []
        for number, (put, row) in enumerate(placed):
            if number not in failed and put.epoch in self._tier.digests and not self._tier.down:
                whole.append((put, row))
                continue
            if self._index.is_pinned(row):  # by a purge, which overwrites it first
                self._index.leave([row])
            else:
                self._index.forget(row)
            gone = put.epoch not in self._tier.digests and number not in failed
            put.done(Miss.RESET if gone else Miss.IO_ERROR)
        if whole:
            self._settle(whole)
        if self._waiting:  # a write whose epoch was reset has freed its slot without a commit
            self.place_waiting()

    def _settle(self, whole: list[tuple[Put, int]]) -> None:
        rows = [row for _, row in whole]
        self._index.written(rows)
        written_bytes = sum(len(put.view) for put, _ in whole)
        self._tier.write_bytes += written_bytes
        self._committer.add(rows_of(self._index.columns(rows)), written_bytes)
        for put, _ in whole:
            self._tier.on_written(put.epoch)
            put.done(None)
