"""Segments of one medium, and the class of all segments that serve slots of one size."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ebbtide.errors import MisuseError
from ebbtide.tiers.shares import COMMON

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ebbtide.tiers.policy import EvictionPolicy, Ints

SCAN_MAX = 256  # how far an eviction looks past records that cannot go right now

Owner = TypeVar("Owner")  # whoever occupies a slot: a record, or the number of one


class Segment(Generic[Owner]):
    """One piece of the medium, and which of its slots are free."""

    __slots__ = (
        "exposed",
        "free",
        "held",
        "index",
        "last_touch",
        "position",
        "size_bytes",
        "slot_class",
        "spoiled",
        "used",
    )

    def __init__(self, index: int, size_bytes: int) -> None:
        self.index = index
        self.size_bytes = size_bytes
        self.slot_class: SlotClass[Owner] | None = None
        self.position = -1  # in its class
        self.free: list[int] = []  # heap of slot numbers within the segment
        self.used = 0
        self.spoiled = 0  # slots that nobody will give back: it stays with its size
        self.exposed = 0  # slots of it that may be evicted
        self.held: dict[int, int] = {}  # taken slots by order of eviction, but for the common one
        self.last_touch = 0  # recency stamp of the most recent touch of any of its slots

    def hold(self, order: int, slots: int) -> None:
        """So many more of its slots are of that order, or fewer."""
        if order != COMMON:
            count = self.held.get(order, 0) + slots
            if count:
                self.held[order] = count
            else:
                del self.held[order]

    def holds(self, order: int) -> bool:
        """Whether any slot of it is of that order."""
        if order != COMMON:
            return order in self.held
        return self.used > sum(self.held.values())

    def taken(self) -> Iterator[tuple[int, Owner]]:
        """(slot, owner) of its taken slots, while it serves a size."""
        slot_class = self.slot_class
        assert slot_class is not None
        first = self.position * slot_class.slots_per_segment
        around = slot_class.owners[first : first + slot_class.slots_per_segment]
        for slot, owner in enumerate(around, start=first):
            if owner is not None:
                yield slot, owner

    def check_integrity(self) -> int:
        """Bytes of its taken slots. Raises MisuseError when it contradicts itself. O(its slots)."""
        slot_class = self.slot_class
        assert slot_class is not None
        policy = slot_class.policy
        taken = [slot for slot, _ in self.taken()]
        if self.exposed != sum(slot in policy for slot in taken):
            raise MisuseError("A segment miscounts what may be evicted", index=self.index)
        first = self.position * slot_class.slots_per_segment
        numbers = sorted([slot - first for slot in taken] + self.free)
        if numbers != list(range(self.size_bytes // slot_class.stride)):
            raise MisuseError("A segment lost or gained slots", index=self.index)
        if self.used != len(taken):
            raise MisuseError("A segment miscounts its slots", index=self.index)
        orders = Counter(policy.order(slot) for slot in taken)
        if {**orders, COMMON: 0} != {**self.held, COMMON: 0}:
            raise MisuseError("A segment miscounts its namespaces", index=self.index)
        return len(taken) * slot_class.stride


class SlotClass(Generic[Owner]):
    """All segments of one stride. Slots are dense integers: position * slots_per_segment + n."""

    __slots__ = (
        "listed",
        "open_positions",
        "owners",
        "policy",
        "segments",
        "slots_per_segment",
        "stride",
    )

    def __init__(self, stride: int, slots_per_segment: int, policy: EvictionPolicy) -> None:
        self.stride = stride
        self.slots_per_segment = slots_per_segment
        self.policy = policy
        self.segments: list[Segment[Owner] | None] = []
        self.owners: list[Owner | None] = []  # None: the slot is free
        self.open_positions: list[int] = []  # heap of positions that may have a free slot
        self.listed: set[int] = set()  # what is in that heap: each once, so that it is bounded

    # -- its segments ---------------------------------------------------------------------------

    def add(self, segment: Segment[Owner]) -> None:
        """The segment serves this size from now on; all its slots are free. O(its slots)."""
        segment.slot_class = self
        segment.free = list(range(segment.size_bytes // self.stride))
        segment.used = segment.exposed = 0
        segment.held.clear()
        try:
            segment.position = self.segments.index(None)
            self.segments[segment.position] = segment
        except ValueError:
            segment.position = len(self.segments)
            self.segments.append(segment)
        slots = len(self.segments) * self.slots_per_segment
        self.policy.grow(slots)
        self.owners.extend([None] * (slots - len(self.owners)))
        self.open(segment.position)

    def drop(self, segment: Segment[Owner]) -> None:
        """The segment, which is empty, serves no size any more."""
        self.segments[segment.position] = None
        segment.slot_class, segment.free = None, []

    def open(self, position: int) -> None:
        """The segment there may have a free slot."""
        if position not in self.listed:
            self.listed.add(position)
            heapq.heappush(self.open_positions, position)

    def open_segment(self) -> Segment[Owner] | None:
        """The first of its segments that has a free slot."""
        positions = self.open_positions
        while positions:
            segment = self.segments[positions[0]]
            if segment is not None and segment.free:
                return segment
            self.listed.discard(heapq.heappop(positions))  # filled up or given back since
        return None

    # -- its slots ------------------------------------------------------------------------------

    def occupy(
        self, segment: Segment[Owner], numbers: Ints, owners: Sequence[Owner], orders: Ints | None
    ) -> None:
        """Take exactly these slots of a segment that was just added. `orders` None: common ones."""
        first = segment.position * self.slots_per_segment
        slots = (first + numbers).tolist()
        for slot, owner in zip(slots, owners, strict=True):
            self.owners[slot] = owner
        if orders is not None:
            for slot, order in zip(slots, orders.tolist(), strict=True):
                self.policy.assign(slot, order)
                segment.hold(order, 1)
        segment.free = np.setdiff1d(np.array(segment.free), numbers).tolist()
        segment.used = len(owners)

    def has_slot(self, order: int) -> bool:
        """Whether the order has a slot of this size, in whatever state. O(segments)."""
        return any(segment is not None and segment.holds(order) for segment in self.segments)

    def coldest(
        self, evictable: Callable[[Owner], bool] | None, orders: Collection[int] | None
    ) -> int | None:
        """The slot of the coldest evictable one. `orders` None: of whichever."""
        return next(iter(self.coldest_some(evictable, orders, 1)), None)

    def coldest_some(
        self,
        evictable: Callable[[Owner], bool] | None,
        orders: Collection[int] | None,
        count: int,
    ) -> list[int]:
        """The slots of so many of them, coldest first; looks past `SCAN_MAX` that cannot go."""
        coldest_first, owners = self.policy.coldest_first(orders), self.owners
        if evictable is None:
            return list(islice(coldest_first, count))
        found: list[int] = []
        for slot in islice(coldest_first, SCAN_MAX + count - 1):
            if evictable(owners[slot]):  # type: ignore[arg-type]  # an Owner: it is taken
                found.append(slot)
                if len(found) == count:
                    break
        return found
