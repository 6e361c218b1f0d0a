"""Namespaces share a store: floors, caps, and who has to give way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import RecordingSink, SimStore, descriptor
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.quotas import Quotas, Rule
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import READ, WRITE
from ebbtide.tiers.shares import NO_QUOTA, Quota, Shares

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.tiers.namespace import Namespace

PAGE = 4096
ONE = b"engine-1"
SLOTS = 20


def keys_of(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "big") + bytes(4) for n in numbers]


def rules(**quotas: tuple[float, float]) -> tuple[Quota, list[Rule]]:
    """Floors and caps of namespaces by the name of their weights."""
    return NO_QUOTA, [Rule(f"weights={name}", Quota(*quota)) for name, quota in quotas.items()]


def memory_of(sim: SimStore, space: Namespace) -> set[int]:
    """The numbers of the keys that memory holds."""
    index = sim.store.memory.index(space.epoch)
    return {int.from_bytes(key[:32], "big") for key in index}


def on_disk(sim: SimStore, space: Namespace) -> int:
    assert sim.store.disk is not None
    return len(sim.store.disk.keys(space.epoch))


# -- memory ---------------------------------------------------------------------------------------


def test_a_namespace_at_its_cap_evicts_its_own_coldest() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.0, 0.25))) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        sim.put(b, keys_of(*range(5)), PAGE)
        sim.put(a, keys_of(0, 1, 2, 3, 4), PAGE)
        sim.store.touch(a, keys_of(0))
        sim.put(a, keys_of(5, 6), PAGE)
        assert memory_of(sim, a) == {0, 3, 4, 5, 6}
        assert memory_of(sim, b) == set(range(5))
        assert sim.store.memory.space.used_bytes == 10 * PAGE  # although the rest is free
        assert sim.store.miss_reason(a, keys_of(1)[0]) is Miss.OVER_QUOTA
        assert not sim.store.shares(a)["evicted_for_others"]
        sim.store.check_integrity()


def test_a_namespace_at_its_floor_is_not_evicted_for_another_ones_sake() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.25, 1.0))) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        sim.put(a, keys_of(*range(8)), PAGE)
        for number in range(3 * SLOTS):
            sim.put(b, keys_of(number), PAGE)
        assert memory_of(sim, a) == {3, 4, 5, 6, 7}  # LRU down to the floor, and no further
        assert len(memory_of(sim, b)) == SLOTS - 5
        assert sim.store.shares(a)["evicted_for_others"] == {"memory": 3}
        sim.store.check_integrity()


def test_a_namespace_at_its_floor_still_evicts_its_own() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.5, 1.0), b=(0.5, 1.0))) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        sim.put(b, keys_of(*range(10)), PAGE)
        sim.put(a, keys_of(*range(10)), PAGE)
        sim.put(a, keys_of(10, 11), PAGE)
        assert memory_of(sim, a) == set(range(2, 12))
        assert memory_of(sim, b) == set(range(10))


def test_between_floor_and_cap_the_coldest_of_all_goes() -> None:
    quotas = rules(a=(0.1, 0.9), b=(0.1, 0.9))
    with SimStore(1, SLOTS * PAGE, fairness=quotas) as sim, SimStore(1, SLOTS * PAGE) as plain:
        held = []
        for store in (sim, plain):
            a, b = store.namespace("a"), store.namespace("b")
            store.put(a, keys_of(*range(10)), PAGE)
            store.put(b, keys_of(*range(10)), PAGE)
            store.store.touch(a, keys_of(0, 1, 2, 3))
            store.put(b, keys_of(10, 11), PAGE)
            store.store.touch(b, keys_of(0, 1))
            store.put(a, keys_of(10, 11, 12, 13, 14, 15), PAGE)
            held.append((memory_of(store, a), memory_of(store, b)))
        assert held[0] == held[1]


def test_a_namespace_without_room_below_its_cap_is_refused_and_counted() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.0, 0.25))) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        grants, reason = sim.store.reserve(b"e", a, keys_of(*range(9)), PAGE)
        assert (len(grants), reason) == (4, Miss.OVER_QUOTA)  # one slot of its cap is left to loads
        assert sim.store.shares(a)["refused"] == {"over_quota": 1}
        assert sim.store.ledger.counts["reserve_over_quota"] == 1
        grants, reason = sim.store.reserve(b"e", b, keys_of(*range(9)), PAGE)
        assert (len(grants), reason) == (9, None)
        sim.store.engine_gone(b"e")


def test_a_record_larger_than_a_cap_is_refused_and_evicts_nothing() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.0, 0.1))) as sim:
        a = sim.namespace("a")
        sim.put(a, keys_of(1), PAGE)
        assert sim.store.reserve(b"e", a, keys_of(2), 3 * PAGE) == ([], Miss.OVER_QUOTA)
        assert memory_of(sim, a) == {1}


def test_pins_of_a_capped_namespace_stay_below_half_its_cap() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.0, 0.4))) as sim:
        a = sim.namespace("a")
        sim.put(a, keys_of(*range(8)), PAGE)
        assert sim.store.pin(ONE, a, keys_of(*range(8))) == 4
        assert sim.store.unpin(ONE, a, keys_of(*range(8))) == 4
        assert sim.store.pin(ONE, a, keys_of(*range(8))) == 4


def test_a_reset_namespace_keeps_its_quota() -> None:
    with SimStore(1, SLOTS * PAGE, fairness=rules(a=(0.25, 0.5))) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        sim.put(a, keys_of(*range(10)), PAGE)
        sim.store.reset(a, lambda ok: None)
        sim.put(a, keys_of(*range(12)), PAGE)
        assert len(memory_of(sim, a)) == 10
        sim.put(b, keys_of(*range(2 * SLOTS)), PAGE)
        assert len(memory_of(sim, a)) == 5
        sim.store.check_integrity()


def test_sizes_mixed_in_segments_do_not_cost_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment of the other size holds records of one at its floor: none is drained."""
    monkeypatch.setattr("ebbtide.tiers.segments.SEGMENT_BYTES_MIN", 4 * PAGE)
    with SimStore(1, 16 * PAGE, fairness=rules(a=(0.25, 1.0))) as sim:
        a, b, c = sim.namespace("a"), sim.namespace("b"), sim.namespace("c")
        sim.put(c, keys_of(100, 101), 2 * PAGE)  # a segment for the other size
        for number in range(3):
            sim.put(a, keys_of(number), PAGE)
            sim.put(b, keys_of(*range(10 * number, 10 * number + 3)), PAGE)
        before = memory_of(sim, a)
        sim.put(c, keys_of(*range(102, 120)), 2 * PAGE)
        assert memory_of(sim, a) == before
        assert sim.store.memory.space.shares.may_lose(b.epoch, PAGE, c.epoch)


