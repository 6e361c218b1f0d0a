"""Loads: the window, the queue for slots, who holds what, and what a reader may rely on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import Fault, RecordingSink, SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.load import Load
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import READ, VERIFY, WRITE

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.tiers.load import Granted

PAGE = 4096
ONE, TWO = b"engine-1", b"engine-2"


def bounds_of(slots: int, window: int = 1, **changes: int | float | bool) -> Bounds:
    """Bounds of an arena of `slots` pages with a load window of `window` pages."""
    usual = Bounds.for_capacity(slots * PAGE, write_after_s=3600.0)
    bounds = replace(usual, load_window_bytes=window * PAGE, dirty_max_bytes=slots * PAGE)
    return replace(bounds, **changes)  # type: ignore[arg-type]


def disk_sim(tmp_path: Path, slots: int, window: int, **changes: int | float | bool) -> SimStore:
    return SimStore(
        1,
        slots * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=64 * PAGE,
        bounds=bounds_of(slots, window, **changes),
    )


def on_disk(sim: SimStore, numbers: range, weights: str = "seed:0") -> list[bytes]:
    """Put keys so that the disk holds them and memory, after a restart, holds nothing."""
    keys = [key_of(n) for n in numbers]
    for key in keys:
        sim.put(sim.namespace(weights), [key], PAGE)
        assert sim.drain()
    assert sim.restart()
    return keys


def ack_all(sim: SimStore, sink: RecordingSink, load: object) -> None:
    for batch in list(sink.open_batches):
        sink.acked(batch)
        assert load.ack(batch)  # type: ignore[attr-defined]


def test_a_disk_record_chosen_for_reading_is_not_evicted_before_the_read(tmp_path: Path) -> None:
    """The load's second key finds no slot, so the mover writes, so the disk evicts."""
    with SimStore(
        3,
        4 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=8 * PAGE,
        bounds=bounds_of(4, window=4, write_queue_bytes=4 * PAGE),
    ) as sim:
        keys = on_disk(sim, range(7))
        space = sim.namespace()
        sim.put(space, [key_of(n) for n in (20, 21, 22)], PAGE)  # dirty: cannot be evicted
        sink = RecordingSink(2)
        sim.runtime.hold(READ)
        load = sim.store.load(ONE, space, keys[:2], sink)
        sim.runtime.pass_time(1.0)  # the writes and the commit that frees slots
        sim.put(space, [key_of(23)], PAGE)
        sim.drain()
        sim.runtime.let_go(READ)
        while not sink.is_over:
            sim.runtime.run_until(lambda: bool(sink.open_batches) or sink.is_over)
            ack_all(sim, sink, load)
        assert sink.granted[0].source is Place.DISK
        assert sim.store.disk is not None
        assert sim.store.disk.corrupt == 0
        sim.store.check_integrity()


def test_a_holder_that_acks_within_the_call_is_served_to_the_end() -> None:
    with SimStore(1, 16 * PAGE, bounds=bounds_of(16, verify_memory=False)) as sim:
        space, keys = sim.namespace(), [key_of(n) for n in range(4)]
        sim.put(space, keys, PAGE)

        def ack_now(batch: int, granted: list[Granted]) -> None:
            sim.runtime.call_later(0.0, lambda: None)
            sink.acked(batch)
            loads[0].ack(batch)

        sink = RecordingSink(len(keys), on_batch=ack_now)
        loads = [Load(sim.store, space, keys, sink, to_verify=False)]
        loads[0].advance()
        sim.runtime.settle()
        assert sink.is_over
        assert len(sink.granted) == 4


