"""Which memory records are written to disk, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import WRITE

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.tiers.memory import MemoryRecord

PAGE = 4096


def sim_of(
    tmp_path: Path, slots: int = 64, slab_slots: int = 128, **changes: float | int
) -> SimStore:
    usual = Bounds.for_capacity(slots * PAGE, write_after_s=3600.0)
    bounds = replace(usual, dirty_max_bytes=slots * PAGE, **changes)  # type: ignore[arg-type]
    return SimStore(
        1,
        slots * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=slab_slots * PAGE,
        bounds=bounds,
    )


def put(sim: SimStore, count: int, first: int = 0) -> list[bytes]:
    keys = [key_of(n) for n in range(first, first + count)]
    sim.put(sim.namespace(), keys, PAGE)
    return keys


def on_disk(sim: SimStore) -> int:
    assert sim.store.disk is not None
    return sim.store.disk.records


def test_a_record_is_written_when_it_has_been_dirty_long_enough(tmp_path: Path) -> None:
    with sim_of(tmp_path, write_after_s=30.0) as sim:
        put(sim, 4)
        sim.runtime.pass_time(29.0)
        assert on_disk(sim) == 0
        sim.runtime.pass_time(2.0)
        assert on_disk(sim) == 4
        assert sim.store.memory.dirty_bytes == 0


def test_more_dirty_bytes_than_allowed_are_written_at_once_oldest_first(tmp_path: Path) -> None:
    with sim_of(tmp_path) as sim:
        sim.store.bounds = replace(sim.store.bounds, dirty_max_bytes=10 * PAGE)
        assert sim.store.mover is not None
        sim.store.mover._bounds = sim.store.bounds
        keys = put(sim, 16)
        sim.runtime.settle()
        assert sim.store.memory.dirty_bytes == 10 * PAGE
        space = sim.namespace()
        assert sim.store.disk is not None
        assert [sim.store.disk.holds(space.epoch, k) for k in keys] == [True] * 6 + [False] * 10


def test_a_record_is_written_once_and_promotion_keeps_the_disk_copy(tmp_path: Path) -> None:
    with sim_of(tmp_path) as sim:
        keys = put(sim, 4)
        sim.restart()
        space = sim.namespace()
        assert sim.store.lookup(space, keys) == bytes([Place.DISK]) * 4
        sim.get(space, keys)
        assert sim.store.lookup(space, keys) == bytes([Place.MEMORY]) * 4
        assert sim.drain()
        assert sim.slab is not None
        assert [entry for entry in sim.slab.log if entry.name == "write"] == []


def test_what_is_being_written_never_exceeds_the_queue(tmp_path: Path) -> None:
    with sim_of(tmp_path, write_queue_bytes=8 * PAGE) as sim:
        put(sim, 32)
        sim.runtime.hold(WRITE)
        assert sim.store.mover is not None
        sim.store.mover.drain()
        sim.runtime.settle()
        assert sim.store.memory.pinned_bytes == 8 * PAGE
        sim.runtime.let_go(WRITE)
        assert sim.drain()
        assert on_disk(sim) == 32


def test_p45_a_full_write_queue_does_not_spin(tmp_path: Path) -> None:
    """The device hangs while records are due: waiting for it takes no steps."""
    with sim_of(tmp_path, write_queue_bytes=4 * PAGE, write_after_s=1.0) as sim:
        sim.runtime.hold(WRITE)
        put(sim, 16)
        sim.runtime.pass_time(5.0)
        before = sim.runtime.steps
        sim.runtime.pass_time(50.0)
        assert sim.runtime.steps - before < 10
        sim.runtime.let_go(WRITE)
        sim.runtime.pass_time(5.0)
        assert on_disk(sim) == 16


def test_a_wanted_slot_has_the_coldest_of_its_size_written(tmp_path: Path) -> None:
    """Another size has more records than the search looks at, all of them written already."""
    with sim_of(tmp_path, slots=600, slab_slots=1200) as sim:
        sim.store.memory.space.__init__(  # type: ignore[misc]  # several segments in a small arena
            600 * PAGE, segment_bytes=20 * PAGE
        )
        space = sim.namespace()
        for start in range(0, 400, 20):
            sim.put(space, [key_of(n) for n in range(start, start + 20)], PAGE)
        assert sim.drain()
        assert sim.store.mover is not None
        sim.store.mover._draining = False
        pins = [key_of(n) for n in range(0, 400, 20)]
        assert sim.store.pin(b"e", space, pins) == 20  # no segment of that size can be drained
        two = [key_of(n) for n in range(1000, 1100)]
        grants, _ = sim.store.reserve(b"e", space, two, 2 * PAGE)
        assert len(grants) == 100
        sim.fill(space, two, grants, 2 * PAGE, b"e")
        more, reason = sim.store.reserve(b"e", space, [key_of(2000)], 2 * PAGE)
        assert (more, reason) == ([], Miss.BUSY)
        sim.runtime.settle()
        more, reason = sim.store.reserve(b"e", space, [key_of(2000)], 2 * PAGE)
        assert (len(more), reason) == (1, None)


def test_a_drain_of_a_segment_has_all_its_dirty_records_written(tmp_path: Path) -> None:
    """A first record of a new size wants a whole segment: more than one search's worth."""
    with sim_of(tmp_path, slots=400, slab_slots=1000) as sim:
        space = sim.namespace()
        for n in range(400):
            sim.store.ledger.counts.clear()
            sim.put(space, [key_of(n)], PAGE)
        granted = 0
        for _ in range(6):
            grants, _ = sim.store.reserve(b"e", space, [key_of(5000)], 2 * PAGE)
            granted += len(grants)
            sim.runtime.settle()
        assert granted


