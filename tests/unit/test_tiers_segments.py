"""Slots of any size on one medium: exact counts, sound victims, restored places, bounded work."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.things import Thing, fill, place, remove

from ebbtide.errors import ConfigError, MisuseError
from ebbtide.tiers.segments import SegmentSpace, segment_bytes_for
from ebbtide.tiers.shares import Quota

PAGE = 4096
MIB = 1 << 20
SIZES = (10_496, 18_432, 41_984, 1_124_352)


def anything(thing: Thing) -> bool:
    return True


# -- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "slots"), list(zip(SIZES, (16 * 341, 16 * 204, 16 * 93, 16 * 3), strict=True))
)
def test_a_medium_holds_exactly_the_slots_that_its_segments_hold(length: int, slots: int) -> None:
    space = SegmentSpace[Thing](64 * MIB)
    assert space.segment_bytes == 4 * MIB
    assert space.slots_for(length) == slots
    assert len(fill(space, length)) == slots
    space.check_integrity()


def test_p94_sizes_together_take_a_segment_each_and_waste_only_their_tails() -> None:
    space = SegmentSpace[Thing](64 * MIB)
    placed = {length: fill(space, length, space.slots_for(length) // 4) for length in SIZES}
    assert [len(placed[length]) for length in SIZES] == [4 * 341, 4 * 204, 4 * 93, 4 * 3]
    assert not any(place(space, Thing(), length) for length in SIZES)
    space.check_integrity()
    offsets = sorted((t.offset, t.stride) for ts in placed.values() for t in ts)
    ends = [start + stride for start, stride in offsets]
    assert all(end <= start for end, (start, _) in zip(ends, offsets[1:], strict=False))
    payload = sum(t.length for ts in placed.values() for t in ts)
    assert payload > 0.8 * space.capacity_bytes


@pytest.mark.parametrize(
    ("capacity", "segment"),
    [
        (4 * PAGE, 4 * PAGE),
        (5000, PAGE),
        (1 * MIB, 1 * MIB),
        (4 * MIB, 4 * MIB),
        (63 * MIB, 4 * MIB),
        (64 * MIB, 4 * MIB),
        (128 * MIB, 8 * MIB),
        (200 * MIB, 8 * MIB),
        (1024 * MIB, 64 * MIB),
        (1 << 40, 64 * MIB),
    ],
)
def test_a_segment_is_64_mib_or_a_sixteenth(capacity: int, segment: int) -> None:
    assert segment_bytes_for(capacity) == segment


def test_four_slots_are_four_slots() -> None:
    assert len(fill(SegmentSpace[Thing](4 * PAGE), PAGE)) == 4


def test_the_last_segment_may_be_shorter_and_serves_what_fits() -> None:
    space = SegmentSpace[Thing](9 * MIB)  # 4 + 4 + 1 MiB
    assert space.slots_for(2 * MIB) == 4
    assert len(fill(space, 2 * MIB)) == 4
    assert len(fill(space, PAGE)) == MIB // PAGE
    space.check_integrity()


def test_a_record_that_no_segment_holds_is_refused_with_the_numbers() -> None:
    space = SegmentSpace[Thing](64 * MIB)
    with pytest.raises(ConfigError, match=r"record_bytes=4194305, segment_bytes=4194304"):
        place(space, Thing(), 4 * MIB + 1)
    with pytest.raises(MisuseError):
        place(space, Thing(), 0)


def test_freeing_a_slot_twice_is_a_misuse() -> None:
    space = SegmentSpace[Thing](4 * PAGE)
    first, second = fill(space, PAGE, 2)
    remove(space, first)
    with pytest.raises(MisuseError, match="freed twice"):
        remove(space, first)
    remove(space, second)
    with pytest.raises(MisuseError, match="Nobody has a slot there"):
        remove(space, second)


def test_an_empty_segment_serves_any_size_again() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    small = fill(space, PAGE)
    assert not place(space, Thing(), 2 * MIB)
    for thing in small[:1024]:
        remove(space, thing)
    assert len(fill(space, 2 * MIB)) == 2
    space.check_integrity()


def test_free_bytes_are_what_a_size_can_take() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    assert space.free_bytes(PAGE) == 8 * MIB
    (thing,) = fill(space, PAGE, 1)
    assert space.free_bytes(PAGE) == 8 * MIB - PAGE
    assert space.free_bytes(2 * PAGE) == 4 * MIB
    remove(space, thing)
    assert space.free_bytes(2 * PAGE) == 8 * MIB


# -- what goes first ------------------------------------------------------------------------------


def test_the_coldest_of_its_own_size_goes_when_nothing_is_colder() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    things = fill(space, PAGE)
    space.touch(things[0].offset)
    assert space.victims(PAGE, anything) == [things[1]]
    space.hide(things[1].offset)
    assert space.victims(PAGE, anything) == [things[2]]
    assert space.victims(PAGE, lambda thing: thing is not things[2]) == [things[3]]


def test_a_new_size_drains_the_coldest_segment_whole() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    things = fill(space, MIB)
    for thing in things[:4]:
        space.touch(thing.offset)
    assert set(space.victims(2 * MIB, anything)) == set(things[4:])
    for thing in things[4:]:
        remove(space, thing)
    assert place(space, Thing(), 2 * MIB)


def test_a_segment_with_one_pinned_record_is_not_drained() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    things = fill(space, MIB)
    space.hide(things[5].offset)
    assert set(space.victims(2 * MIB, anything)) == set(things[:4])
    assert space.victims(2 * MIB, lambda thing: thing is not things[0]) == []


def test_a_size_that_goes_cold_over_all_gives_its_segments_up() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    cold, warm = fill(space, MIB, 4), fill(space, 2 * MIB, 2)
    assert set(space.victims(2 * MIB, anything)) == set(cold)
    for thing in cold:
        space.touch(thing.offset)
    assert space.victims(2 * MIB, anything) == warm[:1]


def test_many_of_a_size_go_up_to_where_another_size_is_colder() -> None:
    space = SegmentSpace[Thing](12 * MIB)
    coldest, other, rest = fill(space, MIB, 3), fill(space, 2 * MIB, 2), fill(space, MIB, 5)
    assert space.victims(MIB, count=8) == coldest
    assert space.victims(MIB, count=2) == coldest[:2]
    for thing in coldest:
        space.hide(thing.offset)
    assert set(space.victims(MIB, count=8)) == set(other)
    for thing in other:
        remove(space, thing)
    assert space.victims(MIB, count=3) == rest[:3]
    assert space.victims(MIB, count=8) == rest


def test_who_is_over_a_lowered_cap_goes_before_the_coldest() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    cold, warm = Thing(), Thing()
    for epoch, thing in enumerate((cold, warm), start=1):
        space.shares.assign(epoch, Quota(), ordered=True)
        offset = space.place(thing, PAGE, space.shares.order(epoch))
        assert offset is not None
        space.expose(offset)
        space.shares.take(epoch, PAGE)
    assert space.victims(PAGE) == [cold]
    space.shares.assign(2, Quota(cap=0.0), ordered=True)
    assert space.victims(PAGE) == [warm]


class Space(RuleBasedStateMachine):
    """A small space against a plain model: who is where, who is coldest."""

    lengths = (PAGE, 2 * PAGE - 1, 5 * PAGE)

    def __init__(self) -> None:
        super().__init__()
        self.space = SegmentSpace[Thing](50 * PAGE, segment_bytes=16 * PAGE)
        self.residents: list[Thing] = []
        self.order: OrderedDict[Thing, None] = OrderedDict()  # exposed, coldest first

    @rule(length=st.sampled_from(lengths))
    def place(self, length: int) -> None:
        thing = Thing()
        if place(self.space, thing, length):
            self.residents.append(thing)

    @rule(length=st.sampled_from(lengths), count=st.integers(2, 20))
    def place_many(self, length: int, count: int) -> None:
        things = [Thing() for _ in range(count)]
        offsets = self.space.place_many(things, length)
        if len(offsets) < count:
            assert not place(self.space, Thing(), length)
        for thing, offset in zip(things, offsets, strict=False):
            thing.length, thing.offset, thing.stride = length, offset, self.space.stride(length)
            self.residents.append(thing)

    def some(self, data: st.DataObject) -> Thing:
        return data.draw(st.sampled_from(self.residents))

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def expose(self, data: st.DataObject) -> None:
        thing = self.some(data)
        self.space.expose(thing.offset)
        self.order.setdefault(thing, None)

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def hide(self, data: st.DataObject) -> None:
        thing = self.some(data)
        self.space.hide(thing.offset)
        self.order.pop(thing, None)

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        thing = self.some(data)
        self.space.touch(thing.offset)
        if thing in self.order:
            self.order.move_to_end(thing)

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.forget(self.some(data))

    def forget(self, thing: Thing) -> None:
        remove(self.space, thing)
        self.residents.remove(thing)
        self.order.pop(thing, None)

    @rule(length=st.sampled_from(lengths), odd_ones=st.booleans())
    def make_room(self, length: int, odd_ones: bool) -> None:
        spared = set(self.residents[::3]) if odd_ones else set()
        victims = self.space.victims(length, lambda thing: thing not in spared)
        assert all(v in self.order and v not in spared for v in victims)
        stride = self.space.stride(length)
        own = [t for t in self.order if t.stride == stride and t not in spared]
        assert victims or not own
        if len(victims) == 1 and victims[0].stride == stride:
            assert victims == own[:1]
        for victim in victims:
            self.forget(victim)
        if victims:
            thing = Thing()
            assert place(self.space, thing, length)
            self.residents.append(thing)

    @rule(length=st.sampled_from(lengths), count=st.integers(1, 12))
    def make_much_room(self, length: int, count: int) -> None:
        """Many at once are those that would go one after the other."""
        victims = self.space.victims(length, count=count)
        assert victims or not any(t.stride == self.space.stride(length) for t in self.order)
        left = list(victims)
        while left:
            for victim in self.space.victims(length):
                left.remove(victim)
                self.forget(victim)

    @invariant()
    def adds_up(self) -> None:
        self.space.check_integrity()
        assert set(self.space.owners()) == set(self.residents)
        assert self.space.payload_bytes == sum(t.length for t in self.residents)
        by_size: dict[int, list[Thing]] = {}
        for thing in self.order:
            by_size.setdefault(thing.stride, []).append(thing)
        found: dict[int, list[Thing]] = {}
        for thing in self.space.coldest_first():
            found.setdefault(thing.stride, []).append(thing)
        assert found == by_size


Space.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestSpace = Space.TestCase


# -- places that are restored ---------------------------------------------------------------------


def place_all(space: SegmentSpace[Thing], places: list[tuple[int, int]]) -> list[Thing | None]:
    """Things at these (length, offset); None for those that could not be."""
    things = [Thing() for _ in places]
    lengths, offsets = np.array(places, np.int64).reshape(-1, 2).T
    placed = space.place_all(things, lengths, offsets)
    for thing, (length, offset) in zip(things, places, strict=True):
        thing.length, thing.offset, thing.stride = length, offset, space.stride(max(length, 1))
    return [thing if fits else None for thing, fits in zip(things, placed, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_restored_places_are_the_same_and_the_rest_is_free(seed: int) -> None:
    random = Random(seed)
    before = SegmentSpace[Thing](64 * MIB)
    things = [t for length in SIZES for t in fill(before, length, before.slots_for(length) // 5)]
    random.shuffle(things)
    for thing in things[::2]:
        remove(before, thing)
    order = things[1::2]  # coldest first, over all sizes
    for thing in order:
        before.touch(thing.offset)
    places = [(t.length, t.offset) for t in order]
    after = SegmentSpace[Thing](64 * MIB)
    restored = [thing for thing in place_all(after, places) if thing is not None]
    assert len(restored) == len(places)
    after.check_integrity()
    assert not list(after.coldest_first())  # hidden until they are exposed
    after.expose_all(np.array([offset for _, offset in places], np.int64))
    after.check_integrity()
    assert after.used_bytes == before.used_bytes
    assert after.payload_bytes == before.payload_bytes
    old, new = list(before.coldest_first()), list(after.coldest_first())
    by_size = sorted(old, key=lambda t: SIZES.index(t.length))
    assert [t.offset for t in by_size] == [
        t.offset for t in sorted(new, key=lambda t: SIZES.index(t.length))
    ]
    assert [t.offset for t in after.recency()()] == [t.offset for t in order]
    for length in SIZES:
        cold = [t.offset for t in before.victims(length, anything)]
        assert [t.offset for t in after.victims(length, anything)] == cold
    for length in SIZES:
        assert len(fill(before, length)) == len(fill(after, length))
    after.check_integrity()


@pytest.mark.parametrize(
    ("length", "offset"),
    [
        (PAGE, 0),  # taken
        (2 * PAGE, 0),  # another stride than its segment's
        (PAGE, 100),  # between two slots
        (3 * PAGE, 4 * MIB + 2 * PAGE),
        (PAGE, 8 * MIB),  # behind the end
        (PAGE, 1 << 62),
        (PAGE, -PAGE),
        (0, 4 * MIB),
        (4 * MIB, 4 * MIB + PAGE),  # over the end of its segment
    ],
)
def test_a_place_that_cannot_be_is_refused(length: int, offset: int) -> None:
    space = SegmentSpace[Thing](8 * MIB)
    first, second, third = place_all(space, [(PAGE, 0), (length, offset), (PAGE, PAGE)])
    assert (first is not None, second, third is not None) == (True, None, True)
    space.check_integrity()
    assert len(fill(space, PAGE)) == 2 * 1024 - 2


def test_nothing_is_restored_from_nothing() -> None:
    space = SegmentSpace[Thing](8 * MIB)
    assert place_all(space, []) == []
    space.expose_all(np.zeros(0, np.int64))
    assert len(fill(space, PAGE)) == 2 * 1024


# -- many at a time -------------------------------------------------------------------------------


def state_of(space: SegmentSpace[int]) -> object:
    """All that a space answers by: counts, orders of eviction, and which segments go first."""
    space.check_integrity()
    drained = [space.victims(length, strict=True) for length in (PAGE, 3 * PAGE, 2 * MIB)]
    in_use = [(segment.index, segment.last_touch) for segment in space._eviction.in_use]
    counts = (space.used_bytes, space.payload_bytes, space.clock.now)
    return counts, list(space.coldest_first()), in_use, drained, space.free_bytes(PAGE)


@pytest.mark.parametrize("seed", range(6))
def test_many_at_a_time_is_one_after_the_other(seed: int) -> None:
    """Slots of two sizes in several segments, in any order, also emptied segments and none."""
    draw = Random(seed)
    one, many = SegmentSpace[int](16 * MIB), SegmentSpace[int](16 * MIB)
    held: dict[int, tuple[int, int]] = {}  # owner -> length, offset
    for step in range(40):
        length = draw.choice([PAGE, 3 * PAGE - 7])
        owners = range(1000 * step, 1000 * step + draw.choice([1, 50, 900]))
        offsets = one.place_many(owners, length)
        assert many.place_many(owners, length) == offsets
        held |= {o: (length, at) for o, at in zip(owners, offsets, strict=False)}
        some = draw.sample(sorted(held), draw.randrange(len(held) + 1))
        lengths, places = np.array([held[o] for o in some], np.int64).reshape(-1, 2).T
        kind = draw.choice(["expose", "hide", "remove"])
        for owner in some:
            if kind == "remove":
                one.remove(owner, *held.pop(owner))
            else:
                getattr(one, kind)(held[owner][1])
        if kind == "remove":
            many.remove_many(some, lengths, places)
        else:
            getattr(many, kind + "_many")(places)
        assert state_of(many) == state_of(one)
