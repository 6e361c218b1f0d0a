"""Slots of memory for new records, and which records leave for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.tiers.memory import MemoryRecord, State
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.store import Store


class Placement:
    """The store's part for records that come to memory. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sequence = 0

    def place(
        self, namespace: Namespace, key: bytes, length: int, state: State
    ) -> MemoryRecord | None:
        """A slot for a new record, pinned by who fills it; evicts what may go. None: busy.

        A namespace at its cap evicts its own coldest first.
        """
        placed = self.place_many(namespace, [key], length, state)
        return placed[0] if placed else None

    def place_many(
        self, namespace: Namespace, keys: Sequence[bytes], length: int, state: State
    ) -> list[MemoryRecord]:
        """The same for keys that are not in memory, each once: for as many, from the first, as can
        be had.
        """
        space, epoch = self._store.memory.space, namespace.epoch
        at_once = len(keys) if space.shares.is_common else 1  # who may lose how much changes
        placed: list[MemoryRecord] = []
        while len(placed) < len(keys):
            if not space.make_room_below_cap(
                epoch,
                length,
                lambda record: self._evict(record, epoch, Miss.OVER_QUOTA),
                self._evictable,
            ):
                break
            some = keys[len(placed) : len(placed) + at_once]
            records = [MemoryRecord(namespace, key, self._next(), state) for key in some]
            count = self._place(records, length)
            placed += records[:count]
            if count < len(records):
                break
        return placed

    def _place(self, records: Sequence[MemoryRecord], length: int) -> int:
        """Returns how many of the records, from the first, have slots now."""
        memory, epoch = self._store.memory, records[0].epoch
        count = memory.place(records, length)
        while count < len(records):
            victims = memory.space.victims(
                length, self._evictable, epoch, count=len(records) - count
            )
            if not victims:
                break
            for victim in victims:
                self._evict(victim, epoch)
            count += memory.place(records[count:], length)
        return count

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _evictable(self, record: MemoryRecord) -> bool:
        """Whoever leaves memory has ebbed, as long as there is a disk to ebb to."""
        disk = self._store.disk
        written = not record.dirty or disk is None or disk.down is not None
        return written and record.pins == 0

    def _evict(self, record: MemoryRecord, sake: int, why: Miss = Miss.EVICTED) -> None:
        self._store.ledger.evicted(record, sake, why)
        self._store.memory.discard(record)