def test_a_size_without_any_slot_takes_one_segment_whatever_the_floors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.tiers.segments.SEGMENT_BYTES_MIN", 4 * PAGE)
    with SimStore(1, 16 * PAGE, fairness=rules(a=(1.0, 1.0))) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        sim.put(a, keys_of(*range(16)), PAGE)
        sim.put(b, keys_of(*range(8)), 2 * PAGE)
        assert memory_of(sim, b) == {6, 7}
        assert len(memory_of(sim, a)) == 12


def test_who_has_no_slot_of_a_size_gets_one_and_then_uses_that(tmp_path: Path) -> None:
    """All of both tiers is kept for others: a third namespace is slow, and not shut out."""
    with small_disk(tmp_path, a=(0.5, 1.0), b=(0.5, 1.0)) as sim:
        a, b, c = sim.namespace("a"), sim.namespace("b"), sim.namespace("c")
        for space in (a, b, a, b):
            sim.put(space, keys_of(*range(32)), PAGE)
            assert sim.drain()
        for number in range(4):
            sim.put(c, keys_of(number), PAGE)
            assert sim.drain()
        assert len(memory_of(sim, c)) == on_disk(sim, c) == 1
        assert sim.get(c, keys_of(3)) == [sim.content(c, keys_of(3)[0], PAGE)]
        sim.put(a, keys_of(40), PAGE)
        assert sim.get(a, keys_of(40)) == [sim.content(a, keys_of(40)[0], PAGE)]
        sim.store.check_integrity()


