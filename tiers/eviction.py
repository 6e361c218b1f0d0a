"""Which records of one medium go first, over all sizes of slots and all namespaces.

Within one size the policy knows (`tiers.policy`). Over all sizes either the coldest of the same
size goes, or the coldest segment of another size is drained, whichever is colder. Namespaces with
a quota have an order of eviction each: `tiers.shares` says which of them may lose records. Nothing
is evicted here: whoever asks evicts whom he is told.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic

from ebbtide.tiers.shares import COMMON
from ebbtide.tiers.slot_class import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from ebbtide.tiers.policy import RecencyClock
    from ebbtide.tiers.shares import Shares
    from ebbtide.tiers.slot_class import Segment, SlotClass


class Eviction(Generic[Owner]):
    """The choice for one `SegmentSpace`, which owns it and whose classes of slots it looks at.

    It keeps one thing itself: the segments in use by their last touch. Control thread only.
    """

    def __init__(
        self, classes: Mapping[int, SlotClass[Owner]], shares: Shares, clock: RecencyClock
    ) -> None:
        self._classes = classes  # by stride
        self._shares = shares
        self._clock = clock
        self.in_use: OrderedDict[Segment[Owner], None] = OrderedDict()  # coldest first

    # -- segments in use ------------------------------------------------------------------------

    def touched(self, segment: Segment[Owner], stamp: int) -> None:
        """It is in use, and by this stamp the most recent one of all."""
        segment.last_touch = stamp
        self.in_use[segment] = None
        self.in_use.move_to_end(segment)

    def emptied(self, segment: Segment[Owner]) -> None:
        """It is in use no more."""
        del self.in_use[segment]

    # -- records --------------------------------------------------------------------------------

    def victims(
        self,
        stride: int,
        evictable: Callable[[Owner], bool] | None,
        sake: int,
        count: int,
        strict: bool,
    ) -> list[Owner]:
        """See `SegmentSpace.victims`."""
        slot_class = self._classes.get(stride)
        own = None if slot_class is None else self._coldest_lawful(slot_class, evictable, sake)
        if slot_class is None or own is None:
            colder_than = self._clock.now + 1
        else:
            colder_than = slot_class.policy.stamp(own)
        drained = self._coldest_segment(stride, colder_than, evictable, sake)
        if drained is None and own is None and not strict and not self._has_slot(slot_class, sake):
            if slot_class is not None:
                own = slot_class.coldest(evictable, None)
            if own is None:
                drained = self._coldest_segment(stride, colder_than, evictable, None)
        if drained is not None:
            return [owner for _, owner in drained.taken()]
        if slot_class is None or own is None:
            return []
        slots = [own]
        if count > 1 and self._shares.is_common:
            slots = self._coldest_streak(slot_class, evictable, count)
        return [slot_class.owners[slot] for slot in slots]  # type: ignore[misc]  # Owners

    def coldest_of(
        self, orders: Collection[int], evictable: Callable[[Owner], bool] | None
    ) -> Owner | None:
        """The coldest evictable one of these orders, of whatever size. O(sizes)."""
        coldest: Owner | None = None
        stamp = self._clock.now + 1
        for slot_class in self._classes.values():
            slot = slot_class.coldest(evictable, orders)
            if slot is not None and slot_class.policy.stamp(slot) < stamp:
                stamp = slot_class.policy.stamp(slot)
                coldest = slot_class.owners[slot]
        return coldest

    def coldest_lawful(self, sake: int) -> Owner | None:
        """The coldest one of whatever size that may go for the sake of an epoch. O(orders)."""
        orders = {order for c in self._classes.values() for order in self._lawful(c, sake)}
        return self.coldest_of(orders, None)

    # -- inside ---------------------------------------------------------------------------------

    def _has_slot(self, slot_class: SlotClass[Owner] | None, sake: int) -> bool:
        return slot_class is not None and slot_class.has_slot(self._shares.order(sake))

    def _lawful(self, slot_class: SlotClass[Owner], sake: int) -> Collection[int]:
        """The orders that may lose a slot for the sake of an epoch."""
        may_lose, stride = self._shares.may_lose, slot_class.stride
        return [o for o in slot_class.policy.orders() if may_lose(o, stride, sake)]

    def _coldest_lawful(
        self, slot_class: SlotClass[Owner], evictable: Callable[[Owner], bool] | None, sake: int
    ) -> int | None:
        """A slot of the class. Whoever is over its cap goes first."""
        if self._shares.is_common:
            return slot_class.coldest(evictable, None)
        over = self._shares.over_cap()
        slot = slot_class.coldest(evictable, over) if over else None
        if slot is not None:
            return slot
        return slot_class.coldest(evictable, self._lawful(slot_class, sake))

    def _coldest_streak(
        self, slot_class: SlotClass[Owner], evictable: Callable[[Owner], bool] | None, count: int
    ) -> list[int]:
        """Up to so many of its coldest slots: those that go before a segment of another stride."""
        policy = slot_class.policy
        slots = slot_class.coldest_some(evictable, None, count)
        stamp = policy.stamp(slots[-1])
        other = self._coldest_segment(slot_class.stride, stamp, evictable, COMMON)
        if other is None:
            return slots
        return [slot for slot in slots if policy.stamp(slot) <= other.last_touch]

    def _coldest_segment(
        self,
        stride: int,
        colder_than: int,
        evictable: Callable[[Owner], bool] | None,
        sake: int | None,
    ) -> Segment[Owner] | None:
        """One of another stride that can be drained. `sake` None: whatever the floors."""
        for segment in self.in_use:
            if segment.last_touch >= colder_than:
                return None
            slot_class = segment.slot_class
            assert slot_class is not None
            if slot_class.stride == stride or segment.size_bytes < stride:
                continue
            if segment.exposed != segment.used:
                continue
            if sake is not None and segment.held and not self._may_drain(segment, sake):
                continue
            owners = (owner for _, owner in segment.taken())
            if evictable is None or all(map(evictable, owners)):
                return segment
        return None

    def _may_drain(self, segment: Segment[Owner], sake: int) -> bool:
        slot_class = segment.slot_class
        assert slot_class is not None
        return all(
            self._shares.may_lose(order, slots * slot_class.stride, sake)
            for order, slots in segment.held.items()
        )
