"""Slots of memory for new records, and which records leave for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.tiers.memory import MemoryRecord, State
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
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
        memory, epoch = self._store.memory, namespace.epoch
        if not memory.space.make_room_below_cap(
            epoch,
            length,
            lambda record: self._evict(record, epoch, Miss.OVER_QUOTA),
            self._evictable,
        ):
            return None
        self._sequence += 1
        record = MemoryRecord(namespace, key, self._sequence, state)
        while not memory.place(record, length):
            victims = memory.space.victims(length, self._evictable, epoch)
            if not victims:
                return None
            for victim in victims:
                self._evict(victim, epoch)
        return record

    def _evictable(self, record: MemoryRecord) -> bool:
        """Whoever leaves memory has ebbed, as long as there is a disk to ebb to."""
        disk = self._store.disk
        written = not record.dirty or disk is None or disk.down is not None
        return written and record.pins == 0

    def _evict(self, record: MemoryRecord, sake: int, why: Miss = Miss.EVICTED) -> None:
        self._store.ledger.evicted(record, sake, why)
        self._store.memory.discard(record)
