"""Evicting costs the same however large the medium is, and LRU is what it says."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.things import Thing, fill, remove

from ebbtide.tiers.policy import LRU, RecencyClock
from ebbtide.tiers.segments import SegmentSpace
from ebbtide.tiers.slot_class import SCAN_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
MIB = 1 << 20
SIZES = (10_496, 18_432, 41_984, 1_124_352)


def anything(thing: Thing) -> bool:
    return True


def refuse(thing: Thing, looked: list[Thing]) -> bool:
    looked.append(thing)
    return False


# -- bounded work and memory ----------------------------------------------------------------------


class Counted(OrderedDict[Any, None]):
    """Counts the keys that iterations hand out."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.seen += 1
            yield key


def work(space: SegmentSpace[Thing], length: int, evictions: int, keep: set[Thing]) -> int:
    """Slots and segments looked at in the worst of so many evictions."""
    worst = 0
    for _ in range(evictions):
        looked = 0

        def evictable(thing: Thing) -> bool:
            nonlocal looked
            looked += 1
            return thing not in keep

        segments = Counted(space._eviction.in_use)
        space._eviction.in_use = segments
        for victim in space.victims(length, evictable):
            remove(space, victim)
        fill(space, length, 1)
        worst = max(worst, looked + segments.seen)
    return worst


@pytest.mark.parametrize("segments", [4, 64])
def test_p88_evicting_looks_at_few_slots_whatever_the_size(segments: int) -> None:
    space = SegmentSpace[Thing](segments * 64 * PAGE, segment_bytes=64 * PAGE)
    fill(space, PAGE)
    assert work(space, PAGE, 200, set()) <= 2


@pytest.mark.parametrize("segments", [4, 64])
def test_p88_a_pinned_cold_segment_of_another_size_costs_nothing(segments: int) -> None:
    """It can never be drained, so it stays the coldest of all for ever."""
    space = SegmentSpace[Thing](segments * 64 * PAGE, segment_bytes=64 * PAGE)
    pinned = fill(space, 2 * PAGE, 32)
    space.hide(pinned[-1].offset)
    fill(space, PAGE)
    assert work(space, PAGE, 200, set()) <= 3


@pytest.mark.parametrize("segments", [4, 64])
def test_p88_where_nothing_can_go_no_slot_is_looked_at(segments: int) -> None:
    space = SegmentSpace[Thing](segments * 64 * PAGE, segment_bytes=64 * PAGE)
    for thing in fill(space, PAGE):
        space.hide(thing.offset)
    looked: list[Thing] = []
    for length in (PAGE, 2 * PAGE):
        assert space.victims(length, lambda thing: refuse(thing, looked)) == []
    assert looked == []


def test_p88_cold_records_that_may_not_go_are_passed_over_within_a_bound() -> None:
    space = SegmentSpace[Thing](64 * 64 * PAGE, segment_bytes=64 * PAGE)
    things = fill(space, PAGE)
    looked: list[Thing] = []
    assert space.victims(PAGE, lambda thing: refuse(thing, looked)) == []
    assert len(looked) == SCAN_MAX
    passed = set(things[: SCAN_MAX - 1])
    assert space.victims(PAGE, lambda thing: thing not in passed) == [things[SCAN_MAX - 1]]


def test_reusing_a_slot_for_ever_keeps_the_lists_short() -> None:
    space = SegmentSpace[Thing](4 * PAGE)
    fill(space, PAGE)
    for _ in range(1000):
        (victim,) = space.victims(PAGE, anything)
        remove(space, victim)
        fill(space, PAGE, 1)
    (slot_class,) = space.classes.values()
    assert len(slot_class.open_positions) <= 1


# -- the policy -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "remove"]), st.integers(0, 11)), max_size=80
    )
)
def test_lru_is_an_ordered_dictionary(steps: list[tuple[str, int]]) -> None:
    lru, model, last = LRU(RecencyClock()), OrderedDict[int, None](), 0
    lru.grow(4)
    lru.grow(12)
    for verb, slot in steps:
        if verb == "insert" and slot not in model:
            lru.insert(slot)
            model[slot] = None
        elif verb == "touch" and slot in model:
            lru.touch(slot)
            model.move_to_end(slot)
        elif verb == "remove" and slot in model:
            lru.remove(slot)
            del model[slot]
        else:
            before = lru.stamp(slot)
            lru.stamp_absent(slot) if slot not in model else None
            assert lru.stamp(slot) >= before
            continue
        assert list(lru.coldest_first()) == list(model)
        assert len(lru) == len(model)
        assert all((slot in lru) == (slot in model) for slot in range(12))
        stamps = [lru.stamp(slot) for slot in model]
        assert stamps == sorted(stamps)
        last = max([last, *stamps])
