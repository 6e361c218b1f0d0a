"""The whole store in a seeded world, against a model. A failing seed reproduces its run.

`EBBTIDE_TEST_SIM_SEED=17` runs one seed, `EBBTIDE_TEST_SIM_SEEDS=2000` that many,
`EBBTIDE_TEST_SIM_STEPS` sets how many actions each has.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.sim.plan import SLOW_S, TOLD, Plan
from tests.sim.world import World

from ebbtide.testing import Fault
from ebbtide.tiers import segments
from ebbtide.tiers.bounds import Bounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEEDS, STEPS = 25, 600
FAILING_SEEDS = 10  # for each kind of failing drive
CHECK_EVERY = 5


def seeds(count: int) -> list[int]:
    """The seeds of this run: one by name, or the first so many."""
    one = os.environ.get("EBBTIDE_TEST_SIM_SEED")
    return [int(one)] if one else list(range(int(os.environ.get("EBBTIDE_TEST_SIM_SEEDS", count))))


@pytest.fixture
def directory() -> Iterator[str]:
    """Return a directory for LMDB: where a sync costs nothing, if there is such a place."""
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast, prefix="sim-") as path:
        yield os.path.join(path, "disk")


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small arena have several segments, as a large one has."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MIN", 64 << 10)


def run(world: World, steps: int) -> World:
    """Let things happen, checking as we go; a failure tells what came before it."""
    try:
        for step in range(steps):
            world.act()
            if step % CHECK_EVERY == 0:
                world.check()
        world.finish()
    except BaseException as error:
        error.add_note(f"{world.plan}\nactions: {list(world.history)}")
        error.add_note(f"runtime: {list(world.sim.runtime.trace)}")
        raise
    finally:
        world.sim.close()
    return world


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_a_store_serves_right_bytes_or_a_reason_whatever_happens(seed: int, directory: str) -> None:
    steps = int(os.environ.get("EBBTIDE_TEST_SIM_STEPS", STEPS))
    run(World(seed, directory), steps)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("seed", seeds(FAILING_SEEDS))
def test_a_drive_that_fails_in_every_way_that_is_told_costs_misses_only(
    seed: int, directory: str
) -> None:
    """No room, no quota, read-only, torn, short, slow: for one operation or for a while."""
    drawn = Plan.draw(Random(seed))
    plan = replace(
        drawn,
        slab_bytes=drawn.slab_bytes or drawn.memory_bytes,
        read_faults=0.05,
        device_faults=TOLD,
        slow_s=SLOW_S,
    )
    run(World(seed, directory, plan), int(os.environ.get("EBBTIDE_TEST_SIM_STEPS", STEPS)))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.REORDERED])
@pytest.mark.parametrize("seed", seeds(FAILING_SEEDS))
def test_a_drive_that_lies_about_its_syncs_costs_records_and_no_right_byte(
    seed: int, fault: Fault, directory: str
) -> None:
    """A power cut may spoil any record then: each is a counted miss, or is not there."""
    drawn = Plan.draw(Random(seed))
    slab_bytes = drawn.slab_bytes or drawn.memory_bytes
    plan = replace(drawn, slab_bytes=slab_bytes, flips=False, sync_fault=fault)
    run(World(seed, directory, plan), int(os.environ.get("EBBTIDE_TEST_SIM_STEPS", STEPS)))


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.REORDERED])
def test_a_world_with_lying_syncs_does_spoil_records(fault: Fault, directory: str) -> None:
    """Or the one above would show nothing."""
    plan = replace(Plan.draw(Random(1)), slab_bytes=1 << 20, flips=False, sync_fault=fault)
    worlds = (run(World(seed, f"{directory}{seed}", plan), 300) for seed in range(4))
    assert sum(world.spoilt for world in worlds) > 0


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("seed", range(3))
def test_a_seed_reproduces_its_run(seed: int, tmp_path: Path) -> None:
    def story(name: str) -> tuple[object, ...]:
        world = run(World(seed, str(tmp_path / name)), 100)
        return world.served, world.sim.runtime.steps, world.random.random(), *world.history

    assert story("one") == story("two")


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_p45_four_slots_never_deadlock(seed: int, directory: str) -> None:
    random = Random(seed)
    bounds = Bounds.for_capacity(4 * 4096, write_after_s=random.choice([0.0, 30.0]))
    plan = Plan(
        memory_bytes=4 * 4096,
        slab_bytes=4096 * random.choice([4, 16]),
        lengths=(4000,),
        keys=random.choice([6, 20]),
        flips=False,
        read_faults=0.0,
        device_faults=(),
        bounds=replace(bounds, pinned_max_bytes=4096),
    )
    run(World(seed, directory, plan), int(os.environ.get("EBBTIDE_TEST_SIM_STEPS", STEPS)))
