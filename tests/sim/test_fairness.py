"""Quotas in a seeded world: caps and floors hold at every eviction, and change nothing else.

`EBBTIDE_TEST_SIM_SEED=17` runs one seed, `EBBTIDE_TEST_SIM_SEEDS=2000` that many.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.things import Thing

from ebbtide.testing import SimStore
from ebbtide.tiers import segments
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.quotas import Rule
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.segments import SegmentSpace
from ebbtide.tiers.shares import NO_QUOTA, Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ebbtide.tiers.namespace import Namespace

PAGE = 4096
SEEDS, STEPS = 20, 120
NAMES = ("a", "b", "c", "d")
ENGINES = (b"one", b"two")


def seeds() -> list[int]:
    one = os.environ.get("EBBTIDE_TEST_SIM_SEED")
    return [int(one)] if one else list(range(int(os.environ.get("EBBTIDE_TEST_SIM_SEEDS", SEEDS))))


@pytest.fixture
def directory() -> Iterator[str]:
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast, prefix="sim-") as path:
        yield os.path.join(path, "disk")


class World:
    """Four namespaces, two engines, and a watch over whoever is evicted for whom."""

    def __init__(self, seed: int, directory: str, strides: tuple[int, ...]) -> None:
        self.random = Random(seed)
        self.strides = strides
        memory = PAGE * self.random.choice([40, 64])
        self.disk_bytes = self.random.choice([0, 2 * memory])
        self.sim = SimStore(
            self.random.getrandbits(32),
            memory,
            disk_path=directory if self.disk_bytes else None,
            slab_bytes=self.disk_bytes,
            bounds=replace(
                Bounds.for_capacity(memory, write_after_s=self.random.choice([0.0, 1.0])),
                load_window_bytes=PAGE * 8,
            ),
            fairness=self.draw(),
        )
        self.evicted = self.own = self.at_floor = 0
        self.watch()

    def draw(self) -> tuple[Quota, list[Rule]]:
        """Quotas whose floors add up; each may be none at all."""
        left, drawn = 1.0, []
        for name in NAMES:
            floor = self.random.choice([0.0, 0.0, 0.2, 0.3])
            floor = floor if floor <= left else 0.0
            left -= floor
            cap = self.random.choice([1.0, 1.0, max(floor, 0.3), max(floor, 0.6)])
            drawn.append(Rule(f"weights={name}", Quota(floor, cap)))
        return NO_QUOTA, drawn

    def watch(self) -> None:
        """Look at every eviction at the moment when it happens."""
        store = self.sim.store
        self.over: dict[int, int] | None = None  # what is above a cap on disk since the opening
        self.lawless: set[int] = set()  # of these media: who has no slot of a size wants one
        evict = store.placement._evict

        def memory_evicts(record: Any, sake: int, why: Miss = Miss.EVICTED) -> None:
            self.look(store.memory.space, record.epoch, record.stride, sake, why)
            evict(record, sake, why)

        store.placement._evict = memory_evicts  # type: ignore[method-assign]
        self.see(store.memory.space)
        if store.disk is not None:
            disk = store.disk
            drop = disk.evict

            def disk_evicts(rows: Sequence[int], sake: int, why: Miss = Miss.EVICTED) -> None:
                for row in rows:
                    epoch = disk.index.table.epoch_of(row)
                    self.look(disk.space, epoch, disk.index.stride(row), sake, why)
                    drop([row], sake, why)

            disk.evict = disk_evicts  # type: ignore[method-assign]
            self.see(disk.space)

    def see(self, space: SegmentSpace[Any]) -> None:
        victims: Callable[..., list[Any]] = space.victims

        def asked(
            length: int,
            evictable: Any = None,
            sake: int = 0,
            *,
            count: int = 1,
            strict: bool = False,
        ) -> list[Any]:
            stride, order = space.stride(length), space.shares.order(sake)
            slot_class = space.classes.get(stride)
            slots = slot_class.owners if slot_class is not None else []
            has = any(
                owner is not None and slot_class is not None and slot_class.policy.order(n) == order
                for n, owner in enumerate(slots)
            )
            (self.lawless.discard if has or strict else self.lawless.add)(id(space))
            return victims(length, evictable, sake, count=count, strict=strict)

        space.victims = asked  # type: ignore[method-assign]

    def look(self, space: SegmentSpace[Any], epoch: int, stride: int, sake: int, why: Miss) -> None:
        shares = space.shares
        self.evicted += 1
        if epoch == sake:
            self.own += why is Miss.OVER_QUOTA
            return
        assert why is Miss.EVICTED
        if id(space) not in self.lawless:
            left = shares.used_of[epoch] - stride
            assert left >= shares.floor_bytes(epoch) or epoch in shares.over_cap()
        protected = [e for e in shares.used_of if shares.quota(e).floor > 0.0]
        self.at_floor += any(not shares.may_lose(e, stride, sake) for e in protected)

    def act(self) -> None:
        name = self.random.choice(NAMES)
        space, kind = self.sim.namespace(name), self.random.randrange(len(self.strides))
        start = self.random.randrange(90)
        keys = [
            n.to_bytes(32, "big") + kind.to_bytes(4, "big")
            for n in range(start, start + self.random.randint(1, 5))
        ]
        action = self.random.choices(
            ("put", "get", "touch", "reset", "restart", "wait"), (50, 30, 20, 1, 1, 10)
        )[0]
        if action == "put":
            self.put(space, keys, self.strides[kind])
        elif action == "get":
            for found, key in zip(self.sim.get(space, keys), keys, strict=True):
                right = self.sim.content(space, key, self.strides[kind])
                assert isinstance(found, Miss) or found == right
        elif action == "touch":
            self.sim.store.touch(space, keys)
        elif action == "reset":
            self.sim.store.reset(space, lambda ok: None)
        elif action == "restart" and self.disk_bytes:
            self.sim.fairness = self.draw()
            assert self.sim.restart()
            self.watch()
        else:
            self.sim.runtime.pass_time(0.2)

    def put(self, space: Namespace, keys: list[bytes], length: int) -> None:
        engine = self.random.choice(ENGINES)
        grants, reason = self.sim.store.reserve(engine, space, keys, length)
        assert reason in (None, Miss.BUSY, Miss.OVER_QUOTA)
        self.sim.fill(space, keys, grants, length, engine)

    def check(self) -> None:
        store = self.sim.store
        store.check_integrity()
        memory = store.memory.space.shares
        for epoch, used in memory.used_of.items():
            assert used <= memory.cap_bytes(epoch)
        if store.disk is not None:  # after a cap was lowered it takes some puts to get there
            disk = store.disk.space.shares
            over = {epoch: disk.used_of[epoch] for epoch in disk.over_cap()}
            if self.over is not None:
                assert all(used <= self.over.get(epoch, 0) for epoch, used in over.items())
            self.over = over


def run(seed: int, directory: str, strides: tuple[int, ...]) -> World:
    world = World(seed, directory, strides)
    try:
        for _ in range(STEPS):
            world.act()
            world.check()
        assert world.sim.drain()
        world.check()
    finally:
        world.sim.close()
    return world


@pytest.mark.parametrize("seed", seeds())
def test_caps_and_floors_hold_at_every_eviction(seed: int, directory: str) -> None:
    run(seed, directory, (PAGE,))


@pytest.mark.parametrize("seed", seeds())
def test_caps_and_floors_hold_with_records_of_several_sizes(
    seed: int, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MIN", 4 * PAGE)
    run(seed, directory, (PAGE, 2 * PAGE, 3000))


def test_the_worlds_above_do_evict_at_floors_and_caps(directory: str) -> None:
    """Or they would show nothing."""
    worlds = [run(seed, f"{directory}{seed}", (PAGE,)) for seed in range(6)]
    assert sum(world.evicted for world in worlds) > 100
    assert sum(world.own for world in worlds) > 20
    assert sum(world.at_floor for world in worlds) > 20


# -- below all caps it is plain LRU ---------------------------------------------------------------

STEP = st.tuples(
    st.sampled_from(["place"] * 3 + ["touch"] * 3 + ["hide", "expose", "evict"]),
    st.integers(0, 2),  # namespace
    st.sampled_from([PAGE, 2 * PAGE]),
    st.integers(0, 40),  # which thing
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=80))
def test_orders_of_namespaces_below_their_caps_are_one_lru(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """The same things happen to a space with an order for each namespace and to one without."""
    plain = SegmentSpace[Thing](32 * PAGE, segment_bytes=8 * PAGE)
    quoted = SegmentSpace[Thing](32 * PAGE, segment_bytes=8 * PAGE)
    for epoch in (1, 2, 3):
        quoted.shares.assign(epoch, Quota(0.0, 0.99), ordered=True)
    pairs: list[tuple[Thing, Thing, int]] = []

    def both(thing: Thing, other: Thing, verb: str) -> None:
        for space, one in ((plain, thing), (quoted, other)):
            getattr(space, verb)(one.offset)

    def drop(number: int) -> None:
        thing, other, epoch = pairs.pop(number)
        plain.remove(thing, thing.length, thing.offset)
        quoted.remove(other, other.length, other.offset)
        quoted.shares.give(epoch, other.stride)

    for verb, name, length, which in steps:
        epoch = name + 1
        if verb == "place":
            thing, other = Thing(), Thing()
            offset = plain.place(thing, length)
            assert offset == quoted.place(other, length, quoted.shares.order(epoch))
            if offset is not None:
                for one in (thing, other):
                    one.offset, one.length, one.stride = offset, length, plain.stride(length)
                quoted.shares.take(epoch, other.stride)
                both(thing, other, "expose")
                pairs.append((thing, other, epoch))
        elif verb == "evict":
            cold = [thing.offset for thing in plain.victims(length)]
            assert cold == [thing.offset for thing in quoted.victims(length, sake=epoch)]
            for offset in cold:
                drop(next(n for n, pair in enumerate(pairs) if pair[0].offset == offset))
        elif pairs:
            both(*pairs[which % len(pairs)][:2], verb)
        for size in (PAGE, 2 * PAGE):
            cold = [thing.offset for thing in plain.victims(size)]
            assert cold == [thing.offset for thing in quoted.victims(size, sake=epoch)]
    plain.check_integrity()
    quoted.check_integrity()
