"""Which slot goes first. Policies work on dense integer slots, never on keys or records."""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

Ints = np.ndarray[Any, np.dtype[np.int64]]

NIL = -1


class RecencyClock:
    """A counter shared by all policies of a medium, so that their stamps can be compared."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now


class EvictionPolicy(Protocol):
    """Order of eviction among the slots of one size that may be evicted at all.

    Each slot belongs to one of several orders, numbered as the caller likes: 0, if nobody says
    otherwise. Guaranteed by the caller: slots lie in 0..n-1 with n the last `grow`; a slot is
    inserted only when absent, touched and removed only when present, assigned only when absent.
    Pinned slots are simply absent. Owed by the implementation: every operation O(1), no
    allocation per call.
    """

    def grow(self, slots: int) -> None:
        """Make room for slot numbers below `slots`."""
        ...

    def assign(self, slot: int, order: int) -> None:
        """The slot has a new owner, and is of this order from now on."""
        ...

    def order(self, slot: int) -> int:
        """The order that the slot was last assigned to."""
        ...

    def orders(self) -> Iterable[int]:
        """Those that have a candidate."""
        ...

    def insert(self, slot: int) -> None:
        """The slot became evictable; it is the most recent."""
        ...

    def insert_all(self, slots: Ints, stamps: Ints) -> None:
        """The same for many, each once and absent, coldest first, with these stamps."""
        ...

    def touch(self, slot: int) -> None:
        """Somebody asked for it."""
        ...

    def remove(self, slot: int) -> None:
        """The slot is no candidate any more (evicted, pinned, gone)."""
        ...

    def stamp_absent(self, slot: int) -> None:
        """Somebody asked for a slot that is pinned just now."""
        ...

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...

    def coldest_first(self, orders: Iterable[int] | None = None) -> Iterator[int]:
        """Candidates of these orders, or of all, in eviction order: as if all were one list.

        Changing the policy ends the iteration's validity. O(orders), then O(log orders) for each.
        """
        ...

    def stamp(self, slot: int) -> int:
        """Recency on the medium's shared clock: larger is more recent. Any slot, also pinned
        ones.
        """
        ...

    def stamps(self) -> Ints:
        """A copy of all slots' stamps."""
        ...


class LRU:
    """Least recently used, as doubly linked lists over integer arrays (29 bytes a slot).

    There is one list for each order. Callers touch and insert a chain from its last block to its
    first, so that the tail of a chain is evicted before its head and what remains is a usable
    prefix.
    """

    def __init__(self, clock: RecencyClock) -> None:
        self._clock = clock
        self._next = array("q")
        self._previous = array("q")
        self._stamp = array("q")
        self._order = array("I")
        self._present = bytearray()
        self._heads: dict[int, int] = {}  # the coldest of each order; none for an empty one
        self._tails: dict[int, int] = {}  # the most recent
        self._length = 0

    def grow(self, slots: int) -> None:
        missing = slots - len(self._next)
        if missing > 0:
            self._next.extend([NIL] * missing)
            self._previous.extend([NIL] * missing)
            self._stamp.extend([0] * missing)
            self._order.extend([0] * missing)
            self._present.extend(bytes(missing))

    def assign(self, slot: int, order: int) -> None:
        self._order[slot] = order

    def order(self, slot: int) -> int:
        return self._order[slot]

    def orders(self) -> Iterable[int]:
        return self._heads.keys()

    def insert(self, slot: int) -> None:
        self._stamp[slot] = self._clock.tick()
        self._present[slot] = 1
        self._length += 1
        self._link_last(slot)

    def insert_all(self, slots: Ints, stamps: Ints) -> None:
        if not len(slots):
            return
        np.asarray(self._stamp)[slots] = stamps
        np.frombuffer(self._present, np.uint8)[slots] = 1
        self._length += len(slots)
        orders = np.asarray(self._order)[slots]
        for order in np.unique(orders).tolist():
            self._link_all(slots[orders == order])

    def touch(self, slot: int) -> None:
        self._stamp[slot] = self._clock.tick()
        if self._next[slot] != NIL:
            self._unlink(slot)
            self._link_last(slot)

    def remove(self, slot: int) -> None:
        self._unlink(slot)
        self._present[slot] = 0
        self._length -= 1

    def __contains__(self, slot: int) -> bool:
        return bool(self._present[slot])

    def __len__(self) -> int:
        return self._length

    def coldest_first(self, orders: Iterable[int] | None = None) -> Iterator[int]:
        heads: Collection[int] = self._heads.values()
        if orders is not None:
            heads = [self._heads[order] for order in orders if order in self._heads]
        if len(heads) == 1:
            return self._from(next(iter(heads)))
        return heapq.merge(*map(self._from, heads), key=self._stamp.__getitem__)

    def stamp(self, slot: int) -> int:
        return self._stamp[slot]

    def stamps(self) -> Ints:
        return np.array(self._stamp, np.int64)

    def stamp_absent(self, slot: int) -> None:
        self._stamp[slot] = self._clock.tick()

    def _from(self, slot: int) -> Iterator[int]:
        while slot != NIL:
            following = self._next[slot]
            yield slot
            slot = following

    def _link_last(self, slot: int) -> None:
        order = self._order[slot]
        tail = self._tails.get(order, NIL)
        self._previous[slot] = tail
        self._next[slot] = NIL
        if tail == NIL:
            self._heads[order] = slot
        else:
            self._next[tail] = slot
        self._tails[order] = slot

    def _link_all(self, slots: Ints) -> None:
        """Absent slots of one order, coldest first."""
        following, previous = np.asarray(self._next), np.asarray(self._previous)
        following[slots[:-1]], previous[slots[1:]] = slots[1:], slots[:-1]
        first, last = int(slots[0]), int(slots[-1])
        self._link_last(first)
        self._next[first] = int(slots[1]) if len(slots) > 1 else NIL
        self._next[last] = NIL
        self._tails[self._order[first]] = last

    def _unlink(self, slot: int) -> None:
        order, before, after = self._order[slot], self._previous[slot], self._next[slot]
        if before != NIL:
            self._next[before] = after
        elif after != NIL:
            self._heads[order] = after
        else:
            del self._heads[order]
        if after != NIL:
            self._previous[after] = before
        elif before != NIL:
            self._tails[order] = before
        else:
            del self._tails[order]
