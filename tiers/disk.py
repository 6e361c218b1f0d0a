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
from collections import deque
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ebbtide.errors import MisuseError
from ebbtide.tiers.commit import Committer
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.index import CODEC_RAW, Entry
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.runs import Run, merge
from ebbtide.tiers.runtime import READ, WRITE
from ebbtide.tiers.segments import Resident, SegmentSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.directory import Geometry
    from ebbtide.tiers.index import DurableIndex, StoredNamespace
    from ebbtide.tiers.runtime import Runtime
    from ebbtide.tiers.slab import Slab

_log = logging.getLogger("ebbtide.tiers.disk")

QUARANTINE_SHARE = 16  # of the slab; a drive with more bad slots is out of service
SPARE_SHARE = 16  # slots worth a sixteenth of the slab are evicted ahead, so that puts rarely wait


class DiskState(IntEnum):
    """The life of a disk record."""

    WRITING = 1
    WHOLE = 2  # the payload is in the slab and readable; committed or about to be


class DiskRecord(Resident):
    """One record in the slab."""

    __slots__ = ("digest", "doomed", "epoch", "key", "pins", "quarantined", "sequence", "state")

    def __init__(self, epoch: int, key: bytes, sequence: int, digest: bytes) -> None:
        self.epoch = epoch
        self.key = key
        self.sequence = sequence
        self.digest = digest
        self.state = DiskState.WRITING
        self.pins = 0
        self.doomed = False  # out of the index; the slot goes after its last reader and a commit
        self.quarantined = False  # doomed, and the slot stays


class Put(NamedTuple):
    """A record to be written. `view` is the whole slot: payload and zeroed padding."""

    epoch: int
    key: bytes
    length: int
    digest: bytes
    view: memoryview
    done: Callable[[Miss | None], None]  # None: the payload is written and readable


class Get(NamedTuple):
    """A record to be read, pinned by `DiskTier.pin`. `view` is the whole slot to fill."""

    record: DiskRecord
    view: memoryview


