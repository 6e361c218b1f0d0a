"""Segments of one medium, and the class of all segments that serve slots of one size."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from ebbtide.tiers.shares import COMMON

if TYPE_CHECKING:
    from ebbtide.tiers.policy import EvictionPolicy


class Segment:
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


class SlotClass:
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
        self.segments: list[Segment | None] = []
        self.owners: list[object] = []  # None: the slot is free
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
