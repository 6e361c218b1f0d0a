"""The scheduler half alone: what ebbs is copied once, and every pin ends."""

from __future__ import annotations

from tests.scripted import Bench

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.offload.demotions import STORE_TRIES
from ebbtide.connectors.offload.scheduler import SchedulerBounds
from ebbtide.connectors.seam import WorkerReport


def test_p30_a_content_is_reserved_once_however_often_it_is_offered() -> None:
    bench = Bench()
    refs = bench.fill(3)
    bench.step([*refs, *refs, refs[1]])
    (reserve,) = bench.client.open(wire.Reserve)
    assert isinstance(reserve, wire.Reserve)
    assert len(reserve.keys) == 3
    bench.step(refs)
    assert len(bench.client.open(wire.Reserve)) == 1
    bench.grant(1, 3)
    assert len(bench.step(refs).stores) == 3
    bench.step(refs)
    bench.half.on_report(WorkerReport(stored=[1, 2, 3]))
    bench.step(refs)
    assert not bench.client.asked
    bench.finish(refs)
    assert bench.pinned == 0
    bench.pool.check_integrity()


def test_an_unanswered_reserve_gives_its_pins_back_and_a_late_grant_its_slots() -> None:
    """A store that is stopped must not keep device blocks, nor get more work meanwhile."""
    bench = Bench(bounds=SchedulerBounds(store_timeout_s=1.0))
    refs = bench.fill(4)
    bench.step(refs)
    bench.finish(refs)
    assert bench.pinned == 4
    bench.now += 1.01
    bench.step()
    assert bench.pinned == 0
    assert len(bench.client.open(wire.Reserve)) == 1
    assert not bench.half.has_pending_work()
    bench.grant(7, 4)
    bench.step()
    assert bench.client.open(wire.Abort) == [wire.Abort((7, 8, 9, 10))]
    assert len(bench.client.open(wire.Reserve)) == 1  # asked for again
    assert bench.half.faults.count == 0


def test_numbers_of_a_store_that_has_gone_are_never_taken_for_the_next_ones() -> None:
    """Sequences begin anew with every store: the copies of the old one must end first."""
    bench = Bench()
    refs = bench.fill(6)
    bench.step(refs[:2])
    bench.grant(1, 2)
    assert [job.sequence for job in bench.step(refs[2:4]).stores] == [1, 2]
    bench.grant(3, 2)
    bench.half.matched_tokens("nobody", 0)
    bench.client.lose()
    bench.client.reach(arena_generation=2)
    # Granted but not given to the worker: let go. Under way in the worker: pinned.
    assert bench.step(refs[4:]).stores == ()
    bench.finish(refs)
    assert bench.pinned == 2
    bench.open_namespace()
    assert not bench.client.open(wire.Reserve)
    bench.half.on_report(WorkerReport(dropped=[1], stored=[2]))
    assert bench.half.tally.demoted == 0
    assert bench.pinned == 0
    assert not bench.client.open(wire.Abort)
    bench.step()
    (reserve,) = bench.client.open(wire.Reserve)
    assert isinstance(reserve, wire.Reserve)
    assert len(reserve.keys) == 6
    bench.grant(1, 6)
    assert len(bench.step().stores) == 6
    bench.half.on_report(WorkerReport(stored=[1, 2, 3, 4, 5, 6]))
    assert bench.half.tally.demoted == 6
    assert bench.pinned == 0


def test_a_new_connection_to_the_same_store_forgets_nothing() -> None:
    bench = Bench()
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    assert len(bench.step().stores) == 2
    bench.client.reach(arena_generation=1)
    bench.open_namespace()
    bench.half.on_report(WorkerReport(stored=[1, 2]))
    assert bench.half.tally.demoted == 2


def test_slots_that_the_worker_did_not_fill_go_back_to_the_store() -> None:
    bench = Bench()
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.half.on_report(WorkerReport(stored=[1], dropped=[2]))
    assert bench.client.open(wire.Abort) == [wire.Abort((2,))]
    bench.finish(refs)
    assert bench.pinned == 0


def test_a_block_that_cannot_be_stored_is_given_up_after_some_tries() -> None:
    """Else an engine without requests would step for ever."""
    bench = Bench()
    refs = bench.fill(1)
    bench.step(refs)
    bench.finish(refs)
    for sequence in range(1, STORE_TRIES + 1):
        bench.grant(sequence, 1)
        assert len(bench.step().stores) == 1
        bench.half.on_report(WorkerReport(dropped=[sequence]))
        bench.client.answer(wire.Abort, wire.Settled(bytes(1)))
        bench.step()
    assert not bench.client.asked
    assert not bench.half.has_pending_work()
    bench.pool.allocate(64)
    assert bench.half.tally.shed == 1


def test_the_backlog_holds_no_more_than_the_pool_while_no_store_answers() -> None:
    bench = Bench(blocks=9)
    bench.client.lose()
    bench.client.completions.append(Completion(999, LOST, True))
    for round_ in range(40):
        refs = bench.fill(4, seed=round_)
        bench.step(refs)
        bench.step(refs)
        bench.finish(refs)
    assert len(bench.half._demotions._backlog) <= 8
    assert not bench.client.asked
    assert not bench.half.has_pending_work()


def test_closing_gives_every_pin_back() -> None:
    bench = Bench()
    refs = bench.fill(6)
    bench.step(refs[:3])
    bench.grant(1, 3)
    bench.step(refs[3:])
    bench.finish(refs)
    assert bench.pinned == 6
    bench.half.close()
    bench.half.close()
    assert bench.pinned == 0
    assert bench.client.closed
    bench.pool.check_integrity()
