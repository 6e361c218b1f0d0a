"""The memory tier: which record lies in which arena slot, and in what state.

States of a record: RESERVED (an engine's worker writes it) or READING (the disk tier writes it),
then WHOLE (its digest is known and it can be read). Only whole, unpinned records are candidates for
eviction. Control thread only; every call is O(1) but for evictions that drain a segment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from enum import IntEnum
from typing import TYPE_CHECKING

from ebbtide.errors import MisuseError
from ebbtide.tiers.digest import record_seed
from ebbtide.tiers.segments import SegmentSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.tiers.namespace import Namespace


_NOTHING: Mapping[bytes, MemoryRecord] = {}  # what an epoch has that nobody stores to


class State(IntEnum):
    """The life of a memory record. It leaves any state by `discard`."""

    RESERVED = 1
    READING = 2
    WHOLE = 3


class MemoryRecord:
    """One record in the arena: `length` bytes of payload in `stride` bytes at `offset`."""

    __slots__ = (
        "digest",
        "dirty",
        "doomed",
        "epoch",
        "key",
        "length",
        "offset",
        "pins",
        "seed",
        "sequence",
        "state",
        "stride",
        "used_again",
        "waiting",
    )

    def __init__(self, namespace: Namespace, key: bytes, sequence: int, state: State) -> None:
        self.epoch = namespace.epoch
        self.seed = record_seed(namespace.digest, key)
        self.key = key
        self.sequence = sequence
        self.state = state
        self.digest = b""
        self.length = self.stride = 0
        self.offset = -1  # before it is placed
        self.pins = 0
        self.dirty = False  # whole, but no disk tier holds it
        self.used_again = False  # since it was stored, or it had been here before
        self.doomed = False  # out of the index; the slot goes with the last pin
        self.waiting: list[Callable[[], None]] = []  # loads that wait for READING to end


class MemoryTier:
    """The index over the arena. Knows slots, states and pins; moves no bytes."""

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        self.space: SegmentSpace[MemoryRecord] = SegmentSpace(capacity_bytes, alignment=alignment)
        self._index: dict[int, dict[bytes, MemoryRecord]] = {}
        self.dirty: dict[MemoryRecord, float] = {}  # since when (runtime seconds), oldest first
        self.dirty_bytes = 0
        self.reserved_bytes = 0  # strides of RESERVED slots, also discarded ones still written
        self.reserved_of: dict[int, int] = defaultdict(int)  # the same by epoch
        self.pinned_bytes = 0  # strides of pinned slots
        self.in_state: Counter[State] = Counter()  # records that can be found, by their state
        self.payload_of: Counter[int] = Counter()  # bytes of the records by epoch

    @property
    def records(self) -> int:
        """Records that can be found, whole ones and others."""
        return self.in_state.total()

    def index(self, epoch: int) -> Mapping[bytes, MemoryRecord]:
        """The epoch's records by key."""
        return self._index.get(epoch, _NOTHING)

    def find(self, epoch: int, key: bytes) -> MemoryRecord | None:
        """The record of that key in whatever state, or None."""
        return self.index(epoch).get(key)

    def forget(self, epoch: int) -> None:
        """Discard every record of an epoch. Slots that are pinned go with their last pin."""
        for record in list(self.index(epoch).values()):
            self.discard(record)
        self._index.pop(epoch, None)
        del self.payload_of[epoch]
        if not self.reserved_of[epoch]:
            del self.reserved_of[epoch]

    def place(self, records: Sequence[MemoryRecord], length: int) -> int:
        """Take free slots for new records of one epoch and state, pinned by whoever fills them.

        Returns how many, from the first, have one: for more, evict first.
        """
        epoch, state, space = records[0].epoch, records[0].state, self.space
        offsets = space.place_many(records, length, space.shares.order(epoch))
        if not offsets:
            return 0
        stride, index = space.stride(length), self._index.setdefault(epoch, {})
        for record, offset in zip(records, offsets, strict=False):
            record.offset, record.length, record.stride = offset, length, stride
            record.pins = 1
            index[record.key] = record
        count = len(offsets)
        self.in_state[state] += count
        self.payload_of[epoch] += length * count
        space.shares.take(epoch, stride * count)
        if state is State.RESERVED:
            self._reserved(epoch, stride * count)
        self.pinned_bytes += stride * count
        return count

    def publish(self, record: MemoryRecord, digest: bytes, dirty_since: float | None) -> None:
        """The record is whole; the filler's pin stays until `unpin`.

        `dirty_since` None: a disk tier holds the same record already.
        """
        if record.state is State.RESERVED:
            self._reserved(record.epoch, -record.stride)
        self.in_state[record.state] -= 1
        self.in_state[State.WHOLE] += 1
        record.state = State.WHOLE
        record.digest = digest
        if dirty_since is not None:
            record.dirty = True
            self.dirty[record] = dirty_since
            self.dirty_bytes += record.stride

    def clean(self, record: MemoryRecord) -> None:
        """A disk tier holds it now. No-op for a record that is clean or gone."""
        if record.dirty:
            record.dirty = False
            del self.dirty[record]
            self.dirty_bytes -= record.stride

    def soil(self, record: MemoryRecord, since: float) -> None:
        """The disk copy is lost again (a failed commit): only memory holds it."""
        if record.state is State.WHOLE and not record.dirty and not record.doomed:
            record.dirty = True
            self.dirty[record] = since
            self.dirty_bytes += record.stride

    def sort_dirty(self) -> None:
        """As they were reserved, a chain's head before its tail: digests end in any order.

        O(n log n). Their ages no longer rise with their place.
        """
        self.dirty = dict(sorted(self.dirty.items(), key=lambda item: item[0].sequence))

    def pin(self, record: MemoryRecord, *, hide: bool = True) -> None:
        """Keep the slot until `unpin`. Pins count.

        With `hide` False the record keeps its place in the order of eviction: for the mover, whose
        writing is no use of the record. Whoever evicts must look at `pins`.
        """
        if hide:
            self.space.hide(record.offset)
        if record.pins == 0:
            self.pinned_bytes += record.stride
        record.pins += 1

    def unpin(self, record: MemoryRecord) -> None:
        """Give one pin back. The last one frees a discarded record, or lets it be evicted again:
        as the most recent one, if it was hidden."""
        record.pins -= 1
        if record.pins:
            return
        self.pinned_bytes -= record.stride
        if record.doomed:
            self._free(record)
        elif record.state is State.WHOLE:
            self.space.expose(record.offset)

    def touch(self, record: MemoryRecord) -> None:
        """Somebody asked for it."""
        self.space.touch(record.offset)

    def discard(self, record: MemoryRecord) -> None:
        """Out of the index at once; the slot is free now, or with its last pin."""
        index = self._index[record.epoch]
        if index.get(record.key) is record:
            del index[record.key]
        self.in_state[record.state] -= 1
        self.payload_of[record.epoch] -= record.length
        self.space.shares.give(record.epoch, record.stride)
        self.clean(record)
        if record.pins:
            record.doomed = True
        else:
            self._free(record)

    def _free(self, record: MemoryRecord) -> None:
        if record.state is State.RESERVED:
            self._reserved(record.epoch, -record.stride)
        self.space.remove(record, record.length, record.offset)

    def _reserved(self, epoch: int, more_bytes: int) -> None:
        self.reserved_bytes += more_bytes
        self.reserved_of[epoch] += more_bytes
        if epoch not in self._index and not self.reserved_of[epoch]:
            del self.reserved_of[epoch]  # of a life that has ended

    def check_integrity(self) -> None:
        """Raise MisuseError when slots, pins or counters contradict each other. O(slots)."""
        self.space.check_integrity()
        records = list(self.space.owners())
        live = {(r.epoch, r.key): r for r in records if not r.doomed}
        if live != {(e, key): r for e, found in self._index.items() for key, r in found.items()}:
            raise MisuseError("The memory index and the slots disagree", records=len(live))

        payload = {e: sum(r.length for r in found.values()) for e, found in self._index.items()}
        if +Counter(payload) != +self.payload_of:
            raise MisuseError("The payload of a namespace is miscounted", counted=payload)

        used = Counter[int]()
        for record in live.values():
            used[record.epoch] += record.stride
        if used != self.space.shares.used_of:
            raise MisuseError("The share of a namespace is miscounted", counted=used)

        def strides(of: Callable[[MemoryRecord], bool]) -> int:
            return sum(record.stride for record in records if of(record))

        states = Counter(record.state for record in live.values())
        if states != +self.in_state:
            raise MisuseError("The states of records are miscounted", counted=states)

        counted = (
            len(live),
            sum(record.length for record in records),
            strides(lambda record: record.dirty),
            strides(lambda record: record.state is State.RESERVED),
            strides(lambda record: record.pins > 0),
        )
        claimed = (
            self.records,
            self.space.payload_bytes,
            self.dirty_bytes,
            self.reserved_bytes,
            self.pinned_bytes,
        )
        if counted != claimed:
            raise MisuseError("Memory counters disagree", counted=counted, claimed=claimed)