# -- disk -----------------------------------------------------------------------------------------


def small_disk(path: Path, **quotas: tuple[float, float]) -> SimStore:
    bounds = replace(Bounds.for_capacity(SLOTS * PAGE), write_after_s=0.0)
    return SimStore(
        3,
        SLOTS * PAGE,
        disk_path=str(path / "d"),
        slab_bytes=64 * PAGE,
        bounds=bounds,
        fairness=rules(**quotas),
    )


def test_caps_and_floors_hold_on_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, a=(0.0, 0.25), b=(0.25, 1.0)) as sim:
        a, b, c = sim.namespace("a"), sim.namespace("b"), sim.namespace("c")
        sim.put(b, keys_of(*range(30)), PAGE)
        for number in range(40):
            sim.put(a, keys_of(number), PAGE)
            assert on_disk(sim, a) <= 16
        assert sim.drain()
        assert on_disk(sim, a) == 16
        assert on_disk(sim, b) == 30
        for number in range(0, 150, 5):
            sim.put(c, keys_of(*range(number, number + 5)), PAGE)
        assert sim.drain()
        assert on_disk(sim, b) == 16
        assert sim.store.shares(b)["evicted_for_others"]["disk"] == 14
        assert sim.store.miss_reason(a, keys_of(0)[0]) is Miss.OVER_QUOTA
        sim.store.check_integrity()


def test_room_is_made_ahead_also_where_all_are_at_their_floors(tmp_path: Path) -> None:
    with small_disk(tmp_path, a=(0.5, 1.0), b=(0.5, 1.0)) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        for space in (a, b, a):
            sim.put(space, keys_of(*range(32)), PAGE)
            assert sim.drain()
        sim.put(a, keys_of(*range(40, 50)), PAGE)
        assert sim.drain()
        disk = sim.store.disk
        assert disk is not None
        assert disk.space.used_bytes <= disk.space.capacity_bytes * 15 // 16
        assert not sim.store.shares(b)["evicted_for_others"].get("disk")


def test_a_cap_of_the_disk_holds_also_while_its_records_are_being_written(tmp_path: Path) -> None:
    with SimStore(
        3,
        SLOTS * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=16 * PAGE,
        bounds=replace(Bounds.for_capacity(SLOTS * PAGE), write_after_s=0.0),
        fairness=rules(a=(0.0, 0.25)),
    ) as sim:
        a = sim.namespace("a")
        disk = sim.store.disk
        assert disk is not None
        sim.runtime.hold(WRITE)
        sim.put(a, keys_of(*range(5)), PAGE)
        sim.runtime.settle()
        assert disk.space.shares.used_of[a.epoch] == 4 * PAGE
        sim.runtime.let_go(WRITE)
        assert sim.drain()  # the fifth comes when one of these may go
        assert on_disk(sim, a) == 4
        assert sim.store.lookup(a, keys_of(4)) == bytes([Place.MEMORY])


def test_a_lowered_cap_is_the_first_to_be_evicted_and_a_floor_waits_for_its_engine(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path) as sim:
        sim.put(sim.namespace("b"), keys_of(*range(20)), PAGE)  # the coldest
        sim.put(sim.namespace("a"), keys_of(*range(38)), PAGE)
        sim.fairness = rules(a=(0.0, 0.25), b=(0.5, 1.0))
        assert sim.restart()
        a, c = sim.namespace("a"), sim.namespace("c")
        assert on_disk(sim, a) == 38
        sim.put(c, keys_of(*range(8)), PAGE)
        assert sim.drain()
        assert on_disk(sim, a) == 16
        disk = sim.store.disk
        assert disk is not None
        known = sim.store.namespaces.closed()
        assert [disk.space.shares.used_of[one.epoch] for one in known] == [20 * PAGE]
        assert [disk.space.shares.quota(one.epoch) for one in known] == [Quota(0.0, 1.0)]
        b = sim.namespace("b")
        assert disk.space.shares.quota(b.epoch) == Quota(0.5, 1.0)
        sim.store.check_integrity()


