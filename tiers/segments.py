"""Slots for records of any size on one medium: the arena and the slab file use the same class.

The medium is divided into segments; a segment serves slots of one *stride* (record length
rounded up to the alignment) at a time. A size without space takes a free segment, else it evicts
its own coldest record or drains the segment that is coldest over all namespaces, whichever is
colder. This class does the arithmetic and the order; it knows no bytes, no keys and no I/O.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from ebbtide.errors import ConfigError, MisuseError
from ebbtide.tiers.policy import LRU, EvictionPolicy, RecencyClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALIGNMENT_BYTES = 4096
SEGMENT_BYTES_MAX = 64 << 20
SEGMENT_BYTES_MIN = 4 << 20
SEGMENTS_WANTED = 16  # a small medium is cut into about this many segments
SCAN_MAX = 256  # how far an eviction looks past records that cannot go right now


class Resident:
    """What occupies a slot. Tiers derive their records from it; the space fills in the place."""

    __slots__ = ("length", "slot", "slot_class")

    slot_class: SlotClass
    slot: int
    length: int  # payload bytes; the slot has `slot_class.stride` bytes


R = TypeVar("R", bound=Resident)


class Segment:
    """One piece of the medium, and which of its slots are free."""

    __slots__ = (
        "exposed",
        "free",
        "index",
        "last_touch",
        "position",
        "size_bytes",
        "slot_class",
        "used",
    )

    def __init__(self, index: int, size_bytes: int) -> None:
        self.index = index
        self.size_bytes = size_bytes
        self.slot_class: SlotClass | None = None
        self.position = -1  # in its class
        self.free: list[int] = []  # heap of slot numbers within the segment
        self.used = 0
        self.exposed = 0  # slots of it that may be evicted
        self.last_touch = 0  # recency stamp of the most recent touch of any of its slots


class SlotClass:
    """All segments of one stride. Slots are dense integers: position * slots_per_segment + n."""

    __slots__ = (
        "listed",
        "open_positions",
        "policy",
        "residents",
        "segments",
        "slots_per_segment",
        "stride",
    )

    def __init__(self, stride: int, slots_per_segment: int, policy: EvictionPolicy) -> None:
        self.stride = stride
        self.slots_per_segment = slots_per_segment
        self.policy = policy
        self.segments: list[Segment | None] = []
        self.residents: list[Resident | None] = []
        self.open_positions: list[int] = []  # heap of positions that may have a free slot
        self.listed: set[int] = set()  # what is in that heap: each once, so that it is bounded

    def open(self, position: int) -> None:
        if position not in self.listed:
            self.listed.add(position)
            heapq.heappush(self.open_positions, position)

    def segment_of(self, slot: int) -> Segment:
        segment = self.segments[slot // self.slots_per_segment]
        assert segment is not None
        return segment


def segment_bytes_for(capacity_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """64 MiB, or for small capacities the power of two next below a sixteenth, at least 4 MiB."""
    wanted = max(capacity_bytes // SEGMENTS_WANTED, 1)
    power = 1 << (wanted.bit_length() - 1)
    size = min(max(power, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX, max(capacity_bytes, alignment))
    return size // alignment * alignment


class SegmentSpace(Generic[R]):
    """The slots of one medium of `capacity_bytes`.

    Every method runs on the store's control thread. `place`, `remove`, `touch` are O(1) (place:
    O(log slots of a segment)); `victims` is O(1) unless a segment has to be drained, then
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
        self.clock = RecencyClock()
        self.classes: dict[int, SlotClass] = {}
        whole, rest = divmod(capacity_bytes, self.segment_bytes)
        self._segments = [Segment(index, self.segment_bytes) for index in range(whole)]
        if rest >= alignment:
            self._segments.append(Segment(whole, rest // alignment * alignment))
        self._free_segments = list(range(len(self._segments)))  # heap
        self._by_touch: OrderedDict[Segment, None] = OrderedDict()  # in use, coldest first

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

    @property
    def largest_bytes(self) -> int:
        """The largest slot that can exist here."""
        return self._segments[0].size_bytes if self._segments else 0

    def slots_for(self, length: int) -> int:
        """How many records of `length` bytes the whole medium holds."""
        stride = self.stride(length)
        return sum(segment.size_bytes // stride for segment in self._segments)

    def offset(self, resident: R) -> int:
        """Byte offset of the resident's slot on the medium."""
        slot_class = resident.slot_class
        position, number = divmod(resident.slot, slot_class.slots_per_segment)
        segment = slot_class.segments[position]
        assert segment is not None
        return segment.index * self.segment_bytes + number * slot_class.stride

    # -- occupying slots ------------------------------------------------------------------------

    def place(self, resident: R, length: int) -> bool:
        """Give the resident a free slot; False when there is none and something must be evicted."""
        slot_class = self._class_for(self.stride(length))
        segment = self._open_segment(slot_class)
        if segment is None:
            return False
        number = heapq.heappop(segment.free)
        self._occupy(resident, length, slot_class, segment, number)
        return True

    def place_at(self, resident: R, length: int, offset: int) -> bool:
        """Occupy exactly the slot at `offset`; False when it is not to be had.

        For opening a directory: call `finish_placing` once behind the last one.
        """
        index, inside = divmod(offset, self.segment_bytes)
        stride = self.stride(length)
        if not 0 <= index < len(self._segments) or inside % stride:
            return False
        segment = self._segments[index]
        if inside + stride > segment.size_bytes:
            return False
        slot_class = self._class_for(stride)
        if segment.slot_class is None:
            self._free_segments.remove(index)
            self._assign(segment, slot_class)
        number = inside // stride
        slot = segment.position * slot_class.slots_per_segment + number
        if segment.slot_class is not slot_class or slot_class.residents[slot] is not None:
            return False
        self._occupy(resident, length, slot_class, segment, number)
        return True

    def finish_placing(self) -> None:
        """Rebuild the free lists after a series of `place_at`. O(slots)."""
        for segment in self._segments:
            slot_class = segment.slot_class
            if slot_class is None:
                continue
            first = segment.position * slot_class.slots_per_segment
            count = segment.size_bytes // slot_class.stride
            around = slot_class.residents[first : first + count]
            segment.free = [number for number, resident in enumerate(around) if resident is None]

    def remove(self, resident: R) -> None:
        """Free the resident's slot. A segment that becomes empty is free for any size again."""
        slot_class, slot = resident.slot_class, resident.slot
        position, number = divmod(slot, slot_class.slots_per_segment)
        segment = slot_class.segments[position]
        if segment is None or slot_class.residents[slot] is not resident:
            raise MisuseError("A slot was freed twice", slot=slot, stride=slot_class.stride)
        self.hide(resident)
        slot_class.residents[slot] = None
        self.used_bytes -= slot_class.stride
        self.payload_bytes -= resident.length
        segment.used -= 1
        if segment.used == 0:
            slot_class.segments[position] = None
            segment.slot_class, segment.free = None, []
            del self._by_touch[segment]
            heapq.heappush(self._free_segments, segment.index)
            return
        heapq.heappush(segment.free, number)
        slot_class.open(position)

    def free_bytes(self, stride: int) -> int:
        """Bytes that records of this stride could take without any eviction."""
        total = sum(self._segments[index].size_bytes for index in self._free_segments)
        slot_class = self.classes.get(stride)
        if slot_class is not None:
            total += sum(len(s.free) * stride for s in slot_class.segments if s is not None)
        return total

    # -- order of eviction ----------------------------------------------------------------------

    def expose(self, resident: R) -> None:
        """The resident may be evicted from now on, as the most recent. No-op if it may already."""
        policy = resident.slot_class.policy
        if resident.slot in policy:
            return
        policy.insert(resident.slot)
        segment = resident.slot_class.segment_of(resident.slot)
        segment.exposed += 1
        self._touched(segment)

    def hide(self, resident: R) -> None:
        """The resident must not be evicted (pinned, being written). No-op when it is hidden."""
        policy = resident.slot_class.policy
        if resident.slot in policy:
            policy.remove(resident.slot)
            resident.slot_class.segment_of(resident.slot).exposed -= 1

    def touch(self, resident: R) -> None:
        """Somebody asked for it. A hidden resident only takes the stamp."""
        policy = resident.slot_class.policy
        if resident.slot in policy:
            policy.touch(resident.slot)
        else:
            policy.stamp_absent(resident.slot)
        self._touched(resident.slot_class.segment_of(resident.slot))

    def stamp(self, resident: R) -> int:
        """Recency of the resident, comparable over all sizes: larger is more recent."""
        return resident.slot_class.policy.stamp(resident.slot)

    def victims(self, length: int, evictable: Callable[[R], bool]) -> list[R]:
        """Residents whose removal makes room for one record of `length` bytes; [] when nothing can
        go.

        Either the coldest evictable resident of the same stride, or all residents of the coldest
        segment of another stride. Nothing is changed.
        """
        stride = self.stride(length)
        slot_class = self.classes.get(stride)
        own = None if slot_class is None else self._coldest(slot_class, evictable)
        colder_than = self.clock.now + 1 if own is None else self.stamp(own)
        drained = self._coldest_segment(stride, colder_than, evictable)
        if drained is not None:
            return list(self._residents_of(drained))
        return [] if own is None else [own]

    def coldest_first(self, each_max: int | None = None) -> Iterator[R]:
        """The exposed residents, coldest first within each size, at most `each_max` of a size."""
        for slot_class in self.classes.values():
            for slot in islice(slot_class.policy.coldest_first(), each_max):
                yield slot_class.residents[slot]  # type: ignore[misc]  # R by construction

    def residents(self) -> Iterator[R]:
        """Every resident, exposed or hidden, in no order."""
        for slot_class in self.classes.values():
            for resident in slot_class.residents:
                if resident is not None:
                    yield resident  # type: ignore[misc]  # R by construction

    def check_integrity(self) -> None:
        """Raise MisuseError when two residents overlap or a counter disagrees. O(slots)."""
        used = payload = 0
        seen: set[int] = set()
        for resident in self.residents():
            offset, stride = self.offset(resident), resident.slot_class.stride
            cells = range(offset // self.alignment, (offset + stride) // self.alignment)
            if not seen.isdisjoint(cells):
                raise MisuseError("Two records share a slot", offset=offset)
            seen.update(cells)
            used += stride
            payload += resident.length
        if (used, payload) != (self.used_bytes, self.payload_bytes):
            raise MisuseError("Byte counters disagree", counted=used, claimed=self.used_bytes)
        for segment in self._by_touch:
            policy = segment.slot_class.policy if segment.slot_class else ()
            if segment.exposed != sum(r.slot in policy for r in self._residents_of(segment)):
                raise MisuseError("A segment miscounts what may be evicted", index=segment.index)
        held = [s.used + len(s.free) for s in self._segments if s.slot_class is not None]
        want = [s.size_bytes // s.slot_class.stride for s in self._segments if s.slot_class]
        if held != want:
            raise MisuseError("A segment lost or gained slots", held=held, want=want)

    # -- inside ---------------------------------------------------------------------------------

    def _class_for(self, stride: int) -> SlotClass:
        slot_class = self.classes.get(stride)
        if slot_class is None:
            slot_class = SlotClass(stride, self.segment_bytes // stride, LRU(self.clock))
            self.classes[stride] = slot_class
        return slot_class

    def _open_segment(self, slot_class: SlotClass) -> Segment | None:
        positions = slot_class.open_positions
        while positions:
            segment = slot_class.segments[positions[0]]
            if segment is not None and segment.free:
                return segment
            slot_class.listed.discard(heapq.heappop(positions))  # filled up or given back since
        usable = self._usable_free_segment(slot_class.stride)
        if usable is None:
            return None
        self._assign(usable, slot_class)
        return usable

    def _usable_free_segment(self, stride: int) -> Segment | None:
        while self._free_segments:
            segment = self._segments[self._free_segments[0]]
            if segment.size_bytes >= stride:
                heapq.heappop(self._free_segments)
                return segment
            return None  # only the last, short segment can be too small, and it sorts last
        return None

    def _assign(self, segment: Segment, slot_class: SlotClass) -> None:
        count = segment.size_bytes // slot_class.stride
        segment.slot_class = slot_class
        segment.free = list(range(count))
        segment.used = segment.exposed = 0
        self._touched(segment)
        try:
            segment.position = slot_class.segments.index(None)
            slot_class.segments[segment.position] = segment
        except ValueError:
            segment.position = len(slot_class.segments)
            slot_class.segments.append(segment)
        slots = len(slot_class.segments) * slot_class.slots_per_segment
        slot_class.policy.grow(slots)
        slot_class.residents.extend([None] * (slots - len(slot_class.residents)))
        slot_class.open(segment.position)

    def _occupy(
        self, resident: R, length: int, slot_class: SlotClass, segment: Segment, number: int
    ) -> None:
        resident.slot_class = slot_class
        resident.slot = segment.position * slot_class.slots_per_segment + number
        resident.length = length
        slot_class.residents[resident.slot] = resident
        segment.used += 1
        self.used_bytes += slot_class.stride
        self.payload_bytes += length

    def _coldest(self, slot_class: SlotClass, evictable: Callable[[R], bool]) -> R | None:
        for looked, slot in enumerate(slot_class.policy.coldest_first()):
            if looked == SCAN_MAX:
                break
            resident: R = slot_class.residents[slot]  # type: ignore[assignment]  # R by construction
            if evictable(resident):
                return resident
        return None

    def _coldest_segment(
        self, stride: int, colder_than: int, evictable: Callable[[R], bool]
    ) -> Segment | None:
        for segment in self._by_touch:
            if segment.last_touch >= colder_than:
                return None
            slot_class = segment.slot_class
            assert slot_class is not None
            if slot_class.stride == stride or segment.size_bytes < stride:
                continue
            if segment.exposed == segment.used and all(map(evictable, self._residents_of(segment))):
                return segment
        return None

    def _touched(self, segment: Segment) -> None:
        segment.last_touch = self.clock.now
        self._by_touch[segment] = None
        self._by_touch.move_to_end(segment)

    def _residents_of(self, segment: Segment) -> Iterator[R]:
        slot_class = segment.slot_class
        assert slot_class is not None
        first = segment.position * slot_class.slots_per_segment
        for resident in slot_class.residents[first : first + slot_class.slots_per_segment]:
            if resident is not None:
                yield resident  # type: ignore[misc]  # R by construction
