"""Slots for records of any size on one medium: the arena and the slab file use the same class.

The medium is divided into segments; a segment serves slots of one *stride* (record length
rounded up to the alignment) at a time. A size without space takes a free segment; where none is
left, somebody must be evicted first: `tiers.eviction` says who. This class does the arithmetic; it
knows no bytes, no keys and no I/O.
"""

from __future__ import annotations

import heapq
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from ebbtide.errors import ConfigError, MisuseError
from ebbtide.tiers.eviction import Eviction
from ebbtide.tiers.policy import LRU, RecencyClock
from ebbtide.tiers.shares import COMMON, Shares
from ebbtide.tiers.slot_class import Owner, Segment, SlotClass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

ALIGNMENT_BYTES = 4096
SEGMENT_BYTES_MAX = 64 << 20
SEGMENT_BYTES_MIN = 4 << 20
SEGMENTS_WANTED = 16  # a small medium is cut into about this many segments


def segment_bytes_for(capacity_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """64 MiB, or for small capacities the power of two next below a sixteenth, at least 4 MiB."""
    wanted = max(capacity_bytes // SEGMENTS_WANTED, 1)
    power = 1 << (wanted.bit_length() - 1)
    size = min(max(power, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX, max(capacity_bytes, alignment))
    return size // alignment * alignment


class SegmentSpace(Generic[Owner]):
    """The slots of one medium of `capacity_bytes`. A slot is named by its byte offset.

    Every method runs on the store's control thread. `place`, `remove`, `touch` are O(1) (place:
    O(log slots of a segment)); `victims` is O(orders) unless a segment has to be drained, then
    O(segments).
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        alignment: int = ALIGNMENT_BYTES,
        segment_bytes: int | None = None,
    ) -> None:
        self.alignment = alignment
        self.segment_bytes = segment_bytes or segment_bytes_for(capacity_bytes, alignment)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0  # strides of occupied slots, padding included
        self.payload_bytes = 0
        self.shares = Shares(capacity_bytes)  # kept by whoever knows which records count
        self.clock = RecencyClock()
        self.classes: dict[int, SlotClass[Owner]] = {}  # by stride
        whole, rest = divmod(capacity_bytes, self.segment_bytes)
        self._segments: list[Segment[Owner]] = [
            Segment(index, self.segment_bytes) for index in range(whole)
        ]
        if rest >= alignment:
            self._segments.append(Segment(whole, rest // alignment * alignment))
        self._free_segments = list(range(len(self._segments)))  # heap
        self.largest_bytes = self._segments[0].size_bytes if self._segments else 0  # of a slot
        self._eviction = Eviction(self.classes, self.shares, self.clock)

    # -- geometry -------------------------------------------------------------------------------

    def stride(self, length: int) -> int:
        """Slot bytes for a record of `length` bytes. Raises ConfigError when no segment holds
        one.
        """
        if length <= 0:
            raise MisuseError("A record must have at least one byte", length=length)
        stride = -(-length // self.alignment) * self.alignment
        if stride > self.largest_bytes:
            raise ConfigError(
                "A record does not fit into a segment of this tier",
                next_step="Raise the tier's capacity: a segment is a sixteenth of it.",
                record_bytes=length,
                segment_bytes=self.largest_bytes,
                capacity_bytes=self.capacity_bytes,
            )
        return stride

    def slots_for(self, length: int) -> int:
        """How many records of `length` bytes the whole medium holds."""
        stride = self.stride(length)
        return sum(segment.size_bytes // stride for segment in self._segments)

    def stride_at(self, offset: int) -> int:
        """Bytes of the occupied slot at `offset`."""
        return self._at(offset)[1].stride

    # -- occupying slots ------------------------------------------------------------------------

    def spoil(self, offset: int) -> None:
        """The slot there will not be freed."""
        self._at(offset)[0].spoiled += 1

    def can_hold(self, length: int) -> bool:
        """Whether there will ever be a slot for a record of `length` bytes. O(segments)."""
        stride = self.stride(length)
        for segment in self._segments:
            slot_class = segment.slot_class
            if slot_class is not None and slot_class.stride == stride:
                possible = segment.spoiled < segment.size_bytes // stride
            else:
                possible = not segment.spoiled and segment.size_bytes >= stride
            if possible:
                return True
        return False

    def place(self, owner: Owner, length: int, order: int = COMMON) -> int | None:
        """Give the owner a free slot: its offset. None: something must be evicted first.

        `order`: of eviction, see `Shares.order`.
        """
        offsets = self.place_many([owner], length, order)
        return offsets[0] if offsets else None

    def place_many(self, owners: Sequence[Owner], length: int, order: int = COMMON) -> list[int]:
        """The same for many records of one length: as many offsets as there were free slots."""
        slot_class = self._class_for(self.stride(length))
        stride, policy = slot_class.stride, slot_class.policy
        offsets: list[int] = []
        while len(offsets) < len(owners):
            segment = slot_class.open_segment() or self._take_segment(slot_class)
            if segment is None:
                break
            first_slot = segment.position * slot_class.slots_per_segment
            first_offset = segment.index * self.segment_bytes
            these = owners[len(offsets) : len(offsets) + len(segment.free)]
            for owner in these:
                number = heapq.heappop(segment.free)
                slot_class.owners[first_slot + number] = owner
                policy.assign(first_slot + number, order)
                offsets.append(first_offset + number * stride)
            segment.hold(order, len(these))
            segment.used += len(these)
        self.used_bytes += stride * len(offsets)
        self.payload_bytes += length * len(offsets)
        return offsets

    def place_all(
        self, owners: Sequence[Owner], lengths: Ints, offsets: Ints, orders: Ints | None = None
    ) -> Bools:
        """Occupy exactly these slots, in a space without any: for opening a directory.

        `orders`: of eviction, as in `place`; None: all are of the common one. Where two cannot
        both be, the first has its slot. Returns which have one; they are hidden until `expose_all`.
        O(n log n), vectorised: 0.3 s for a million.
        """
        strides = -(-lengths // self.alignment) * self.alignment
        segments, inside = np.divmod(offsets, self.segment_bytes)
        sizes = np.array([segment.size_bytes for segment in self._segments], np.int64)
        possible = (lengths > 0) & (offsets >= 0) & (segments < len(sizes))
        at = np.flatnonzero(possible)
        at = at[inside[at] % strides[at] == 0]
        at = at[inside[at] + strides[at] <= sizes[segments[at]]]
        used, first = np.unique(segments[at], return_index=True)
        stride_of = np.zeros(len(sizes), np.int64)  # a segment serves one size: its first one's
        stride_of[used] = strides[at[first]]
        at = at[strides[at] == stride_of[segments[at]]]
        at = at[np.sort(np.unique(offsets[at], return_index=True)[1])]
        at = at[np.argsort(segments[at], kind="stable")]
        used, starts, counts = np.unique(segments[at], return_index=True, return_counts=True)
        for index, start, count in zip(used.tolist(), starts, counts, strict=True):
            mine, stride = at[start : start + count], int(stride_of[index])
            segment, slot_class = self._segments[index], self._class_for(stride)
            self._use(segment, slot_class)
            slot_class.occupy(
                segment,
                inside[mine] // stride,
                [owners[n] for n in mine.tolist()],
                None if orders is None else orders[mine],
            )
        self._free_segments = [s.index for s in self._segments if s.slot_class is None]
        self.used_bytes += int(strides[at].sum())
        self.payload_bytes += int(lengths[at].sum())
        placed = np.zeros(len(lengths), np.bool_)
        placed[at] = True
        return placed

    def remove(self, owner: Owner, length: int, offset: int) -> None:
        """Free the owner's slot. A segment that becomes empty is free for any size again."""
        segment, slot_class, slot = self._at(offset)
        self._free(segment, slot_class, [slot], [owner])
        self.payload_bytes -= length

    def remove_many(self, owners: Sequence[Owner], lengths: Ints, offsets: Ints) -> None:
        """The same for many slots: a microsecond each."""
        done = 0
        for segment, slot_class, slots in self._by_segment(offsets):
            self._free(segment, slot_class, slots, owners[done : done + len(slots)])
            done += len(slots)
        self.payload_bytes -= int(lengths.sum())

    def free_bytes(self, stride: int) -> int:
        """Bytes that records of this stride could take without any eviction."""
        total = sum(self._segments[index].size_bytes for index in self._free_segments)
        slot_class = self.classes.get(stride)
        if slot_class is not None:
            total += sum(len(s.free) * stride for s in slot_class.segments if s is not None)
        return total

    # -- order of eviction ----------------------------------------------------------------------

    def expose(self, offset: int) -> None:
        """The slot may be evicted from now on, as the most recent. No-op if it may already."""
        segment, slot_class, slot = self._at(offset)
        if slot in slot_class.policy:
            return
        slot_class.policy.insert(slot)
        segment.exposed += 1
        self._eviction.touched(segment, self.clock.now)

    def expose_many(self, offsets: Ints) -> None:
        """The same for many, coldest first: a microsecond each."""
        for segment, slot_class, slots in self._by_segment(offsets):
            policy = slot_class.policy
            hidden = [slot for slot in slots if slot not in policy]
            for slot in hidden:
                policy.insert(slot)
            segment.exposed += len(hidden)
            if hidden:
                self._eviction.touched(segment, self.clock.now)

    def expose_all(self, offsets: Ints) -> None:
        """The same for all slots at once, each once and all hidden. Vectorised."""
        stamps = np.arange(1, len(offsets) + 1) + self.clock.now
        self.clock.now += len(offsets)
        segments, inside = np.divmod(offsets, self.segment_bytes)
        for slot_class in self.classes.values():
            mine = [s.index for s in slot_class.segments if s is not None]
            here = np.flatnonzero(np.isin(segments, mine))
            position = np.zeros(len(self._segments), np.int64)
            position[mine] = [self._segments[index].position for index in mine]
            slots = position[segments[here]] * slot_class.slots_per_segment
            slots += inside[here] // slot_class.stride
            slot_class.policy.insert_all(slots, stamps[here])
        counts = np.bincount(segments, minlength=len(self._segments)).tolist()
        last = np.zeros(len(self._segments), np.int64)
        last[segments] = stamps  # of several the last stays
        for index in np.argsort(last).tolist():
            if counts[index]:
                segment = self._segments[index]
                segment.exposed += counts[index]
                self._eviction.touched(segment, int(last[index]))

    def hide(self, offset: int) -> None:
        """The slot must not be evicted (pinned, being written). No-op when it is hidden."""
        segment, slot_class, slot = self._at(offset)
        self._hide(segment, slot_class, [slot])

    def hide_many(self, offsets: Ints) -> None:
        """The same for many: a microsecond each."""
        for segment, slot_class, slots in self._by_segment(offsets):
            self._hide(segment, slot_class, slots)

    def touch(self, offset: int) -> None:
        """Somebody asked for it. A hidden slot only takes the stamp."""
        segment, slot_class, slot = self._at(offset)
        if slot in slot_class.policy:
            slot_class.policy.touch(slot)
        else:
            slot_class.policy.stamp_absent(slot)
        self._eviction.touched(segment, self.clock.now)

    def stamp(self, offset: int) -> int:
        """Recency of the slot, comparable over all sizes: larger is more recent."""
        _, slot_class, slot = self._at(offset)
        return slot_class.policy.stamp(slot)

    def victims(
        self,
        length: int,
        evictable: Callable[[Owner], bool] | None = None,
        sake: int = COMMON,
        *,
        count: int = 1,
        strict: bool = False,
    ) -> list[Owner]:
        """Owners whose removal makes room for one record of `length` bytes; [] when nothing can go.

        Without `evictable` every exposed one may go, but for what is kept for other namespaces than
        `sake`, whose record it is. Nobody is shut out for good: who has no slot of that size at all
        may take one, whatever is kept for others; not if `strict`.

        Either the coldest evictable one of the same stride, or all of the coldest segment of
        another stride. For room for `count` records: as many of the same stride as would go one
        after the other, at least one. Nothing is changed.
        """
        return self._eviction.victims(self.stride(length), evictable, sake, count, strict)

    def coldest_of(
        self, orders: Collection[int], evictable: Callable[[Owner], bool] | None = None
    ) -> Owner | None:
        """The coldest evictable one of these orders, of whatever size. O(sizes)."""
        return self._eviction.coldest_of(orders, evictable)

    def fits_cap(self, epoch: int, length: int) -> bool:
        """Whether the epoch may ever hold a record of `length` bytes."""
        return self.stride(length) <= self.shares.cap_bytes(epoch)

    def make_room_below_cap(
        self,
        epoch: int,
        length: int,
        evict: Callable[[Owner], None],
        evictable: Callable[[Owner], bool] | None = None,
    ) -> bool:
        """Have an epoch at its cap give up its own coldest for one record of `length` bytes.

        False: not enough of it may go now.
        """
        if self.shares.is_common:
            return True
        stride = self.stride(length)
        while self.shares.excess(epoch, stride) > 0:
            coldest = self._eviction.coldest_of((epoch,), evictable)
            if coldest is None:
                return False
            evict(coldest)
        return True

    def coldest_lawful(self, sake: int) -> Owner | None:
        """The coldest one of whatever size that may go for the sake of an epoch. O(orders)."""
        return self._eviction.coldest_lawful(sake)

    def coldest_first(self, each_max: int | None = None) -> Iterator[Owner]:
        """The owners that may be evicted, coldest first within each size and order, at most
        `each_max` of them.
        """
        for slot_class in self.classes.values():
            for order in list(slot_class.policy.orders()):
                for slot in islice(slot_class.policy.coldest_first((order,)), each_max):
                    yield slot_class.owners[slot]  # type: ignore[misc]  # an Owner: it is taken

    def recency(self) -> Callable[[], list[Owner]]:
        """A snapshot of all owners with their stamps: what it returns sorts them, coldest first,
        in whatever thread. O(slots), 5 ms for a million.
        """
        snapshot = [(c.policy.stamps(), c.owners.copy()) for c in self.classes.values()]

        def order() -> list[Owner]:
            stamps = np.concatenate([np.zeros(0, np.int64), *(stamps for stamps, _ in snapshot)])
            owners = [owner for _, some in snapshot for owner in some]
            ordered = (owners[number] for number in np.argsort(stamps, kind="stable").tolist())
            return [owner for owner in ordered if owner is not None]

        return order

    def owners(self) -> Iterator[Owner]:
        """Every owner, exposed or hidden, in no order."""
        for slot_class in self.classes.values():
            for owner in slot_class.owners:
                if owner is not None:
                    yield owner

    def check_integrity(self) -> None:
        """Raise MisuseError when a segment contradicts itself. O(slots)."""
        used = sum(segment.check_integrity() for segment in self._eviction.in_use)
        if used != self.used_bytes:
            raise MisuseError("Byte counters disagree", counted=used, claimed=self.used_bytes)

    # -- inside ---------------------------------------------------------------------------------

    @staticmethod
    def _hide(segment: Segment[Owner], slot_class: SlotClass[Owner], slots: list[int]) -> None:
        policy = slot_class.policy
        for slot in slots:
            if slot in policy:
                policy.remove(slot)
                segment.exposed -= 1

    def _free(
        self,
        segment: Segment[Owner],
        slot_class: SlotClass[Owner],
        slots: list[int],
        owners: Sequence[Owner],
    ) -> None:
        """Free slots of one segment."""
        self._hide(segment, slot_class, slots)
        first = segment.position * slot_class.slots_per_segment
        for slot, owner in zip(slots, owners, strict=True):
            if slot_class.owners[slot] != owner:
                raise MisuseError("A slot was freed twice", slot=slot, stride=slot_class.stride)
            slot_class.owners[slot] = None
            segment.hold(slot_class.policy.order(slot), -1)
            heapq.heappush(segment.free, slot - first)
        self.used_bytes -= slot_class.stride * len(slots)
        segment.used -= len(slots)
        if segment.used:
            slot_class.open(segment.position)
        else:
            slot_class.drop(segment)
            self._eviction.emptied(segment)
            heapq.heappush(self._free_segments, segment.index)

    def _by_segment(
        self, offsets: Ints
    ) -> Iterator[tuple[Segment[Owner], SlotClass[Owner], list[int]]]:
        """As `_at`, for occupied slots in this order: those that follow each other in a segment."""
        if not len(offsets):
            return
        indices, inside = np.divmod(offsets, self.segment_bytes)
        starts = [0, *(np.flatnonzero(np.diff(indices)) + 1).tolist(), len(offsets)]
        for start, end in pairwise(starts):
            segment = self._segments[int(indices[start])]
            slot_class = segment.slot_class
            if slot_class is None:
                raise MisuseError("Nobody has a slot there", offset=int(offsets[start]))
            first = segment.position * slot_class.slots_per_segment
            yield segment, slot_class, (first + inside[start:end] // slot_class.stride).tolist()

    def _at(self, offset: int) -> tuple[Segment[Owner], SlotClass[Owner], int]:
        """The segment, the class and the number in it of the occupied slot at `offset`."""
        index, inside = divmod(offset, self.segment_bytes)
        segment = self._segments[index]
        slot_class = segment.slot_class
        if slot_class is None:
            raise MisuseError("Nobody has a slot there", offset=offset)
        slot = segment.position * slot_class.slots_per_segment + inside // slot_class.stride
        return segment, slot_class, slot

    def _class_for(self, stride: int) -> SlotClass[Owner]:
        slot_class = self.classes.get(stride)
        if slot_class is None:
            slot_class = SlotClass(stride, self.segment_bytes // stride, LRU(self.clock))
            self.classes[stride] = slot_class
        return slot_class

    def _take_segment(self, slot_class: SlotClass[Owner]) -> Segment[Owner] | None:
        """A free segment for the class, if there is one that holds a slot of it."""
        if not self._free_segments:
            return None
        segment = self._segments[self._free_segments[0]]
        if segment.size_bytes < slot_class.stride:
            return None  # only the last, short segment can be too small, and it sorts last
        heapq.heappop(self._free_segments)
        self._use(segment, slot_class)
        return segment

    def _use(self, segment: Segment[Owner], slot_class: SlotClass[Owner]) -> None:
        slot_class.add(segment)
        self._eviction.touched(segment, self.clock.now)