def test_a_record_that_a_cap_of_the_disk_never_lets_in_stays_in_memory(tmp_path: Path) -> None:
    with small_disk(tmp_path, a=(0.0, 0.1)) as sim:  # 2 slots of memory, 6 of the disk
        a = sim.namespace("a")
        assert sim.store.mover is not None
        assert sim.store.disk is not None
        sim.store.disk.space.shares.assign(a.epoch, Quota(0.0, 0.01), ordered=True)
        sim.put(a, keys_of(1), PAGE)
        sim.drain()
        assert sim.store.mover.refused == 1
        assert (on_disk(sim, a), memory_of(sim, a)) == (0, {1})
        assert sim.get(a, keys_of(1)) == [sim.content(a, keys_of(1)[0], PAGE)]


def test_a_purge_and_a_reset_of_all_give_no_floors(tmp_path: Path) -> None:
    with small_disk(tmp_path, a=(0.6, 1.0)) as sim:
        sim.put(sim.namespace("a"), keys_of(1), PAGE)
        assert sim.restart()
        answers: list[bool] = []
        sim.store.reset(None, answers.append)
        sim.runtime.run_until(lambda: bool(answers))
        (a,) = sim.store.namespaces
        assert sim.store.shares(a)["floor"] == 0.0
        sim.namespace("a")
        assert sim.store.shares(a)["floor"] == 0.6


# -- loads ----------------------------------------------------------------------------------------


def test_a_load_that_waits_below_its_cap_holds_nobody_up(tmp_path: Path) -> None:
    with small_disk(tmp_path, a=(0.0, 0.1)) as sim:
        a, b = sim.namespace("a"), sim.namespace("b")
        sim.put(a, keys_of(1, 2, 3, 4), PAGE)
        sim.put(b, keys_of(*range(30)), PAGE)
        assert sim.drain()
        waiting, others = RecordingSink(4), RecordingSink(1)
        load = sim.store.load(b"one", a, keys_of(1, 2, 3, 4), waiting)
        sim.runtime.settle()
        assert len(waiting.granted) == 2  # its cap, and it acknowledges nothing
        other = sim.store.load(b"two", b, keys_of(0), others)
        sim.runtime.run_until(lambda: bool(others.granted))
        assert not waiting.is_done
        for sink, one in ((others, other), (waiting, load)):
            while not sink.is_over:
                sim.runtime.run_until(lambda s=sink: bool(s.open_batches) or s.is_over)  # type: ignore[misc]
                for batch in list(sink.open_batches):
                    sink.acked(batch)
                    one.ack(batch)
        assert len(waiting.granted) == 4
        assert not sim.store.loads._queue


