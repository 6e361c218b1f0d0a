"""What is worth a write to the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.admission import AdmitSecondUse
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.reasons import Miss, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PAGE = 4096
MEMORY_SLOTS = 400
BLOCKS = 50  # of a prompt
SHARED = [key_of(n) for n in range(BLOCKS)]


def prompt(number: int) -> list[bytes]:
    return [key_of(BLOCKS * (number + 1) + n) for n in range(BLOCKS)]


def request(sim: SimStore, keys: Sequence[bytes]) -> None:
    """As an engine does it: ask, touch what is there, store the rest."""
    space = sim.namespace()
    states = sim.store.lookup(space, keys)
    sim.store.touch(space, keys)
    sim.put(space, [key for key, state in zip(keys, states, strict=True) if state > 4], PAGE)


def on_disk(sim: SimStore) -> set[bytes]:
    assert sim.store.disk is not None
    return set(sim.store.disk.keys(sim.namespace().epoch))


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(
        1,
        MEMORY_SLOTS * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=8192 * PAGE,
        admission=AdmitSecondUse(),
        bounds=Bounds.for_capacity(MEMORY_SLOTS * PAGE, write_after_s=1.0),
    ) as store:
        yield store


def test_p65_prompts_that_come_once_are_not_written_and_shared_prefixes_are_whole(
    sim: SimStore,
) -> None:
    """200 prompts of 50 blocks, and one prefix of 50 that every tenth of them has."""
    for number in range(200):
        if number % 10 == 0:
            request(sim, SHARED)
        request(sim, prompt(number))
        sim.runtime.pass_time(0.1)
        if number == 30:  # the second use was at 10, and lies back longer than `write_after`
            assert on_disk(sim) == set(SHARED)
    assert sim.store.disk is not None
    assert sim.store.disk.write_bytes == BLOCKS * PAGE  # half a hundredth of what was computed
    assert set(sim.store.lookup(sim.namespace(), SHARED)) <= {Place.MEMORY, Place.DISK}
    assert set(sim.store.lookup(sim.namespace(), prompt(0))) <= {Miss.NOT_ADMITTED, Miss.EVICTED}


def test_p65_what_had_gone_and_comes_back_is_written(sim: SimStore) -> None:
    request(sim, SHARED)
    for number in range(20):
        request(sim, prompt(number))
        sim.runtime.pass_time(0.2)
    assert Place.MEMORY not in sim.store.lookup(sim.namespace(), SHARED)
    request(sim, SHARED)
    assert sim.drain()
    assert on_disk(sim) >= set(SHARED)


def test_a_record_that_is_used_again_is_written_once_before_it_was_due_or_after(
    sim: SimStore,
) -> None:
    early, late = SHARED, prompt(1)
    request(sim, early)
    request(sim, early)
    request(sim, late)
    sim.runtime.pass_time(3.0)
    assert on_disk(sim) == set(early)
    request(sim, late)
    sim.runtime.pass_time(3.0)
    assert on_disk(sim) == {*early, *late}
    request(sim, early)
    assert sim.store.memory.dirty_bytes == 0
    sim.runtime.pass_time(3.0)
    assert sim.store.disk is not None
    assert sim.store.disk.write_bytes == 2 * BLOCKS * PAGE
    sim.store.check_integrity()
