"""What lies in the slots of a space under test: nothing but a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide.tiers.segments import SegmentSpace


class Thing:
    """An owner of a slot."""

    length = stride = 0
    offset = -1


def place(space: SegmentSpace[Thing], thing: Thing, length: int) -> bool:
    """Give the thing a slot, if there is one."""
    offset = space.place(thing, length)
    if offset is None:
        return False
    thing.length, thing.offset, thing.stride = length, offset, space.stride(length)
    assert space.stride_at(offset) == thing.stride
    return True


def remove(space: SegmentSpace[Thing], thing: Thing) -> None:
    """Take its slot away."""
    space.remove(thing, thing.length, thing.offset)


def fill(space: SegmentSpace[Thing], length: int, count: int | None = None) -> list[Thing]:
    """Place things that may be evicted until `count` or until nothing is free."""
    placed: list[Thing] = []
    while count is None or len(placed) < count:
        thing = Thing()
        if not place(space, thing, length):
            assert count is None
            break
        space.expose(thing.offset)
        placed.append(thing)
    return placed