def test_engines_that_wait_for_slots_take_turns(tmp_path: Path) -> None:
    """One engine with many loads gets no more slots than another with one."""
    with small_disk(tmp_path) as sim:
        space = sim.namespace()
        sim.put(space, keys_of(*range(60)), PAGE)
        assert sim.drain()
        sim.store.bounds = replace(sim.store.bounds, load_window_bytes=SLOTS * PAGE)
        held = RecordingSink(SLOTS)
        holder = sim.store.load(b"holder", space, keys_of(*range(SLOTS)), held)
        sim.runtime.run_until(lambda: len(held.granted) == SLOTS)

        def want(engine: bytes, numbers: range) -> list[RecordingSink]:
            sinks = [RecordingSink(1) for _ in numbers]
            for number, sink in zip(numbers, sinks, strict=True):
                sim.store.load(engine, space, keys_of(number), sink)
            return sinks

        many, few = want(b"many", range(20, 36)), want(b"few", range(40, 46))
        sim.runtime.hold(READ)
        sim.runtime.settle()
        assert not sim.runtime.waiting(READ)
        freed = 0
        while freed < 8:
            freed += len(held.acked(min(held.open_batches)))
            holder.ack(held.batches - len(held.open_batches) - 1)
        sim.runtime.settle()
        assert sim.runtime.waiting(READ) == freed
        sim.runtime.let_go(READ)
        sim.runtime.settle()
        assert sum(len(sink.granted) for sink in few) == min(6, freed // 2)
        assert sum(len(sink.granted) for sink in many) == freed - min(6, freed // 2)


def test_a_load_that_waits_for_a_large_slot_is_not_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who waits below its own cap is passed over: small loads could starve it for ever."""
    slots = 16
    monkeypatch.setattr("ebbtide.tiers.segments.SEGMENT_BYTES_MIN", slots * PAGE)
    bounds = Bounds.for_capacity(slots * PAGE, write_after_s=0.0)
    with SimStore(
        3,
        slots * PAGE,  # one segment, so slots of one size at a time
        disk_path=str(tmp_path / "d"),
        slab_bytes=64 * PAGE,
        bounds=replace(bounds, load_window_bytes=slots * PAGE),
    ) as sim:
        small, large = sim.namespace("small"), sim.namespace("large")
        sim.put(large, keys_of(1), 2 * PAGE)
        assert sim.drain()
        sim.put(small, keys_of(*range(slots + 1)), PAGE)
        assert sim.drain()
        holders = []
        for numbers in (range(1, 9), range(9, slots + 1)):
            sink = RecordingSink(8)
            holders.append((sink, sim.store.load(b"holder", small, keys_of(*numbers), sink)))
        sim.runtime.run_until(lambda: all(len(sink.granted) == 8 for sink, _ in holders))
        first, second = RecordingSink(1), RecordingSink(1)
        sim.store.load(b"one", large, keys_of(1), first)
        sim.store.load(b"two", small, keys_of(0), second)

        def let_go(number: int) -> None:
            sink, load = holders[number]
            for batch in list(sink.open_batches):
                sink.acked(batch)
                load.ack(batch)

        let_go(0)
        sim.runtime.settle()
        assert not (first.granted)
        assert not (first.failures)
        assert not second.granted
        let_go(1)
        sim.runtime.run_until(lambda: bool(first.granted))


def test_a_load_too_large_for_its_cap_fails_at_once(tmp_path: Path) -> None:
    with small_disk(tmp_path) as sim:
        sim.put(sim.namespace("a"), keys_of(1), 3 * PAGE)
        sim.fairness = rules(a=(0.0, 0.1))
        assert sim.restart()
        assert sim.get(sim.namespace("a"), keys_of(1)) == [Miss.OVER_QUOTA]


# -- the window of an engine's stores -------------------------------------------------------------


def test_an_engine_reserves_no_more_than_its_window_until_it_commits() -> None:
    bounds = Bounds.for_capacity(SLOTS * PAGE, store_window_bytes=4 * PAGE)
    with SimStore(1, SLOTS * PAGE, bounds=bounds) as sim:
        space = sim.namespace()
        grants, reason = sim.store.reserve(b"flood", space, keys_of(*range(9)), PAGE)
        assert (len(grants), reason) == (4, Miss.STORE_SHED)
        assert sim.store.reserve(b"other", space, keys_of(20, 21), PAGE)[1] is None
        assert sim.store.ledger.counts["reserve_shed"] == 1
        assert sim.store.shares(space)["refused"] == {"store_shed": 1}
        sim.store.abort(b"flood", [grants[0].sequence])
        assert sim.fill(space, keys_of(1), grants[1:2], PAGE, b"flood") == bytes(1)
        grants, reason = sim.store.reserve(b"flood", space, keys_of(*range(30, 35)), PAGE)
        assert (len(grants), reason) == (2, Miss.STORE_SHED)
        sim.store.engine_gone(b"flood")
        grants, reason = sim.store.reserve(b"flood", space, keys_of(*range(40, 44)), PAGE)
        assert (len(grants), reason) == (4, None)
        sim.store.engine_gone(b"flood")
        sim.store.engine_gone(b"other")


def test_a_record_larger_than_the_window_can_be_stored() -> None:
    bounds = Bounds.for_capacity(SLOTS * PAGE, store_window_bytes=PAGE)
    with SimStore(1, SLOTS * PAGE, bounds=bounds) as sim:
        assert sim.put(sim.namespace(), keys_of(1, 2), 3 * PAGE) == bytes(2)


# -- rules and reports ----------------------------------------------------------------------------


def test_the_first_rule_that_matches_a_field_holds() -> None:
    quotas = Quotas(Quota(0.1, 0.9), [Rule("model=made-up", Quota(0.2)), Rule("made", Quota(0.3))])
    assert quotas.wanted(descriptor().pairs()) == Quota(0.2)
    assert quotas.wanted([["model", "not made-up"]]) == Quota(0.3)
    assert quotas.wanted([["model", "other"], ["block_size", 16]]) == Quota(0.1, 0.9)
    assert Quotas(NO_QUOTA, [Rule("size=16", Quota(0.3))]).wanted([["block_size", 16]]).floor == 0.3


def test_floors_are_given_as_long_as_they_add_up(caplog: pytest.LogCaptureFixture) -> None:
    quotas = Quotas(Quota(0.4, 0.9))
    for number in (1, 2, 3, 4, 1):
        quotas.give(bytes([number]), [["n", number]])
    floors = [quotas.of(bytes([number]), [["n", number]]).floor for number in (1, 2, 3, 4, 5)]
    assert floors == [0.4, 0.4, pytest.approx(0.2), 0.0, 0.0]
    assert "03 gets a floor of 0.2 instead of 0.4" in caplog.text


def test_shares_are_counted_only_where_somebody_holds_something() -> None:
    shares = Shares(100)
    shares.assign(3, Quota(0.2, 0.5), ordered=True)
    shares.assign(4, NO_QUOTA, ordered=False)
    assert (shares.order(3), shares.order(4), shares.excess(4, 1000)) == (3, 0, 0)
    shares.take(3, 60)
    assert (shares.excess(3, 0), shares.over_cap()) == (10, [3])
    shares.retire(3)
    assert shares.order(3) == 3  # until the last record has gone
    assert (shares.over_cap(), shares.may_lose(3, 60, 4)) == ([], True)
    shares.give(3, 60)
    assert (shares.order(3), dict(shares.used_of)) == (0, {})


def test_stats_say_what_each_namespace_holds_and_may_hold(tmp_path: Path) -> None:
    with small_disk(tmp_path, a=(0.25, 0.5)) as sim:
        a = sim.namespace("a")
        sim.put(a, keys_of(1, 2), 100)
        assert sim.drain()
        assert sim.store.stats()["namespaces"] == {
            a.digest.hex(): {
                "memory_slot_bytes": 2 * PAGE,
                "disk_slot_bytes": 2 * PAGE,
                "floor": 0.25,
                "cap": 0.5,
                "evicted_for_others": {},
                "refused": {},
            }
        }


def test_a_store_with_one_namespace_meets_no_quota(tmp_path: Path) -> None:
    """The defaults: one order of eviction for all, and nothing to give up."""
    with small_disk(tmp_path) as sim:
        space = sim.namespace("a")
        sim.put(space, keys_of(*range(100)), PAGE)
        assert sim.drain()
        for medium in (sim.store.memory.space, sim.store.disk.space if sim.store.disk else None):
            assert medium is not None
            assert [list(c.policy.orders()) for c in medium.classes.values()] == [[0]]
        assert sim.store.shares(space)["refused"].keys() <= {"busy"}
