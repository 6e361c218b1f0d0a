"""The mover: writes memory records to the disk tier before memory needs their slots.

A record is written once: when it has been dirty for `write_after_s`, when dirty bytes exceed their
bound, when its slot is wanted, or at a drain, whichever is first. Promotion keeps the disk copy, so
a record that came from disk is never written again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.tiers.admission import Admission, AdmitAll
from ebbtide.tiers.disk_record import Put
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ebbtide.tiers.arena import Arena
    from ebbtide.tiers.bounds import Bounds
    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.memory import MemoryRecord, MemoryTier
    from ebbtide.tiers.runtime import Runtime, Timer

PRESS_SCAN = 256  # how far the search for the coldest unwritten records goes, per size


class Mover:
    """Demotion memory -> disk. Control thread only; writes run in the disk tier's threads."""

    def __init__(
        self,
        runtime: Runtime,
        arena: Arena,
        memory: MemoryTier,
        disk: DiskTier,
        bounds: Bounds,
        *,
        admission: Admission | None = None,
        on_progress: Callable[[], None],
        on_refused: Callable[[MemoryRecord, Miss], None],
    ) -> None:
        self._runtime = runtime
        self._arena = arena
        self._memory = memory
        self._disk = disk
        self._bounds = bounds
        self._admission = admission or AdmitAll()
        self._on_progress = on_progress
        self._on_refused = on_refused
        self._moving: set[MemoryRecord] = set()
        self._moving_bytes = 0
        self._timer: Timer | None = None
        self._woken = False
        self._pressed = False
        self._draining = False
        self.moved_bytes = 0
        self.refused = 0

    @property
    def idle(self) -> bool:
        """No write is under way."""
        return not self._moving

    def replace_disk(self, disk: DiskTier) -> None:
        """From now on write to another tier. Only when no write is under way."""
        assert self.idle
        self._disk = disk

    def press(self) -> None:
        """A slot is wanted and the coldest records are not on disk yet: write those now."""
        self._pressed = True
        self.run()

    def used_again(self, record: MemoryRecord) -> None:
        """Of a record that the disk tier does not hold: it may be worth a write now. O(1)."""
        if not record.used_again and not self._disk.down:
            record.used_again = True
            self._memory.soil(record, self._runtime.now())
            self._arm()

    def drain(self) -> None:
        """From now on write everything dirty, as fast as the queue allows.

        Heads of chains first: when the time is up, what was written can be used.
        """
        self._draining = True
        self._memory.sort_dirty()
        self.run()

    def run(self) -> None:
        """Start the writes that are due. Called after every change that may make one due."""
        if self._disk.down:
            return
        puts: list[Put] = []
        refused: dict[MemoryRecord, Miss] = {}
        queue_bytes = self._bounds.write_queue_bytes
        for record in self._due():
            if self._moving and self._moving_bytes + record.stride > queue_bytes:
                break
            if record in refused:
                continue
            if not self._disk.takes(record.epoch, record.length):
                fits = record.length <= self._disk.space.largest_bytes
                refused[record] = Miss.OVER_QUOTA if fits else Miss.NOT_ADMITTED
            elif self._admission.admit(record):
                puts.append(self._begin(record))
            else:
                refused[record] = Miss.NOT_ADMITTED
        for record, reason in refused.items():
            self.refused += 1
            self._memory.clean(record)
            self._on_refused(record, reason)
        self._pressed = False
        if puts:
            self._disk.put(puts)
        self._arm()

    def _due(self) -> Iterator[MemoryRecord]:
        memory, bounds = self._memory, self._bounds
        if self._pressed:
            cold = memory.space.coldest_first(PRESS_SCAN)
            yield from [r for r in cold if r.dirty and r not in self._moving]
        surplus = memory.dirty_bytes - self._moving_bytes - bounds.dirty_max_bytes
        now = self._runtime.now()
        # Also the oldest ones: what hinders a segment's drain need not be among the coldest.
        pressed = PRESS_SCAN if self._pressed else 0
        for record, since in memory.dirty.items():
            if record in self._moving:
                continue
            old = since + bounds.write_after_s <= now  # the same sum as in `_arm`
            if not (self._draining or surplus > 0 or old or pressed > 0):
                return
            pressed -= 1
            surplus -= record.stride
            yield record

    def _begin(self, record: MemoryRecord) -> Put:
        """Pinned until the payload is in the slab: the slot may not change under the write."""
        self._memory.pin(record, hide=False)
        self._moving.add(record)
        self._moving_bytes += record.stride
        view = self._arena.view(record.offset, record.stride)

        def done(failure: Miss | None) -> None:
            self._moving.discard(record)
            self._moving_bytes -= record.stride
            if failure is None:
                self.moved_bytes += record.stride
                self._memory.clean(record)
            self._memory.unpin(record)
            self._wake()

        return Put(record.epoch, record.key, record.length, record.digest, view, done)

    def _wake(self) -> None:
        """Once for all the completions of a batch."""
        if not self._woken:
            self._woken = True
            self._runtime.call_later(0.0, self._progress)

    def _progress(self) -> None:
        self._woken = False
        self.run()
        self._on_progress()

    def _arm(self) -> None:
        """Come back when the oldest dirty record has waited long enough."""
        if self._timer is not None and self._timer.call is not None:
            return
        for record, since in self._memory.dirty.items():
            if record not in self._moving:
                delay_s = since + self._bounds.write_after_s - self._runtime.now()
                if delay_s > 0.0:  # else the queue is full, and the write that ends comes back here
                    self._timer = self._runtime.call_later(delay_s, self.run)
                return
