"""Which tier holds a key, and why none does. Changes nothing but recency."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.tiers.key_index import NO_ROW
from ebbtide.tiers.memory import State
from ebbtide.tiers.reasons import Miss, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.segments import Ints
    from ebbtide.tiers.store import Store

OTHERS_MAX = 16  # namespaces that a missing key is looked for in, those opened last: 6 us each
REASONS_MAX = 64  # missing keys of one lookup whose reasons are looked up


class Lookups:
    """The store's part for questions. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def held(self, namespace: Namespace) -> tuple[int, int]:
        """See `Store.held`."""
        disk = self._store.disk
        in_memory = self._store.memory.index(namespace.epoch)
        records, payload_bytes = len(in_memory), self._store.memory.payload_of[namespace.epoch]
        if disk is not None and not disk.down:
            index = disk.index
            both = index.find_many(namespace.epoch, list(in_memory))
            below = np.setdiff1d(index.rows_of(namespace.epoch), both)
            records += len(below)
            payload_bytes += int(index.table.length[below].sum(dtype=np.uint64))
        return records, payload_bytes

    def states(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """See `Store.lookup`."""
        if namespace.pending:
            return bytes([Miss.NAMESPACE_PENDING]) * len(keys)
        in_memory = self._store.memory.index(namespace.epoch)
        records: list[MemoryRecord | None] = [None] * len(keys)
        if in_memory:
            records = list(map(in_memory.get, keys))
        states, rest = _in_memory(records), keys
        if states.any():
            rest = list(compress(keys, states == 0))
        rows = self.disk_rows(namespace, rest)
        states[states == 0] = np.where(rows == NO_ROW, 0, Place.DISK)
        missing = np.flatnonzero(states == 0).tolist()
        pending = [number for number in missing if records[number] is not None]
        if pending:
            states[pending] = Place.PENDING
            missing = [number for number in missing if records[number] is None]
        for number in missing[:REASONS_MAX]:
            states[number] = self.reason(namespace, keys[number])
        states[missing[REASONS_MAX:]] = Miss.BEHIND_MISS
        return states.tobytes()

    def reason(self, namespace: Namespace, key: bytes) -> Miss:
        """See `Store.miss_reason`."""
        disk = self._store.disk
        if namespace.pending:
            return Miss.NAMESPACE_PENDING
        if disk is not None and disk.down and disk.holds(namespace.epoch, key):
            return Miss.IO_ERROR
        reason = self._store.ledger.ghosts.reason(namespace.epoch, key)
        if reason is not Miss.NEVER_SEEN:
            return reason
        if disk is not None and disk.was_reset(namespace.epoch, key):
            return Miss.RESET
        for other in self._store.namespaces.latest(OTHERS_MAX):
            if other is not namespace and (
                key in self._store.memory.index(other.epoch) or self.on_disk(other, key)
            ):
                return Miss.OTHER_NAMESPACE
        return Miss.NEVER_SEEN

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """See `Store.touch`."""
        disk, mover = self._store.disk, self._store.mover
        in_memory = self._store.memory.index(namespace.epoch)
        rows = self.disk_rows(namespace, keys).tolist()
        for key, row in zip(reversed(keys), reversed(rows), strict=True):
            record = in_memory.get(key)
            if record is not None:
                self._store.memory.touch(record)
                if row == NO_ROW and mover is not None:
                    mover.used_again(record)
            if row != NO_ROW and disk is not None:
                disk.index.touch(row)

    def disk_rows(self, namespace: Namespace, keys: Sequence[bytes]) -> Ints:
        """Per key its row in the disk tier's index, or NO_ROW; all of them while it is down."""
        disk = self._store.disk
        if disk is None or disk.down:
            return np.full(len(keys), NO_ROW)
        return disk.index.find_many(namespace.epoch, keys)

    def on_disk(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a disk tier that serves holds it, or is writing it."""
        disk = self._store.disk
        return disk is not None and not disk.down and disk.holds(namespace.epoch, key)


def _in_memory(records: list[MemoryRecord | None]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Per record `Place.MEMORY`, or 0: it is not there, or not whole."""
    states = np.zeros(len(records), np.uint8)
    if any(records):
        whole = State.WHOLE  # a local: this loop is what a lookup costs
        states[[r is not None and r.state is whole for r in records]] = Place.MEMORY
    return states