class DiskTier:
    """The tier over one open directory. Built by `open_disk`."""

    def __init__(
        self,
        runtime: Runtime,
        slab: Slab,
        index: DurableIndex,
        *,
        geometry: Geometry,
        commit_batch_bytes: int,
        commit_interval_s: float,
        records_max: int | None = None,
    ) -> None:
        self.space: SegmentSpace[DiskRecord] = SegmentSpace(
            geometry.slab_bytes,
            alignment=geometry.alignment,
            segment_bytes=geometry.segment_bytes,
        )
        self.geometry = geometry
        self.records_max = min(records_max or geometry.records_max, geometry.records_max)
        self.records = 0
        self.sequence = 0
        self.down: str | None = None  # why the tier is out of service
        self.corrupt = 0
        self.quarantined_bytes = 0  # slots that have shown wrong bytes: not used again
        self.evicted = 0
        self.lost_batches = 0
        self.write_bytes = 0
        self.read_bytes = 0
        self.on_evict: Callable[[int, bytes], None] = lambda epoch, key: None
        self.on_lost: Callable[[int, bytes], None] = lambda epoch, key: None
        self.digests: dict[int, bytes] = {}  # namespace digest by epoch
        self._runtime = runtime
        self.slab = slab
        self._index: dict[int, dict[bytes, DiskRecord]] = {}
        self._waiting: deque[Put] = deque()  # puts without a slot yet
        self._freeing = 0  # slots whose removal waits for a commit
        self._started: dict[int, float] = {}  # reads and writes under way, since when
        self._starts = 0
        self._committer = Committer(
            runtime,
            slab,
            index,
            batch_bytes=commit_batch_bytes,
            interval_s=commit_interval_s,
            on_committed=self._committed,
            on_failed=self._commit_failed,
        )

    # -- lookup ---------------------------------------------------------------------------------

    def index(self, epoch: int) -> dict[bytes, DiskRecord]:
        """The epoch's records by key. Read only."""
        return self._index.setdefault(epoch, {})

    def find(self, epoch: int, key: bytes) -> DiskRecord | None:
        """A record that can be read now, or None."""
        record = self.index(epoch).get(key)
        if record is None or record.state is not DiskState.WHOLE or self.down:
            return None
        return record

    def touch(self, record: DiskRecord) -> None:
        """Somebody asked for it."""
        self.space.touch(record)

    # -- namespaces -----------------------------------------------------------------------------

    def adopt_namespace(self, namespace: StoredNamespace) -> None:
        """Make an epoch known; it is committed with the next batch, before any of its records."""
        self.digests[namespace.epoch] = namespace.digest
        self._committer.put_namespace(namespace)

    def reset(
        self, old_epoch: int, namespace: StoredNamespace, done: Callable[[bool], None]
    ) -> None:
        """Forget an epoch. `done(True)` when no crash can bring it back."""
        for record in list(self.index(old_epoch).values()):
            if record.state is DiskState.WHOLE:
                self.discard(record)
        # Records still being written find their epoch gone when the write returns.
        self._index.pop(old_epoch, None)
        self.digests.pop(old_epoch, None)
        self.adopt_namespace(namespace)
        self._committer.flush(lambda ok: done(ok and not self.down))

    def adopt_record(self, entry: Entry) -> DiskRecord | None:
        """A committed record, at opening: hidden until `space.expose`. None: its slot cannot be."""
        record = DiskRecord(entry.epoch, bytes(entry.key), entry.sequence, entry.digest)
        self.sequence = max(self.sequence, entry.sequence)
        if not 0 < entry.length <= self.space.largest_bytes:
            return None
        if not self.space.place_at(record, entry.length, entry.offset):
            return None
        record.state = DiskState.WHOLE
        self.index(entry.epoch)[record.key] = record
        self.records += 1
        return record

    # -- writing --------------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> None:
        """Write records; each `done` is called once. A key that is held already is done at once.

        The views must stay unchanged until then. Puts without a free slot wait for the commit
        that frees evicted ones.
        """
        self._waiting.extend(puts)
        self._place_waiting()

    def _place_waiting(self) -> None:
        placed: list[tuple[Put, DiskRecord]] = []
        while self._waiting:
            put = self._waiting[0]
            if self.down or put.epoch not in self.digests:
                self._waiting.popleft()
                put.done(Miss.IO_ERROR if self.down else Miss.RESET)
                continue
            if put.key in self.index(put.epoch):
                self._waiting.popleft()
                put.done(None)
                continue
            self.sequence += 1
            record = DiskRecord(put.epoch, put.key, self.sequence, put.digest)
            full = self.records >= self.records_max
            if full or not self.space.place(record, put.length):
                self._evict_for(put.length)
                break  # the commit that frees the slots comes back here
            self._waiting.popleft()
            self.index(put.epoch)[put.key] = record
            self.records += 1
            placed.append((put, record))
        self._write(placed)
        self._evict_ahead()

    def _evict_for(self, length: int) -> None:
        """Have a commit make room for one record, unless one that will is already under way."""
        if not self._freeing:
            victims = self.space.victims(length, lambda record: True)
            if not victims:  # the number of records is the bound, and this size has none
                victims = list(islice(self.space.coldest_first(), 1))
            for record in victims:
                self._evict(record)
        self._committer.hurry()

    def _evict_ahead(self) -> None:
        if not self.space.classes or self.down:
            return
        spare = self.space.capacity_bytes // SPARE_SHARE
        over_records = self.records - (self.records_max - self.records_max // SPARE_SHARE)
        free = self.space.capacity_bytes - self.space.used_bytes + self._freeing
        if free >= spare and over_records <= 0:
            return
        stride = next(reversed(self.space.classes))
        while free < spare or over_records > 0:
            victims = self.space.victims(stride, lambda record: True)
            if not victims:
                return
            for record in victims:
                free += record.slot_class.stride
                over_records -= 1
                self._evict(record)

    def _evict(self, record: DiskRecord) -> None:
        self.evicted += 1
        self.on_evict(record.epoch, record.key)
        self.discard(record)

    def _write(self, placed: list[tuple[Put, DiskRecord]]) -> None:
        if not placed:
            return
        runs, members = merge([(self.space.offset(record), put.view) for put, record in placed])
        self._start(
            WRITE,
            lambda run: self.slab.write(run.offset, run.views),
            runs,
            lambda outcomes: self._written(placed, members, outcomes),
        )

    def _written(
        self,
        placed: list[tuple[Put, DiskRecord]],
        members: list[list[int]],
        outcomes: list[BaseException | None],
    ) -> None:
        for numbers, error in zip(members, outcomes, strict=True):
            if error is not None:
                self.go_down(f"a write failed: {error}")
            for number in numbers:
                put, record = placed[number]
                put.done(self._settle_write(record, error))
        if self._waiting:  # a write whose epoch was reset has freed its slot without a commit
            self._place_waiting()

    def _settle_write(self, record: DiskRecord, error: BaseException | None) -> Miss | None:
        gone = record.epoch not in self.digests
        if error is not None or gone or self.down:
            # No committed entry ever named this slot, so it may be reused at once.
            index = self.index(record.epoch)
            if index.get(record.key) is record:
                del index[record.key]
            self.records -= 1
            self.space.remove(record)
            return Miss.RESET if gone and error is None else Miss.IO_ERROR
        record.state = DiskState.WHOLE
        self.space.expose(record)
        stride = record.slot_class.stride
        self.write_bytes += stride
        self._committer.add(_entry(record, self.space.offset(record)), stride)
        return None

    # -- reading --------------------------------------------------------------------------------

    def get(self, gets: Sequence[Get], done: Callable[[list[Miss | None]], None]) -> None:
        """Read and verify records into slots; `done(results)`, None for bytes that are right.

        Each record comes with one `pin` of the caller's, which this gives back. A record that does
        not verify is discarded and counted: it is a miss from now on.
        """
        seeds = [record_seed(self.digests[get.record.epoch], get.record.key) for get in gets]
        runs, members = merge([(self.space.offset(get.record), get.view) for get in gets])
        jobs = list(zip(runs, members, strict=True))
        good = bytearray(len(gets))

        def read(job: tuple[Run, list[int]]) -> None:
            run, numbers = job
            self.slab.read(run.offset, run.views)
            for number in numbers:
                record, view = gets[number]
                if record_digest(view[: record.length], seeds[number]) == record.digest:
                    good[number] = 1

        def finished(outcomes: list[BaseException | None]) -> None:
            results: list[Miss | None] = [None] * len(gets)
            for numbers, error in zip(members, outcomes, strict=True):
                for number in numbers:
                    results[number] = self._settle_read(gets[number].record, error, good[number])
            _report_failures(results, outcomes)
            done(results)
            if self._waiting:  # what the read had pinned may go now
                self._place_waiting()

        self._start(READ, read, jobs, finished)

    def _settle_read(
        self, record: DiskRecord, error: BaseException | None, good: int
    ) -> Miss | None:
        corrupt = error is None and not good
        if corrupt and not record.quarantined:
            self._quarantine(record)
        self._unpin(record)
        if good:
            self.read_bytes += record.slot_class.stride
            return Miss.RESET if record.epoch not in self.digests else None
        if not record.doomed:
            self.discard(record)
        return Miss.CORRUPT if corrupt else Miss.IO_ERROR

    # -- leaving --------------------------------------------------------------------------------

    def discard(self, record: DiskRecord) -> None:
        """Out of the serving index now, out of the durable one with the next commit."""
        index = self.index(record.epoch)
        if index.get(record.key) is record:
            del index[record.key]
        self.records -= 1
        record.doomed = True
        self.space.hide(record)
        self._committer.remove(record.epoch, record.key)
        if record.pins == 0 and not record.quarantined:
            self._free_after_commit(record)

    def pin(self, record: DiskRecord) -> None:
        """Keep the slot for a `get`, from the moment when the record was found."""
        if record.pins == 0:
            self.space.hide(record)
        record.pins += 1

    def _unpin(self, record: DiskRecord) -> None:
        record.pins -= 1
        if record.pins:
            return
        if not record.doomed:
            self.space.expose(record)
        elif not record.quarantined:
            self._free_after_commit(record)

    def _quarantine(self, record: DiskRecord) -> None:
        """Use the slot no more before the directory is opened again."""
        self.corrupt += 1
        record.quarantined = True
        self.quarantined_bytes += record.slot_class.stride
        if self.quarantined_bytes > self.space.capacity_bytes // QUARANTINE_SHARE:
            self.go_down(f"{self.quarantined_bytes} bytes of the drive hold what nobody wrote")

    def _free_after_commit(self, record: DiskRecord) -> None:
        self._freeing += record.slot_class.stride
        self._committer.free_after(record)

    def _committed(self, freed: list[DiskRecord]) -> None:
        for record in freed:
            self._freeing -= record.slot_class.stride
            self.space.remove(record)
        if self._waiting:
            self._place_waiting()

    def _commit_failed(self, error: BaseException, added: list[tuple[int, bytes]]) -> None:
        self.lost_batches += bool(added)
        self.go_down(f"a commit failed: {error}")
        for epoch, key in added:
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
        waiting, self._waiting = self._waiting, deque()
        for put in waiting:
            put.done(Miss.IO_ERROR)

    def waiting_since(self) -> float | None:
        """Since when (runtime seconds) the drive owes the oldest answer; None: it owes nothing."""
        oldest = next(iter(self._started.values()), None)
        commit = self._committer.running_since
        return min((since for since in (oldest, commit) if since is not None), default=None)

    @property
    def quiet(self) -> bool:
        """No thread touches the files, and none will."""
        return not self._started and self.idle

    def abandon(self) -> None:
        """Close the files of a tier that is down and `quiet`. Idempotent."""
        self.close(clean=False)

    def _start(
        self,
        pool: str,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        """As the runtime's, and known to be under way."""
        self._starts += 1
        number = self._starts
        self._started[number] = self._runtime.now()

        def ended(outcomes: list[BaseException | None]) -> None:
            del self._started[number]
            done(outcomes)

        self._runtime.start(pool, work, items, ended)

    # -- closing --------------------------------------------------------------------------------

    def flush(self, done: Callable[[bool], None]) -> None:
        """`done(True)` when everything written or removed before this call is committed."""
        self._committer.flush(done)

    def save_recency(self, done: Callable[[bool], None]) -> None:
        """Save the order of eviction, so that a restart goes on with it."""
        ordered = sorted(self.space.residents(), key=self.space.stamp)
        self._committer.save_recency([r.sequence for r in ordered if not r.doomed], done)

    @property
    def idle(self) -> bool:
        """Nothing is waiting, being written or uncommitted."""
        return not self._waiting and self._committer.idle

    def close(self, clean: bool) -> None:
        """Close the files. Only when `idle`, or when what is under way is to be lost."""
        self._committer.close(clean and not self.down)
        self.slab.close()

    def check_integrity(self) -> None:
        """Raise MisuseError when slots and index contradict each other. O(slots)."""
        self.space.check_integrity()
        live = {(r.epoch, r.key): r for r in self.space.residents() if not r.doomed}
        held = {(e, key): r for e, found in self._index.items() for key, r in found.items()}
        being_reset = {name: r for name, r in live.items() if r.epoch not in self.digests}
        if live != {**held, **being_reset} or self.records != len(live):
            raise MisuseError("The disk index and the slots disagree", records=self.records)


def _report_failures(
    results: Sequence[Miss | None], outcomes: Sequence[BaseException | None]
) -> None:
    """One line for a batch, however many of its records failed."""
    if Miss.IO_ERROR in results:
        reason = next((str(error) for error in outcomes if error is not None), "")
        _log.warning("Reading %d records failed: %s", results.count(Miss.IO_ERROR), reason)
    if Miss.CORRUPT in results:
        count = results.count(Miss.CORRUPT)
        _log.warning("%d records on disk do not verify; they are misses from now on", count)


def _entry(record: DiskRecord, offset: int) -> Entry:
    return Entry(
        record.epoch,
        record.key,
        CODEC_RAW,
        record.length,
        offset,
        record.sequence,
        record.digest,
    )
