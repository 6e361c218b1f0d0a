"""Slots that engines are writing: reserved by a scheduler half, committed or aborted by a worker
half.

A slot belongs to its engine until it says "whole" or "given up", or until all its processes
are gone: a stopped worker may still write, so no timer and no lost connection frees one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.digest import record_digest
from ebbtide.tiers.key_index import NO_ROW
from ebbtide.tiers.memory import State
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.runtime import DIGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.store import Store


class Grant(NamedTuple):
    """A slot to write, or `sequence` 0: the key is held or being put, there is nothing to do."""

    offset: int
    sequence: int


WAS_HERE = (Miss.EVICTED, Miss.NOT_ADMITTED)
NOTHING_TO_DO = Grant(0, 0)
_REFUSALS = {
    Miss.BUSY: "reserve_busy",
    Miss.OVER_QUOTA: "reserve_over_quota",
    Miss.STORE_SHED: "reserve_shed",
}


class Reservations:
    """The store's part for records that are not whole yet. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[int, MemoryRecord] = {}  # by sequence
        self._holdings: dict[bytes, set[int]] = {}  # engine -> sequences that it may still write
        self._held_bytes: Counter[bytes] = Counter()  # strides of these

    def reserve(
        self, engine: bytes, namespace: Namespace, keys: Sequence[bytes], length: int
    ) -> tuple[list[Grant], Miss | None]:
        """See `Store.reserve`."""
        store, ledger = self._store, self._store.ledger
        stride = store.memory.space.stride(length)
        on_disk = store.lookups.disk_rows(namespace, keys).tolist()
        grants: list[Grant] = []
        for key, row in zip(keys, on_disk, strict=True):
            if store.memory.find(namespace.epoch, key) is not None or row != NO_ROW:
                grants.append(NOTHING_TO_DO)
                continue
            reason = self._refused(engine, namespace, stride)
            record = None
            if reason is None:
                record = store.placement.place(namespace, key, length, State.RESERVED)
            if record is None:
                reason = reason or self._why_busy(namespace, stride)
                self._count_refusal(namespace, reason)
                return grants, reason
            missed = ledger.ghosts.reason(namespace.epoch, key)
            record.used_again = missed in WAS_HERE
            ledger.tallies.of(namespace.epoch).misses[missed] += 1
            self._records[record.sequence] = record
            self._holdings.setdefault(engine, set()).add(record.sequence)
            self._held_bytes[engine] += stride
            grants.append(Grant(record.offset, record.sequence))
        return grants, None

    def _refused(self, engine: bytes, namespace: Namespace, stride: int) -> Miss | None:
        """Why the engine may not have one more slot at all just now."""
        memory, bounds = self._store.memory, self._store.bounds
        window = max(stride, bounds.store_window_bytes)
        if self._held_bytes[engine] + stride > window:
            return Miss.STORE_SHED
        if memory.reserved_bytes + stride > self._reserved_bytes_max(stride):
            return Miss.BUSY
        # Below a cap, too, stores leave something to loads.
        cap_bytes = memory.space.shares.cap_bytes(namespace.epoch)
        kept = max(stride, bounds.load_reserve_bytes * cap_bytes // memory.space.capacity_bytes)
        if memory.reserved_of[namespace.epoch] + stride > cap_bytes - kept:
            return Miss.OVER_QUOTA
        return None

    def _why_busy(self, namespace: Namespace, stride: int) -> Miss:
        over = self._store.memory.space.shares.excess(namespace.epoch, stride) > 0
        return Miss.OVER_QUOTA if over else Miss.BUSY

    def _count_refusal(self, namespace: Namespace, reason: Miss) -> None:
        store = self._store
        store.ledger.counts[_REFUSALS[reason]] += 1
        store.ledger.tallies.of(namespace.epoch).refused[reason] += 1
        if store.mover is not None and reason is not Miss.STORE_SHED:
            store.mover.press()

    def commit(
        self, engine: bytes, sequences: Sequence[int], reply: Callable[[bytes], None]
    ) -> None:
        """See `Store.commit`."""
        store = self._store
        records = [self._take_back(engine, sequence) for sequence in sequences]
        mine = [record for record in records if record is not None]
        digests: dict[int, bytes] = {}

        def take(record: MemoryRecord) -> None:
            slot = store.view(record, record.stride)
            slot[record.length :] = bytes(record.stride - record.length)
            digests[record.sequence] = record_digest(slot[: record.length], record.seed)

        def taken(outcomes: list[BaseException | None]) -> None:
            codes = [self._publish(record, digests) for record in records]
            if store.mover is not None:
                store.mover.run()
            store.loads.slots_freed()
            reply(bytes(codes))

        store.runtime.start(DIGEST, take, mine, taken)

    def abort(self, engine: bytes, sequences: Sequence[int]) -> bytes:
        """See `Store.abort`."""
        codes = bytearray()
        for sequence in sequences:
            record = self._take_back(engine, sequence)
            codes.append(Miss.UNKNOWN if record is None else 0)
            if record is not None:
                self._drop(record, Miss.CANCELLED)
        return bytes(codes)

    def engine_gone(self, engine: bytes) -> int:
        """Nobody can write its slots any more. Returns how many were freed."""
        sequences = self._holdings.pop(engine, set())
        del self._held_bytes[engine]
        for sequence in sequences:
            self._drop(self._records.pop(sequence), Miss.CANCELLED)
        return len(sequences)

    def _reserved_bytes_max(self, stride: int) -> int:
        """Stores leave at least one slot, and `load_reserve_bytes`, to loads."""
        kept = max(stride, self._store.bounds.load_reserve_bytes)
        return self._store.memory.space.capacity_bytes - kept

    def _take_back(self, engine: bytes, sequence: int) -> MemoryRecord | None:
        holdings = self._holdings.get(engine)
        if holdings is None or sequence not in holdings:
            return None
        holdings.discard(sequence)
        record = self._records.pop(sequence)
        self._held_bytes[engine] -= record.stride
        return record

    def _drop(self, record: MemoryRecord, why: Miss) -> None:
        if not record.doomed:  # else it was counted when it was reset
            self._store.ledger.tallies.of(record.epoch).abandoned[why] += 1
            self._store.memory.discard(record)
        self._store.memory.unpin(record)

    def _publish(self, record: MemoryRecord | None, digests: dict[int, bytes]) -> int:
        if record is None:
            return Miss.UNKNOWN
        if record.doomed or record.sequence not in digests:
            reason = Miss.RESET if record.doomed else Miss.IO_ERROR
            self._drop(record, reason)
            return reason
        store = self._store
        dirty_since = None if store.disk is None else store.runtime.now()
        store.memory.publish(record, digests[record.sequence], dirty_since)
        store.memory.unpin(record)
        store.ledger.stored(record)
        return 0
