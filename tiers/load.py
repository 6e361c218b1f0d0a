"""A load: a lease that streams records to its holder, verified, within a window.

No hold-and-wait: a load never holds more than its window, and what it holds comes back by acks that
depend on nothing the load still waits for. Loads that need a memory slot wait for one in FIFO
order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ebbtide.tiers.digest import record_digest
from ebbtide.tiers.disk_record import Get
from ebbtide.tiers.memory import MemoryRecord, State
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import VERIFY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.disk_record import DiskRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.store import Store
    from ebbtide.tiers.tally import Tally


class Granted(NamedTuple):
    """One record to copy: `length` bytes at `offset` in the arena, for `keys[position]`."""

    position: int
    length: int
    source: Place
    offset: int
    digest: bytes


class Sink(Protocol):
    """Where a load reports. Called on the control thread; every key is named exactly once."""

    def batch(self, batch: int, granted: list[Granted]) -> None:
        """Verified records, or ones to verify, pinned until `Load.ack(batch)`."""
        ...

    def failed(self, failures: list[tuple[int, Miss]]) -> None:
        """Keys that this load will not bring, and why."""
        ...

    def done(self) -> None:
        """Every key has been named."""
        ...

    def over(self) -> None:
        """After `done`, and after the last ack: the load holds nothing. May come inside `load`."""
        ...


class _Step(NamedTuple):
    position: int
    record: MemoryRecord
    source: Place


class Load:
    """One lease. Made by `Store.load`; lives until every key is named and every batch is acked."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        keys: Sequence[bytes],
        sink: Sink,
        *,
        to_verify: bool,
    ) -> None:
        """`to_verify`: what memory holds is granted as it is; see `Store.load`."""
        self._store = store
        self._verifies = store.bounds.verify_memory and not to_verify
        self._namespace = namespace
        self.epoch = namespace.epoch
        self._keys = keys
        self._sink = sink
        self._todo = deque(range(len(keys)))
        self._parked = 0  # keys that wait for somebody else's read
        self._running = 0  # jobs in the I/O threads
        self._held_bytes = 0
        self._wants_slot = False
        self._batches: dict[int, list[MemoryRecord]] = {}
        self._next_batch = 0
        self._advancing = False
        self._again = False  # `advance` was called inside itself
        self._told_over = False
        self.wanted_bytes = 1  # of the record that it last asked a slot for
        self.queued = False  # in the store's queue for slots; kept by the store
        self.released = False
        self.done = False
        self._tally.asked += len(keys)

    @property
    def over(self) -> bool:
        """Nothing is held any more and nothing will come."""
        return self.done and not self._batches

    def ack(self, batch: int) -> bool:
        """The holder's copy of a batch has ended: its slots are free again. False if unknown."""
        records = self._batches.pop(batch, None)
        if records is None:
            return False
        for record in reversed(records):  # the chain's head ends up the most recent
            self._let_go(record)
        self.advance()
        self._maybe_over()
        return True

    def dispute(self, batch: int, rows: Sequence[int]) -> bool:
        """As `ack`; but these of the batch's records, copied, did not verify."""
        records = self._batches.get(batch, [])
        self._store.loads.doubt([records[row] for row in set(rows) if row < len(records)])
        return self.ack(batch)

    def release(self) -> None:
        """The holder wants no more. What is granted stays pinned until its ack."""
        self.released = True
        self.advance()

    def abandon(self) -> None:
        """The holder's processes are gone: no copy can be under way, nothing will be acked."""
        self.released = True
        for batch in list(self._batches):
            self.ack(batch)
        self.advance()

    def advance(self) -> None:
        """Grant what the window and the slots allow."""
        if self.done:
            return
        self._again = True
        if self._advancing:  # a sink that acks within the call: go round once more
            return
        self._advancing = True
        try:
            while self._again:
                self._again = False
                self._advance_once()
        finally:
            self._advancing = False
        self._maybe_done()

    def _advance_once(self) -> None:
        self._wants_slot = False
        verify: list[_Step] = []
        read: list[tuple[_Step, DiskRecord]] = []
        failures: list[tuple[int, Miss]] = []
        while self._todo and self._take(self._todo[0], verify, read, failures):
            self._todo.popleft()
        if self.queued and not self._wants_slot:  # its place belongs to those who do
            self._store.loads.leave_queue(self)
        if failures:
            self._fail(failures)
        if verify:
            self._verify(verify)
        if read:
            self._read(read)

    # -- one key --------------------------------------------------------------------------------

    def _take(
        self,
        position: int,
        verify: list[_Step],
        read: list[tuple[_Step, DiskRecord]],
        failures: list[tuple[int, Miss]],
    ) -> bool:
        """Decide what happens to a key. False: not now."""
        store, key = self._store, self._keys[position]
        if self.released:
            failures.append((position, Miss.CANCELLED))
            return True
        if self.epoch != self._namespace.epoch:
            failures.append((position, Miss.RESET))
            return True
        record = store.memory.find(self.epoch, key)
        if record is not None and record.state is State.WHOLE:
            if not self._fits(record.stride):
                return False
            store.memory.pin(record)
            self._held_bytes += record.stride
            verify.append(_Step(position, record, Place.MEMORY))
            return True
        if record is not None and record.state is State.READING:
            self._park(position, record)
            return True
        on_disk = store.disk.find(self.epoch, key) if store.disk and record is None else None
        if on_disk is None:
            reserved = record is not None
            reason = Miss.BUSY if reserved else store.miss_reason(self._namespace, key)
            failures.append((position, reason))
            return True
        assert store.disk is not None
        if on_disk.length > store.memory.space.largest_bytes:
            store.disk.discard(on_disk)  # memory was made smaller since: never promise it again
            store.ledger.not_admitted(on_disk, Miss.NOT_ADMITTED)
            failures.append((position, Miss.NOT_ADMITTED))
            return True
        if not store.memory.space.fits_cap(self.epoch, on_disk.length):
            failures.append((position, Miss.OVER_QUOTA))
            return True
        if not self._fits(store.memory.space.stride(on_disk.length)):
            return False
        self.wanted_bytes = on_disk.length
        promoted = store.loads.place(self, self._namespace, key, on_disk.length)
        if promoted is None:
            self._wants_slot = True
            return False
        store.disk.pin(on_disk)  # what the rest of this batch sets off must not evict it
        self._held_bytes += promoted.stride
        read.append((_Step(position, promoted, Place.DISK), on_disk))
        return True

    def _fits(self, stride: int) -> bool:
        held = self._held_bytes
        return held == 0 or held + stride <= self._store.bounds.load_window_bytes

    def _park(self, position: int, record: MemoryRecord) -> None:
        self._parked += 1

        def wake() -> None:
            self._parked -= 1
            self._todo.appendleft(position)
            self.advance()

        record.waiting.append(wake)

    def _let_go(self, record: MemoryRecord) -> None:
        self._held_bytes -= record.stride
        self._store.memory.unpin(record)
        self._store.loads.slots_freed()

    # -- records in memory ----------------------------------------------------------------------

    def _verify(self, steps: list[_Step]) -> None:
        if not self._verifies:
            self._grant(steps)
            return
        for chunk in self._chunks(steps):
            self._verify_chunk(chunk)

    def _verify_chunk(self, steps: list[_Step]) -> None:
        store = self._store
        views = [store.view(step.record, step.record.length) for step in steps]
        good = bytearray(len(steps))

        def check(number: int) -> None:
            record = steps[number].record
            good[number] = record_digest(views[number], record.seed) == record.digest

        def checked(outcomes: list[BaseException | None]) -> None:
            granted = []
            for number, step in enumerate(steps):
                if good[number] and not step.record.doomed:
                    granted.append(step)
                    continue
                if not good[number]:
                    store.loads.found_corrupt(step.record)
                self._let_go(step.record)
                self._todo.append(step.position)  # the disk tier may hold it; else it is a miss now
            self._grant(granted)
            self._running -= 1
            self.advance()

        self._running += 1
        store.runtime.start(VERIFY, check, range(len(steps)), checked)

    # -- records on disk ------------------------------------------------------------------------

    def _read(self, steps: list[tuple[_Step, DiskRecord]]) -> None:
        disk_records = {step.position: on_disk for step, on_disk in steps}
        for chunk in self._chunks([step for step, _ in steps]):
            self._read_chunk(chunk, [disk_records[step.position] for step in chunk])

    def _read_chunk(self, steps: list[_Step], disk_records: list[DiskRecord]) -> None:
        store, disk = self._store, self._store.disk
        assert disk is not None
        gets = [
            Get(on_disk, store.view(step.record, step.record.stride))
            for step, on_disk in zip(steps, disk_records, strict=True)
        ]

        def read(results: list[Miss | None]) -> None:
            granted: list[_Step] = []
            failures: list[tuple[int, Miss]] = []
            for step, on_disk, failure in zip(steps, disk_records, results, strict=True):
                record = step.record
                if record.doomed:
                    failure = failure or Miss.RESET
                if failure is None:
                    store.memory.publish(record, on_disk.digest, None)  # the disk copy stays
                    store.ledger.promoted(record)
                    granted.append(step)
                else:
                    failures.append((step.position, failure))
                    store.ledger.promotion_failed(record, failure)
                    if not record.doomed:
                        store.memory.discard(record)
                    self._let_go(record)
            self._grant(granted)
            if failures:
                self._fail(failures)
            for step in steps:
                waiting, step.record.waiting = step.record.waiting, []
                for wake in waiting:
                    wake()
            self._running -= 1  # last: a sink that acks within the call must not end the load
            self.advance()

        self._running += 1
        disk.get(gets, read)

    # -- reporting ------------------------------------------------------------------------------

    def _grant(self, steps: list[_Step]) -> None:
        if not steps:
            return
        if self.released:  # nobody has been told of these: no copy can be under way
            self._fail([(step.position, Miss.CANCELLED) for step in steps])
            for step in steps:
                self._let_go(step.record)
            return
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        self._batches[batch] = [step.record for step in steps]
        self._store.ledger.counts["granted_bytes"] += sum(step.record.length for step in steps)
        self._tally.hits.update(step.source for step in steps)
        self._sink.batch(
            batch,
            [
                Granted(s.position, s.record.length, s.source, s.record.offset, s.record.digest)
                for s in steps
            ],
        )

    def _fail(self, failures: list[tuple[int, Miss]]) -> None:
        self._tally.failed_loads.update(reason for _, reason in failures)
        self._sink.failed(failures)

    @property
    def _tally(self) -> Tally:
        return self._store.ledger.tallies.of(self._namespace.epoch)

    def _chunks(self, steps: list[_Step]) -> list[list[_Step]]:
        """Jobs of about `job_bytes`, so that the first records of a long load arrive early."""
        chunks: list[list[_Step]] = []
        size = self._store.bounds.job_bytes
        for step in steps:
            stride = step.record.stride
            if size + stride > self._store.bounds.job_bytes:
                chunks.append([])
                size = 0
            chunks[-1].append(step)
            size += stride
        return chunks

    def _maybe_done(self) -> None:
        if not (self._todo or self._parked or self._running or self.done):
            self.done = True
            self._sink.done()
            self._maybe_over()

    def _maybe_over(self) -> None:
        self._store.loads.ended(self)
        if self.over and not self._told_over:
            self._told_over = True
            self._sink.over()
