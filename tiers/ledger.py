"""What becomes of records, written down: counts, tallies, ghosts and events.

What adds up is written down in `docs/metrics.md`. A key is gone when no tier holds it any more.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.ghosts import Ghosts
from ebbtide.tiers.memory import State
from ebbtide.tiers.reasons import Miss, Place, label
from ebbtide.tiers.tally import Tallies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.bounds import Bounds
    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.disk_record import DiskRecord
    from ebbtide.tiers.memory import MemoryRecord, MemoryTier
    from ebbtide.tiers.namespaces import Namespaces

NOT_WRITTEN = (Miss.NOT_ADMITTED, Miss.OVER_QUOTA)  # why the disk tier may have refused a record
DISK_COUNTS = ("write_bytes", "read_bytes", "corrupt", "evicted", "lost_batches")


class Event(NamedTuple):
    """Something that became true of a key. `kind` is "stored", "evicted", "lost" or "reset"."""

    sequence: int
    kind: str
    epoch: int
    key: bytes
    place: Place


class Ledger:
    """The store's part for accounts: changes no tier. Control thread only; an entry is O(1)."""

    def __init__(self, memory: MemoryTier, bounds: Bounds) -> None:
        self.counts: Counter[str] = Counter()
        self.tallies = Tallies()
        self.ghosts = Ghosts(bounds.ghost_entries, self.tallies)
        self.events: deque[Event] = deque(maxlen=bounds.event_entries)
        self.event_sequence = 0
        self._memory = memory
        self._disk: DiskTier | None = None
        self._disk_before: Counter[str] = Counter()  # of tiers in whose place another one is

    def events_since(self, sequence: int) -> list[Event]:
        """Events after `sequence`, oldest first; a gap at the start: some were dropped."""
        return [event for event in self.events if event.sequence > sequence]

    def disk_count(self, name: str) -> int:
        """One of `DISK_COUNTS` since the store was opened: a tier that comes back goes on."""
        now = getattr(self._disk, name) if self._disk is not None else 0
        return self._disk_before[name] + now

    # -- memory ---------------------------------------------------------------------------------

    def stored(self, record: MemoryRecord) -> None:
        """An engine put it: it can be read from now on."""
        self.ghosts.forget(record.epoch, record.key)
        self.counts["stored"] += 1
        self.counts["stored_bytes"] += record.length
        self.tallies.of(record.epoch).stored += 1
        self._happened("stored", record.epoch, record.key, Place.MEMORY)

    def promoted(self, record: MemoryRecord) -> None:
        """It came from disk: it can be read from now on."""
        self.counts["promoted"] += 1
        self.counts["promoted_bytes"] += record.stride
        self.tallies.of(record.epoch).promoted += 1
        self._happened("stored", record.epoch, record.key, Place.MEMORY)

    def promotion_failed(self, record: MemoryRecord, reason: Miss) -> None:
        """It did not come from disk. Before its slot is discarded."""
        self.counts[label(reason)] += 1
        if not record.doomed:
            self.ghosts.remember(record.epoch, record.key, reason)

    def not_admitted(self, record: MemoryRecord | DiskRecord, reason: Miss) -> None:
        """A tier does not take it, ever."""
        self.ghosts.remember(record.epoch, record.key, reason)

    def evicted(self, record: MemoryRecord, sake: int, why: Miss) -> None:
        """It leaves memory for the sake of the namespace that has the epoch `sake`."""
        epoch, key = record.epoch, record.key
        self.counts["memory_evicted"] += 1
        tally = self.tallies.of(epoch)
        tally.left_memory[why] += 1
        if epoch != sake:
            tally.evicted_for_others[Place.MEMORY] += 1
        refused = self.ghosts.reason(epoch, key) in NOT_WRITTEN
        if not refused and not self._is_on_disk(epoch, key):
            self.ghosts.remember(epoch, key, why)
        self._happened("evicted", epoch, key, Place.MEMORY)

    def corrupt(self, record: MemoryRecord) -> None:
        """Its bytes in memory do not verify."""
        self.counts["memory_corrupt"] += 1
        self.tallies.of(record.epoch).left_memory[Miss.CORRUPT] += 1
        self.ghosts.remember(record.epoch, record.key, Miss.CORRUPT)
        self._happened("lost", record.epoch, record.key, Place.MEMORY)

    def reset(self, old_epoch: int, epoch: int, gone: Sequence[MemoryRecord]) -> None:
        """A namespace has another epoch; `gone` were its records in memory. O(these)."""
        self.tallies.renew(old_epoch, epoch)
        tally = self.tallies.of(epoch)
        states = Counter(record.state for record in gone)
        for counts, state in ((tally.left_memory, State.WHOLE), (tally.abandoned, State.RESERVED)):
            if states[state]:
                counts[Miss.RESET] += states[state]
        for record in gone:
            self.ghosts.remember(epoch, record.key, Miss.RESET)
        self.counts["resets"] += 1
        self._happened("reset", old_epoch, b"", Place.MEMORY)

    # -- disk -----------------------------------------------------------------------------------

    def listen(self, disk: DiskTier, namespaces: Namespaces) -> None:
        """Follow a tier from now on, in the place of the one before, if any. O(namespaces)."""
        if self._disk is not None:
            self.counts["disk_reopened"] += 1
            for name in DISK_COUNTS:
                self._disk_before[name] += getattr(self._disk, name)
            for tally in self.tallies.all():
                tally.lose_disk()
        self._disk = disk
        disk.on_written = self._written
        disk.on_left = self._left_disk
        for epoch, records in disk.index.whole_of().items():
            known = namespaces.by_digest(disk.digests[epoch])
            assert known is not None  # its epoch may be another one: reset while the disk was down
            self.tallies.of(known.epoch).found += records

    def lost(self, epoch: int, key: bytes) -> None:
        """A commit that failed has taken it from the disk tier."""
        self._happened("lost", epoch, key, Place.DISK)

    def _written(self, epoch: int) -> None:
        self.tallies.of(epoch).written += 1

    def _left_disk(self, epoch: int, key: bytes, why: Miss, sake: int) -> None:
        tally = self.tallies.of(epoch)
        tally.left_disk[why] += 1
        if why in (Miss.EVICTED, Miss.OVER_QUOTA):
            if epoch != sake:
                tally.evicted_for_others[Place.DISK] += 1
            if self._memory.find(epoch, key) is None:
                self.ghosts.remember(epoch, key, why)
            self._happened("evicted", epoch, key, Place.DISK)
        elif why is Miss.RESET and self.ghosts.reason(epoch, key) is Miss.NEVER_SEEN:
            # Of a life before this one. Since then its key may have been stored.
            self.ghosts.remember(epoch, key, why)

    # -- inside ---------------------------------------------------------------------------------

    def _is_on_disk(self, epoch: int, key: bytes) -> bool:
        disk = self._disk
        return disk is not None and not disk.down and disk.holds(epoch, key)

    def _happened(self, kind: str, epoch: int, key: bytes, place: Place) -> None:
        self.event_sequence += 1
        self.events.append(Event(self.event_sequence, kind, epoch, key, place))
