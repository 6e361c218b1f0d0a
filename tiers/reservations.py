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
    from collections.abc import Callable, Iterable, Sequence

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
        on_disk = self._store.lookups.disk_rows(namespace, keys).tolist()
        grants: list[Grant] = []
        while len(grants) < len(keys):
            # Looked at anew: what was placed for a key may have evicted one behind it.
            streak = self._streak(namespace, keys, on_disk, len(grants))
            if not streak:
                grants.append(NOTHING_TO_DO)
                continue
            records, reason = self._place(engine, namespace, streak, length)
            grants += [Grant(record.offset, record.sequence) for record in records]
            if reason is not None:
                self._count_refusal(namespace, reason)
                return grants, reason
        return grants, None

    def _streak(
        self, namespace: Namespace, keys: Sequence[bytes], on_disk: list[int], start: int
    ) -> list[bytes]:
        """The keys from `start` on, up to the first that is held or was named before."""
        in_memory = self._store.memory.index(namespace.epoch)
        streak: dict[bytes, None] = {}
        for position in range(start, len(keys)):
            key = keys[position]
            if on_disk[position] != NO_ROW or key in in_memory or key in streak:
                break
            streak[key] = None
        return list(streak)

    def _place(
        self, engine: bytes, namespace: Namespace, keys: list[bytes], length: int
    ) -> tuple[list[MemoryRecord], Miss | None]:
        """Slots for the first of these keys, which nobody holds, and why not for all."""
        store, ledger, epoch = self._store, self._store.ledger, namespace.epoch
        stride = store.memory.space.stride(length)
        room, refusal = self._room(engine, namespace, stride)
        wanted = keys[:room]
        records = store.placement.place_many(namespace, wanted, length, State.RESERVED)
        reason = None if len(records) == len(keys) else refusal
        if len(records) < len(wanted):
            reason = self._why_busy(namespace, stride)
        misses, holdings = ledger.tallies.of(epoch).misses, self._holdings.setdefault(engine, set())
        for record in records:
            missed = ledger.ghosts.reason(epoch, record.key)
            record.used_again = missed in WAS_HERE
            misses[missed] += 1
            self._records[record.sequence] = record
            holdings.add(record.sequence)
        self._held_bytes[engine] += stride * len(records)
        return records, reason

    def _room(self, engine: bytes, namespace: Namespace, stride: int) -> tuple[int, Miss]:
        """How many slots the engine may have just now at most, and what would refuse one more."""
        memory, bounds, epoch = self._store.memory, self._store.bounds, namespace.epoch
        window = max(stride, bounds.store_window_bytes)
        # Below a cap, too, stores leave something to loads.
        cap_bytes = memory.space.shares.cap_bytes(epoch)
        kept = max(stride, bounds.load_reserve_bytes * cap_bytes // memory.space.capacity_bytes)
        left = (
            (window - self._held_bytes[engine], Miss.STORE_SHED),
            (self._reserved_bytes_max(stride) - memory.reserved_bytes, Miss.BUSY),
            (cap_bytes - kept - memory.reserved_of[epoch], Miss.OVER_QUOTA),
        )
        left_bytes, reason = min(left, key=lambda row: row[0] // stride)
        return max(0, left_bytes // stride), reason

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
            self._clear_padding(record)
            payload = store.view(record, record.length)
            digests[record.sequence] = record_digest(payload, record.seed)

        def taken(outcomes: list[BaseException | None]) -> None:
            reply(
                self._publish_all(
                    (record, None if record is None else digests.get(record.sequence))
                    for record in records
                )
            )

        store.runtime.start(DIGEST, take, mine, taken)

    def commit_digests(self, engine: bytes, digests: Iterable[tuple[int, bytes]]) -> bytes:
        """See `Store.commit_digests`."""
        rows = [(self._take_back(engine, sequence), digest) for sequence, digest in digests]
        for record, _ in rows:
            if record is not None and record.length < record.stride:
                self._clear_padding(record)
        return self._publish_all(rows)

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

    def _clear_padding(self, record: MemoryRecord) -> None:
        """What lies behind the payload goes to disk with it."""
        slot = self._store.view(record, record.stride)
        slot[record.length :] = bytes(record.stride - record.length)

    def _publish_all(self, rows: Iterable[tuple[MemoryRecord | None, bytes | None]]) -> bytes:
        store = self._store
        codes = [self._publish(record, digest) for record, digest in rows]
        if store.mover is not None:
            store.mover.run()
        store.loads.slots_freed()
        return bytes(codes)

    def _publish(self, record: MemoryRecord | None, digest: bytes | None) -> int:
        if record is None:
            return Miss.UNKNOWN
        if record.doomed or digest is None:
            reason = Miss.RESET if record.doomed else Miss.IO_ERROR
            self._drop(record, reason)
            return reason
        store = self._store
        dirty_since = None if store.disk is None else store.runtime.now()
        store.memory.publish(record, digest, dirty_since)
        store.memory.unpin(record)
        store.ledger.stored(record)
        return 0
