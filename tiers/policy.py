"""Which slot goes first. Policies work on dense integer slots, never on keys or records."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    Guaranteed by the caller: slots lie in 0..n-1 with n the last `grow`; a slot is inserted
    only when absent, touched and removed only when present. Pinned slots are simply absent.
    Owed by the implementation: every operation O(1), no allocation per call.
    """

    def grow(self, slots: int) -> None:
        """Make room for slot numbers below `slots`."""
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

    def coldest_first(self) -> Iterator[int]:
        """Candidates in eviction order. Changing the policy ends the iteration's validity."""
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
    """Least recently used, as a doubly linked list over three integer arrays (24 bytes a slot).

    Callers touch and insert a chain from its last block to its first, so that the tail of a chain
    is evicted before its head and what remains is a usable prefix.
    """

    def __init__(self, clock: RecencyClock) -> None:
        self._clock = clock
        self._next = array("q")
        self._previous = array("q")
        self._stamp = array("q")
        self._present = bytearray()
        self._head = NIL  # coldest
        self._tail = NIL  # most recent
        self._length = 0

    def grow(self, slots: int) -> None:
        missing = slots - len(self._next)
        if missing > 0:
            self._next.extend([NIL] * missing)
            self._previous.extend([NIL] * missing)
            self._stamp.extend([0] * missing)
            self._present.extend(bytes(missing))

    def insert(self, slot: int) -> None:
        self._stamp[slot] = self._clock.tick()
        self._present[slot] = 1
        self._length += 1
        self._link_last(slot)

    def insert_all(self, slots: Ints, stamps: Ints) -> None:
        if not len(slots):
            return
        following, previous = np.asarray(self._next), np.asarray(self._previous)
        following[slots[:-1]], previous[slots[1:]] = slots[1:], slots[:-1]
        np.asarray(self._stamp)[slots] = stamps
        np.frombuffer(self._present, np.uint8)[slots] = 1
        first, last = int(slots[0]), int(slots[-1])
        self._link_last(first)
        self._next[first] = int(slots[1]) if len(slots) > 1 else NIL
        self._next[last] = NIL
        self._tail = last
        self._length += len(slots)

    def touch(self, slot: int) -> None:
        self._stamp[slot] = self._clock.tick()
        if slot != self._tail:
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

    def coldest_first(self) -> Iterator[int]:
        slot = self._head
        while slot != NIL:
            following = self._next[slot]
            yield slot
            slot = following

    def stamp(self, slot: int) -> int:
        return self._stamp[slot]

    def stamps(self) -> Ints:
        return np.array(self._stamp, np.int64)

    def stamp_absent(self, slot: int) -> None:
        self._stamp[slot] = self._clock.tick()

    def _link_last(self, slot: int) -> None:
        tail = self._tail
        self._previous[slot] = tail
        self._next[slot] = NIL
        if tail == NIL:
            self._head = slot
        else:
            self._next[tail] = slot
        self._tail = slot

    def _unlink(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        if before == NIL:
            self._head = after
        else:
            self._next[before] = after
        if after == NIL:
            self._tail = before
        else:
            self._previous[after] = before