def test_failures_are_told_before_done_also_to_a_holder_that_acks_at_once(tmp_path: Path) -> None:
    with SimStore(
        1,
        16 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=32 * PAGE,
        bounds=bounds_of(16, window=8),
    ) as sim:
        keys, space = on_disk(sim, range(4)), sim.namespace()
        assert sim.store.disk is not None
        bad = sim.store.disk.find(space.epoch, keys[1])
        assert bad is not None
        assert sim.slab is not None
        sim.slab.flip_at_rest(bad.offset)
        loads: list[Load] = []

        def ack_now(batch: int, granted: list[Granted]) -> None:
            sink.acked(batch)
            loads[0].ack(batch)

        sink = RecordingSink(len(keys), on_batch=ack_now)
        loads.append(sim.store.load(ONE, space, keys, sink))
        sim.runtime.settle()
        assert sink.is_over
        assert sink.failures == {1: Miss.CORRUPT}


def test_a_load_that_waits_for_its_own_acks_does_not_block_those_that_wait_for_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONE never acks: it keeps its window and no more."""
    with SimStore(
        1,
        8 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=64 * PAGE,
        bounds=bounds_of(8, window=2),
    ) as sim:
        keys, space = on_disk(sim, range(8)), sim.namespace()
        grants, _ = sim.store.reserve(ONE, space, [key_of(n) for n in range(100, 107)], PAGE)
        assert len(grants) == 7
        stuck = RecordingSink(3)
        sim.store.load(ONE, space, keys[:3], stuck)
        sim.runtime.settle()
        assert stuck.granted.keys() == {0}  # the last slot; the second key queues for one
        assert sim.store.disk is not None
        evicted = sim.store.disk.find(space.epoch, keys[1])
        assert evicted is not None
        sim.store.disk.discard(evicted)
        with monkeypatch.context() as patch:
            # The queue is told a bit later.
            patch.setattr(sim.store.loads, "slots_freed", lambda: None)
            sim.store.abort(ONE, [grants[0].sequence])
            other = sim.store.reserve(TWO, space, [keys[1]], PAGE)[0]
            sim.fill(space, [keys[1]], other, PAGE, TWO)  # the second key is in memory after all
        sim.store.loads.slots_freed()
        sim.runtime.settle()
        assert stuck.granted.keys() == {0, 1}  # the window is full: only an ack helps the third
        sim.store.abort(ONE, [grants[1].sequence])
        behind = RecordingSink(1)
        sim.store.load(TWO, space, [keys[3]], behind)
        sim.runtime.settle()
        assert behind.granted.keys() == {0}


@pytest.mark.parametrize("weights", ["seed:0"])
def test_keys_of_a_pending_namespace_are_told_so(weights: str) -> None:
    from ebbtide.testing import descriptor

    with SimStore(1, 8 * PAGE) as sim:
        space = sim.store.open_namespace(descriptor(weights).pairs(), pending=True)
        assert sim.get(space, [key_of(1)]) == [Miss.NAMESPACE_PENDING]


# -- the window and the queue ---------------------------------------------------------------------


def test_a_load_holds_its_window_and_streams(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 16, window=4) as sim:
        keys, space = on_disk(sim, range(12)), sim.namespace()
        sink = RecordingSink(12)
        load = sim.store.load(ONE, space, keys, sink)
        while not sink.is_over:
            sim.runtime.settle()
            assert sim.store.memory.pinned_bytes <= 4 * PAGE
            ack_all(sim, sink, load)
        assert [sink.granted[n].source for n in range(12)] == [Place.DISK] * 12


def test_a_record_larger_than_the_window_is_loaded_alone() -> None:
    with SimStore(1, 16 * PAGE, bounds=bounds_of(16, window=1)) as sim:
        space, keys = sim.namespace(), [key_of(1), key_of(2)]
        sim.put(space, keys, 3 * PAGE)
        assert sim.get(space, keys) == [sim.content(space, key, 3 * PAGE) for key in keys]


def test_loads_get_slots_in_the_order_in_which_they_asked(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 8, window=1) as sim:
        keys, space = on_disk(sim, range(6)), sim.namespace()
        grants, _ = sim.store.reserve(ONE, space, [key_of(n) for n in range(100, 107)], PAGE)
        blocker = RecordingSink(1)
        first = sim.store.load(ONE, space, keys[:1], blocker)
        sinks = [RecordingSink(1) for _ in range(5)]
        loads = [
            sim.store.load(TWO, space, [key], sink)
            for key, sink in zip(keys[1:], sinks, strict=True)
        ]
        sim.runtime.settle()
        for served in range(5):
            assert [sink.is_done for sink in sinks] == [n < served for n in range(5)]
            if served == 0:
                ack_all(sim, blocker, first)
            else:
                ack_all(sim, sinks[served - 1], loads[served - 1])
            sim.runtime.settle()
        assert all(sink.is_done for sink in sinks)
        sim.store.abort(ONE, [grant.sequence for grant in grants])


def test_two_loads_share_one_read(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 8, window=4) as sim:
        keys, space = on_disk(sim, range(2)), sim.namespace()
        sinks = [RecordingSink(2), RecordingSink(2)]
        loads = [sim.store.load(ONE, space, keys, sink) for sink in sinks]
        sim.runtime.settle()
        assert sim.slab is not None
        assert len([entry for entry in sim.slab.log if entry.name == "read"]) <= 2
        assert sim.store.ledger.counts["promoted"] == 2
        one, other = ({g.offset for g in sink.granted.values()} for sink in sinks)
        assert one == other
        ack_all(sim, sinks[0], loads[0])
        assert sim.store.memory.pinned_bytes == 2 * PAGE
        ack_all(sim, sinks[1], loads[1])
        assert sim.store.memory.pinned_bytes == 0


def test_loads_that_share_a_failing_read_both_end(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 8, window=4) as sim:
        keys, space = on_disk(sim, range(1)), sim.namespace()
        assert sim.slab is not None
        sim.slab.fail_next("read", Fault.EIO)
        sinks = [RecordingSink(1), RecordingSink(1)]
        for sink in sinks:
            sim.store.load(ONE, space, keys, sink)
        sim.runtime.settle()
        assert [sink.failures for sink in sinks] == [{0: Miss.IO_ERROR}] * 2
        assert all(sink.is_over for sink in sinks)


def test_what_is_corrupt_in_memory_is_served_from_disk(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 8, window=4) as sim:
        space, keys = sim.namespace(), [key_of(1), key_of(2)]
        sim.put(space, keys, PAGE)
        assert sim.drain()
        record = sim.store.memory.find(space.epoch, keys[0])
        assert record is not None
        sim.store.view(record, PAGE)[100] ^= 4
        assert sim.get(space, keys) == [sim.content(space, key, PAGE) for key in keys]
        assert sim.store.ledger.counts["memory_corrupt"] == 1
        assert sim.store.ledger.counts["promoted"] == 1


def test_a_record_that_two_loads_find_corrupt_is_counted_once() -> None:
    with SimStore(1, 8 * PAGE) as sim:
        space, keys = sim.namespace(), [key_of(1)]
        sim.put(space, keys, PAGE)
        record = sim.store.memory.find(space.epoch, keys[0])
        assert record is not None
        sim.store.view(record, PAGE)[100] ^= 4
        sinks = [RecordingSink(1), RecordingSink(1)]
        for sink in sinks:
            sim.store.load(ONE, space, keys, sink)
        sim.runtime.settle()
        assert [sink.failures for sink in sinks] == [{0: Miss.CORRUPT}] * 2
        assert sim.store.ledger.counts["memory_corrupt"] == 1


# -- ending ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [READ, VERIFY])
def test_a_released_load_ends_and_what_was_granted_waits_for_its_ack(
    tmp_path: Path, pool: str
) -> None:
    with disk_sim(tmp_path, 16, window=2) as sim:
        keys, space = on_disk(sim, range(6)), sim.namespace()
        sim.get(space, keys[:4])  # some in memory, the rest on disk
        sink = RecordingSink(6)
        load = sim.store.load(ONE, space, keys if pool == VERIFY else keys[::-1], sink)
        sim.runtime.settle()
        assert len(sink.granted) == 2
        sim.runtime.hold(pool)
        sink.acked(0) if 0 in sink.open_batches else None
        load.ack(0)
        load.release()
        sim.runtime.let_go(pool)
        sim.runtime.settle()
        assert sink.is_done
        assert set(sink.failures.values()) == {Miss.CANCELLED}
        ack_all(sim, sink, load)
        assert sink.is_over
        assert not load.ack(0)
        assert sim.store.memory.pinned_bytes == 0


def test_a_load_of_an_engine_that_is_gone_lets_go_of_all(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 16, window=2) as sim:
        keys, space = on_disk(sim, range(6)), sim.namespace()
        sink = RecordingSink(6)
        sim.store.load(ONE, space, keys, sink)
        sim.runtime.settle()
        assert sim.store.memory.pinned_bytes == 2 * PAGE
        sink.open_batches.clear()
        sim.store.engine_gone(ONE)
        sim.runtime.settle()
        assert sink.is_over
        assert sim.store.memory.pinned_bytes == 0
        assert sim.store.stats()["loads"] == 0


def test_p49_loads_that_end_in_any_way_leave_nothing_behind(tmp_path: Path) -> None:
    """A thousand of them; the next one runs, and nothing is held."""
    with disk_sim(tmp_path, 8, window=2) as sim:
        keys, space = on_disk(sim, range(8)), sim.namespace()
        random = sim.random
        for number in range(1000):
            asked = random.sample([*keys, key_of(500 + number)], 3)
            sink = RecordingSink(3)
            load = sim.store.load(ONE, space, asked, sink)
            for _ in range(random.randrange(6)):
                sim.runtime.step(jump=False)
            if random.random() < 0.3:
                load.release()
            if random.random() < 0.1:
                sink.open_batches.clear()
                sim.store.engine_gone(ONE)
            while not sink.is_over:
                sim.runtime.settle()
                ack_all(sim, sink, load)
        assert sim.store.memory.pinned_bytes == 0
        assert sim.store.stats()["loads"] == 0
        assert not sim.store.loads._queue
        assert sim.get(space, keys) == [sim.content(space, key, PAGE) for key in keys]


def test_p45_a_load_among_stores_that_hang_ends_when_it_is_released(tmp_path: Path) -> None:
    """Four slots, all with records whose writes hang: the load waits, without work."""
    with disk_sim(tmp_path, 4, window=1, write_after_s=0.0) as sim:
        keys = on_disk(sim, range(1))
        space = sim.namespace()
        sim.runtime.hold(WRITE)
        for number in (10, 11, 12, 13):
            sim.put(space, [key_of(number)], PAGE)
        sink = RecordingSink(1)
        load = sim.store.load(ONE, space, keys, sink)
        sim.runtime.pass_time(1.0)
        before = sim.runtime.steps
        sim.runtime.pass_time(10.0)
        assert sim.runtime.steps - before < 5
        assert not sink.is_done
        load.release()
        assert sink.failures == {0: Miss.CANCELLED}
        assert sink.is_over
        sim.runtime.let_go(WRITE)
        sim.runtime.settle()
        assert sim.get(space, keys) == [sim.content(space, keys[0], PAGE)]


# -- loads whose holder verifies ------------------------------------------------------------------


def test_a_load_to_verify_waits_for_no_thread(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 8, window=8) as sim:
        space, keys = sim.namespace(), [key_of(n) for n in range(4)]
        sim.put(space, keys, PAGE)
        sim.runtime.hold(VERIFY)
        sink = RecordingSink(4)
        load = sim.store.load(ONE, space, keys, sink, to_verify=True)
        assert [sink.granted[n].source for n in range(4)] == [Place.MEMORY] * 4
        assert sink.is_done
        ack_all(sim, sink, load)
        assert sink.is_over


def test_what_comes_from_disk_is_verified_before_it_is_granted_to_whomever(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 8, window=8) as sim:
        keys = on_disk(sim, range(2))
        space = sim.namespace()
        assert sim.store.disk is not None
        assert sim.slab is not None
        first = sim.store.disk.find(space.epoch, keys[0])
        assert first is not None
        sim.slab.flip_at_rest(first.offset)
        sink = RecordingSink(2)
        load = sim.store.load(ONE, space, keys, sink, to_verify=True)
        sim.runtime.run_until(lambda: sink.is_done)
        assert sink.failures == {0: Miss.CORRUPT}
        view = sim.store.arena.view(sink.granted[1].offset, PAGE)
        assert sink.granted[1].digest == record_digest(view, record_seed(space.digest, keys[1]))
        ack_all(sim, sink, load)


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_disputed_record_is_lost_if_the_store_finds_it_wrong_too(is_wrong: bool) -> None:
    with SimStore(1, 16 * PAGE, bounds=bounds_of(16, window=16)) as sim:
        space, keys = sim.namespace(), [key_of(n) for n in range(3)]
        sim.put(space, keys, PAGE)
        assert sim.store.pin(TWO, space, keys[1:2]) == 1
        sink = RecordingSink(3)
        load = sim.store.load(ONE, space, keys, sink, to_verify=True)
        sim.store.arena.view(sink.granted[1].offset, 1)[0] ^= is_wrong
        (batch,) = sink.open_batches
        assert not load.dispute(batch + 1, [0])
        sink.acked(batch)
        sim.runtime.hold(VERIFY)
        assert load.dispute(batch, [1, 1, 99])
        assert sink.is_over
        assert not load.ack(batch)
        record = sim.store.memory.find(space.epoch, keys[1])
        assert record is not None
        assert record.pins == 2, "by PIN, and by who looks at it"
        sim.runtime.let_go(VERIFY)
        sim.runtime.settle()
        counts = sim.store.ledger.counts
        assert (counts["disputed"], counts["memory_corrupt"]) == (1, is_wrong)
        found = sim.store.lookup(space, keys)
        assert found[1] == (Miss.CORRUPT if is_wrong else Place.MEMORY)
        assert (found[0], found[2]) == (Place.MEMORY, Place.MEMORY)
        sim.store.unpin(TWO, space, keys[1:2])
        assert sim.store.memory.pinned_bytes == 0
        sim.store.check_integrity()


def test_a_reset_ends_a_disputed_record_before_it_was_looked_at() -> None:
    with SimStore(1, 16 * PAGE, bounds=bounds_of(16, window=16)) as sim:
        space, keys = sim.namespace(), [key_of(1)]
        sim.put(space, keys, PAGE)
        sink = RecordingSink(1)
        load = sim.store.load(ONE, space, keys, sink, to_verify=True)
        sim.store.arena.view(sink.granted[0].offset, 1)[0] ^= 1
        sim.runtime.hold(VERIFY)
        sink.acked(0)
        assert load.dispute(0, [0])
        sim.store.reset(space, lambda ok: None)
        sim.runtime.let_go(VERIFY)
        sim.runtime.settle()
        assert sim.store.ledger.counts["memory_corrupt"] == 0, "it was counted as reset"
        assert sim.store.memory.pinned_bytes == 0
        sim.store.check_integrity()


def test_a_load_that_waits_for_a_slot_gets_the_one_of_a_record_found_wrong(tmp_path: Path) -> None:
    with disk_sim(tmp_path, 4, window=4) as sim:
        keys = on_disk(sim, range(5))
        space, sinks = sim.namespace(), [RecordingSink(1) for _ in keys]
        loads = [
            sim.store.load(ONE, space, [key], sink, to_verify=True)
            for key, sink in zip(keys, sinks, strict=True)
        ]
        sim.runtime.run_until(lambda: all(sink.open_batches for sink in sinks[:4]))
        sim.store.arena.view(sinks[0].granted[0].offset, 1)[0] ^= 1
        sim.runtime.hold(VERIFY)
        sinks[0].acked(0)
        assert loads[0].dispute(0, [0])
        sim.runtime.settle()
        assert not sinks[4].open_batches, "every slot is held"
        sim.runtime.let_go(VERIFY)
        sim.runtime.run_until(lambda: bool(sinks[4].open_batches))
        for sink, load in zip(sinks[1:], loads[1:], strict=True):
            ack_all(sim, sink, load)
        assert sim.store.memory.pinned_bytes == 0
