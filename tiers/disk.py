"""The disk tier: records in slab slots, an index in RAM that serves, an index in LMDB that lasts.

The write order is the whole point (`docs/disk-format.md`):

1. payload is written to slots that no committed entry names;
2. fdatasync of the slab;
3. one LMDB commit with all additions and removals of the batch;
4. only then are the slots that the batch freed handed out again.

Control thread only; I/O runs in the runtime's pools. No call waits.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.tiers.commit import Committer
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.disk_index import DiskIndex
from ebbtide.tiers.disk_writer import DiskWriter
from ebbtide.tiers.key_index import NO_ROW
from ebbtide.tiers.quotas import Quotas
from ebbtide.tiers.reads_first import ReadsFirst
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.record_table import keys_of
from ebbtide.tiers.runs import merge
from ebbtide.tiers.runtime import READ
from ebbtide.tiers.shares import COMMON
from ebbtide.tiers.slab_calls import SlabCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.directory import Geometry
    from ebbtide.tiers.disk_record import DiskRecord, Get, Put
    from ebbtide.tiers.index import DurableIndex, StoredNamespace
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.record_table import Columns
    from ebbtide.tiers.runs import Outcomes
    from ebbtide.tiers.runtime import Runtime
    from ebbtide.tiers.segments import Bools, Ints
    from ebbtide.tiers.slab import Slab

_log = logging.getLogger("ebbtide.tiers.disk")

RESET_PIECE = 64  # records: a millisecond or two
QUARANTINE_SHARE = 16  # of the slab; a drive with more bad slots is out of service


class DiskTier:
    """The tier over one open directory. Built by `open_disk`."""

    def __init__(
        self,
        runtime: Runtime,
        slab: Slab,
        durable_index: DurableIndex,
        *,
        geometry: Geometry,
        commit_batch_bytes: int,
        commit_interval_s: float,
        records_max: int | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.geometry = geometry
        self.records_max = min(records_max or geometry.records_max, geometry.records_max)
        self.index = DiskIndex(geometry, self.records_max)
        self.space = self.index.space
        self.quotas = quotas or Quotas()
        self.sequence = 0
        self.down: str | None = None  # why the tier is out of service
        self.corrupt = 0
        self.quarantined_bytes = 0  # slots that have shown wrong bytes: not used again
        self.evicted = 0
        self.lost_batches = 0
        self.write_bytes = 0
        self.read_bytes = 0
        self.on_written: Callable[[int], None] = lambda epoch: None  # a record can be read now
        # Present epoch and key of a record that cannot any more; why, and for which epoch's sake.
        self.on_left: Callable[[int, bytes, Miss, int], None] = lambda epoch, key, why, sake: None
        self._leaving: dict[int, list[int]] = {}  # by epoch: those before it, not gone yet
        self.on_lost: Callable[[int, bytes], None] = lambda epoch, key: None
        self.digests: dict[int, bytes] = {}  # namespace digest by epoch
        self._runtime = runtime
        self.slab = slab
        self.freeing_bytes = 0  # slots whose removal waits for a commit
        self.held_bytes = 0  # slots that a purge will give back: no reason to evict others
        self.reads_first = ReadsFirst()
        self.calls = SlabCalls(runtime, slab)
        self._committer = Committer(
            runtime,
            slab,
            durable_index,
            batch_bytes=commit_batch_bytes,
            interval_s=commit_interval_s,
            on_committed=self._committed,
            on_failed=self._commit_failed,
        )
        self._writer = DiskWriter(self, runtime, self._committer)

    # -- lookup ---------------------------------------------------------------------------------

    @property
    def records(self) -> int:
        """Records that are held or being written."""
        return self.index.records

    def find(self, epoch: int, key: bytes) -> DiskRecord | None:
        """A record that can be read now, or None."""
        row = NO_ROW if self.down else self.index.find(epoch, key)
        return self.index.record(row) if row != NO_ROW and self.index.is_whole(row) else None

    def holds(self, epoch: int, key: bytes) -> bool:
        """Whether the record is held or being written, also by a tier that is down."""
        return self.index.find(epoch, key) != NO_ROW

    def keys(self, epoch: int) -> list[bytes]:
        """The keys of the epoch's records. O(records)."""
        return [self.index.table.key(row) for row in self.index.rows_of(epoch).tolist()]

    # -- namespaces -----------------------------------------------------------------------------

    def adopt_namespace(self, namespace: StoredNamespace) -> None:
        """Make an epoch known; it is committed with the next batch, before any of its records."""
        self.know(namespace)
        self._committer.put_namespace(namespace)

    def know(self, namespace: StoredNamespace | Namespace) -> None:
        """Its records may be here, within its quota of this moment."""
        epoch, digest = namespace.epoch, namespace.digest
        self.digests[epoch] = digest
        self.quotas.assign(self.space.shares, epoch, digest, namespace.descriptor)

    def takes(self, epoch: int, length: int) -> bool:
        """Whether the tier can ever hold a record of so many bytes for the epoch."""
        if length > self.space.largest_bytes:
            return False
        if self.quarantined_bytes and not self.space.can_hold(length):
            return False  # a segment with a slot that is never freed serves no other size
        return self.space.fits_cap(epoch, length)

    def reset(
        self, old_epoch: int, namespace: StoredNamespace, done: Callable[[bool], None]
    ) -> None:
        """Forget an epoch. `done(True)` when no crash can bring it back.

        1. From now on nothing is found of it: the namespace has another epoch.
        2. A commit says so, and `done` is called: an opening drops what belongs to an epoch that no
           namespace has.
        3. Its records give their slots back in small pieces, meanwhile and later.
        """
        # Records still being written find their epoch gone when the write returns.
        self.digests.pop(old_epoch, None)
        self.space.shares.retire(old_epoch)
        self.adopt_namespace(namespace)
        self._committer.flush(lambda ok: done(ok and not self.down))
        self._leaving[namespace.epoch] = [*self._leaving.pop(old_epoch, ()), old_epoch]
        rows = self.index.rows_of(old_epoch)
        self._leave_some(rows, self.index.table.sequence[rows].astype(np.int64), old_epoch)

    def was_reset(self, epoch: int, key: bytes) -> bool:
        """Whether the key's record is just leaving, after the reset that began this epoch."""
        return any(self.holds(old, key) for old in self._leaving.get(epoch, ()))

    def _present_epoch(self, epoch: int) -> int:
        """Of the namespace that has this one, or had it before a reset."""
        if epoch in self.digests:
            return epoch
        return next(new for new, olds in self._leaving.items() if epoch in olds)

    def _leave_some(self, rows: Ints, sequences: Ints, old_epoch: int) -> None:
        """The first few of a reset, where they are still those records, and the rest soon."""
        table = self.index.table
        some = slice(0, RESET_PIECE)
        those = zip(rows[some].tolist(), sequences[some].tolist(), strict=True)
        still = (row for row, sequence in those if table.sequence_of[row] == sequence)
        self._leave(list(filter(self.index.is_whole, still)), Miss.RESET)
        if len(rows) > RESET_PIECE:
            rest = partial(self._leave_some, rows[RESET_PIECE:], sequences[RESET_PIECE:], old_epoch)
            if not self.down:  # else the next tier never hears of them
                self._runtime.call_later(0.0, rest)
            return
        epoch = self._present_epoch(old_epoch)
        self._leaving[epoch].remove(old_epoch)
        if not self._leaving[epoch]:
            del self._leaving[epoch]

    def adopt(self, columns: Columns, order: Ints) -> Bools:
        """Committed records, at opening. See `DiskIndex.adopt`."""
        self.sequence = int(columns.sequence.max(initial=0))
        return self.index.adopt(columns, order)

    # -- writing --------------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> None:
        """Write records; each `done` is called once. A key that is held already is done at once.

        The views must stay unchanged until then. Puts without a free slot wait for the commit
        that frees evicted ones.
        """
        self._writer.put(puts)

    # -- reading --------------------------------------------------------------------------------

    def get(self, gets: Sequence[Get], done: Callable[[list[Miss | None]], None]) -> None:
        """Read and verify records into slots; `done(results)`, None for bytes that are right.

        Each record comes with one `pin` of the caller's, which this gives back. A record that does
        not verify is discarded and counted: it is a miss from now on.
        """
        seeds = [record_seed(self.digests[get.record.epoch], get.record.key) for get in gets]
        runs, members = merge([(get.record.offset, get.view) for get in gets])
        good = bytearray(len(gets))

        def read(share: slice) -> Outcomes:
            outcomes = self.slab.read_runs(runs[share])
            for numbers, error in zip(members[share], outcomes, strict=True):
                for number in numbers if error is None else ():
                    record, view = gets[number]
                    if record_digest(view[: record.length], seeds[number]) == record.digest:
                        good[number] = 1
            return outcomes

        def finished(outcomes: Outcomes) -> None:
            self.reads_first.read_ended()
            results: list[Miss | None] = [None] * len(gets)
            for numbers, error in zip(members, outcomes, strict=True):
                for number in numbers:
                    results[number] = self._settle_read(gets[number].record, error, good[number])
            _report_failures(results, outcomes)
            done(results)
            if not self._writer.idle:  # what the read had pinned may go now
                self._writer.place_waiting()

        self.reads_first.read_began()
        self.calls.start_runs(READ, read, runs, finished)

    def _settle_read(
        self, record: DiskRecord, error: BaseException | None, good: int
    ) -> Miss | None:
        row, corrupt = record.row, error is None and not good
        present = self.index.is_whole(row)
        if corrupt and not self.index.is_bad(row):
            self._quarantine(row)
        elif not good and present:
            self._leave([row], Miss.IO_ERROR)
        self._unpin(row)
        if good:
            self.read_bytes += self.index.stride(row)
            return Miss.RESET if record.epoch not in self.digests else None
        return Miss.CORRUPT if corrupt else Miss.IO_ERROR

    def pin(self, record: DiskRecord, *, hide: bool = True) -> None:
        """Keep the slot for a `get`, from the moment when the record was found."""
        self.index.pin(record, hide=hide)

    def _unpin(self, row: int) -> None:
        if self.index.unpin(row):
            self._free_after_commit([row])

    def hold(self, epoch: int) -> Ints:
        """Pin all that an epoch has, for a purge. See `DiskIndex.hold`."""
        rows = self.index.hold(epoch)
        self.held_bytes += self.index.strides(rows)
        return rows

    def give_back(self, rows: Ints) -> None:
        """Undo `hold`: slots of records that have left are handed out after the next commit."""
        self.held_bytes -= self.index.strides(rows)
        for row in rows.tolist():
            self._unpin(row)

    # -- leaving --------------------------------------------------------------------------------

    def discard(self, record: DiskRecord) -> None:
        """No memory takes it. Out of the serving index now, out of the durable one with the next
        commit.
        """
        self.index.check_present(record)
        self._leave([record.row], Miss.NOT_ADMITTED)

    def evict(self, rows: Sequence[int], sake: int, why: Miss = Miss.EVICTED) -> None:
        """Their slots are for others: for the sake of an epoch, and why."""
        self.evicted += self._leave(rows, why, sake)

    def _leave(
        self, rows: Sequence[int], why: Miss, sake: int = COMMON, *, bad: bool = False
    ) -> int:
        """Out of both indices. Returns how many leave for that reason: what was reset leaves for
        that alone.
        """
        if not rows:
            return 0
        leaving = self.index.columns(rows)
        names = keys_of(leaving)
        free = self.index.leave(rows, bad=bad)
        self._committer.remove(leaving.offset, leaving.length)
        if free:
            self._free_after_commit(free)
        count = 0
        for epoch, key in names:
            present = self._present_epoch(epoch)
            count += present == epoch
            self.on_left(present, key, why if present == epoch else Miss.RESET, sake)
        return count

    def _quarantine(self, row: int) -> None:
        """Use the slot no more before the directory is opened again."""
        self.corrupt += 1
        self.quarantined_bytes += self.index.stride(row)
        self.space.spoil(self.index.table.offset_of[row])
        if self.index.is_whole(row):
            self._leave([row], Miss.CORRUPT, bad=True)
        else:
            self.index.condemn(row)
        if self.quarantined_bytes > self.space.capacity_bytes // QUARANTINE_SHARE:
            self.go_down(f"{self.quarantined_bytes} bytes of the drive hold what nobody wrote")

    def _free_after_commit(self, rows: Sequence[int]) -> None:
        self.freeing_bytes += self.index.strides(rows)
        self._committer.free_after(rows)

    def _committed(self, freed: list[int]) -> None:
        self.freeing_bytes -= self.index.strides(freed)
        self.index.free(freed)
        if not self._writer.idle:
            self._writer.place_waiting()

    def _commit_failed(self, error: BaseException, added: Columns) -> None:
        lost = keys_of(added)
        self.lost_batches += bool(lost)
        self.go_down(f"a commit failed: {error}")
        for epoch, key in lost:
            self.on_lost(epoch, key)

    # -- health ---------------------------------------------------------------------------------

    def go_down(self, reason: str) -> None:
        """Out of service, for good: only another tier over newly opened files serves again.

        What was committed stays on the drive; what was not is lost, and said to be.
        """
        if self.down is None:
            self.down = reason
            _log.error("The disk tier is down, the rest works on: %s", reason)
        self._committer.break_off(reason)
        self._writer.fail_all()

    def waiting_since(self) -> float | None:
        """Since when (runtime seconds) the drive owes the oldest answer; None: it owes nothing."""
        both = (self.calls.since, self._committer.running_since)
        return min((since for since in both if since is not None), default=None)

    @property
    def quiet(self) -> bool:
        """No thread touches the files, and none will."""
        return self.calls.since is None and self.idle

    def abandon(self) -> None:
        """Close the files of a tier that is down and `quiet`. Idempotent."""
        self.close(clean=False)

    # -- closing --------------------------------------------------------------------------------

    def flush(self, done: Callable[[bool], None]) -> None:
        """`done(True)` when everything written or removed before this call is committed."""
        self._committer.flush(done)

    def save_recency(self, done: Callable[[bool], None]) -> None:
        """Save the order of eviction, so that a restart goes on with it. See `recency`."""
        self._committer.save_recency(self.index.recency(), done)

    @property
    def idle(self) -> bool:
        """Nothing is waiting, being written or uncommitted."""
        return self._writer.idle and self._committer.idle

    def close(self, clean: bool) -> None:
        """Close the files. Only when `idle`, or when what is under way is to be lost."""
        self._committer.close(clean and not self.down)
        self.slab.close()

    def check_integrity(self) -> None:
        """See `DiskIndex.check_integrity`."""
        self.index.check_integrity()


def _report_failures(results: Sequence[Miss | None], outcomes: Outcomes) -> None:
    """One line for a batch, however many of its records failed."""
    if Miss.IO_ERROR in results:
        reason = next((str(error) for error in outcomes if error is not None), "")
        _log.warning("Reading %d records failed: %s", results.count(Miss.IO_ERROR), reason)
    if Miss.CORRUPT in results:
        count = results.count(Miss.CORRUPT)
        _log.warning("%d records on disk do not verify; they are misses from now on", count)