def test_a_record_that_no_segment_of_the_disk_holds_stays_in_memory_alone(tmp_path: Path) -> None:
    with sim_of(tmp_path, slots=64, slab_slots=8) as sim:
        space = sim.namespace()
        large, small = [key_of(1), key_of(2)], [key_of(3)]
        sim.put(space, large, 9 * PAGE)
        assert sim.drain()
        assert sim.store.mover is not None
        assert (on_disk(sim), sim.store.mover.refused) == (0, 2)
        assert sim.get(space, large) == [sim.content(space, key, 9 * PAGE) for key in large]
        sim.put(space, small, PAGE)
        assert sim.drain()
        assert on_disk(sim) == 1


class AdmitNone:
    def admit(self, record: MemoryRecord) -> bool:
        return False


def test_a_record_that_is_not_admitted_says_so_once_it_is_gone(tmp_path: Path) -> None:
    with SimStore(
        1,
        8 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=64 * PAGE,
        admission=AdmitNone(),
        bounds=Bounds.for_capacity(8 * PAGE, write_after_s=0.0),
    ) as sim:
        space = sim.namespace()
        keys = [key_of(n) for n in range(20)]
        for key in keys:
            sim.put(space, [key], PAGE)
        assert on_disk(sim) == 0
        assert sim.store.lookup(space, keys[:1]) == bytes([Miss.NOT_ADMITTED])
        assert sim.store.mover is not None
        sim.runtime.settle()
        assert sim.store.mover.refused == 20


def test_p68_a_key_that_the_disk_holds_already_is_done_and_the_rest_is_written(
    tmp_path: Path,
) -> None:
    with sim_of(tmp_path) as sim:
        first, again = put(sim, 4), [key_of(n) for n in range(8)]
        assert sim.drain()
        sim.put(sim.namespace(), again, PAGE)
        assert sim.drain()
        assert on_disk(sim) == 8
        assert first == again[:4]


def test_the_mover_gives_recency_no_push(tmp_path: Path) -> None:
    """Being written is no use of a record: what is coldest stays coldest."""
    with sim_of(tmp_path, write_after_s=1.0) as sim:
        keys = put(sim, 8)
        sim.store.touch(sim.namespace(), keys[:1])
        sim.runtime.pass_time(5.0)
        assert on_disk(sim) == 8
        order = [record.key for record in sim.store.memory.space.coldest_first()]
        assert order == [*keys[1:], keys[0]]


def test_a_reset_while_every_slot_is_being_written_lets_the_next_records_in(
    tmp_path: Path,
) -> None:
    """No commit frees those slots: the writes that end do."""
    with sim_of(tmp_path, slots=16, slab_slots=4, write_queue_bytes=16 * PAGE) as sim:
        old = sim.namespace("old")
        sim.put(old, [key_of(n) for n in range(6)], PAGE)
        sim.runtime.hold(WRITE)
        assert sim.store.mover is not None
        sim.store.mover.drain()
        sim.runtime.settle()
        answers: list[bool] = []
        sim.store.reset(old, answers.append)
        sim.put(sim.namespace("new"), [key_of(9)], PAGE)
        sim.runtime.pass_time(1.0)
        sim.runtime.let_go(WRITE)
        sim.runtime.pass_time(1.0)
        assert answers == [True]
        assert on_disk(sim) == 1
        assert sim.store.memory.pinned_bytes == 0
        sim.store.check_integrity()


@pytest.mark.parametrize("pieces", [[range(20)], [range(10, 20), range(10)]])
def test_p67_a_stop_with_little_time_leaves_prefixes_that_can_be_used(
    tmp_path: Path, pieces: list[range]
) -> None:
    """A chain's head is written before its tail, in whatever order its pieces became readable."""
    with sim_of(tmp_path, write_queue_bytes=2 * PAGE) as sim:
        space, chain = sim.namespace(), [key_of(n) for n in range(20)]
        grants, _ = sim.store.reserve(b"engine", space, chain, PAGE)
        for piece in pieces:
            some = slice(piece.start, piece.stop)
            assert sim.fill(space, chain[some], grants[some], PAGE) == bytes(len(piece))
        answers: list[bool] = []
        sim.store.drain(1.0, answers.append)
        sim.runtime.run_until(lambda: on_disk(sim) >= 7, 10_000)
        sim.runtime.hold(WRITE)  # the drive hangs until the time is up
        sim.runtime.pass_time(2.0)
        assert answers == [False]
        sim.runtime.let_go(WRITE)
        sim.restart(clean=False)
        space = sim.namespace()
        places = list(sim.store.lookup(space, chain))
        kept = places.count(Place.DISK)
        assert 0 < kept < 20
        assert places[:kept] == [Place.DISK] * kept
        assert sim.get(space, chain[:kept]) == [sim.content(space, k, PAGE) for k in chain[:kept]]
