"""The scheduler half alone: what ebbs is copied once, and every pin ends."""

from __future__ import annotations

import pytest
from tests.scripted import RECORD_BYTES, Bench

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion
from ebbtide.connectors.client_interface import CROWDED, LOST
from ebbtide.connectors.offload.demotions import STORE_TRIES
from ebbtide.connectors.offload.scheduler import SchedulerBounds
from ebbtide.connectors.seam import BlockRef, WorkerReport
from ebbtide.tiers.reasons import Miss


def reserved(bench: Bench) -> list[int]:
    """Keys of each reserve that is not answered."""
    return [len(m.keys) for m in bench.client.open(wire.Reserve) if isinstance(m, wire.Reserve)]


def live(bench: Bench) -> None:
    """A request that lives: without one nothing is ever pinned."""
    bench.arrive("live", 5)


def test_p30_a_content_is_reserved_once_however_often_it_is_offered() -> None:
    bench = Bench()
    refs = bench.fill(3)
    bench.step([*refs, *refs, refs[1]])
    assert reserved(bench) == [3]
    bench.step(refs)
    assert reserved(bench) == [3]
    bench.grant(1, 3)
    assert len(bench.step(refs).stores) == 3
    bench.step(refs)
    bench.copied(1, 2, 3)
    bench.step(refs)
    assert bench.commit() == (1, 2, 3)
    bench.step(refs)
    assert not bench.client.asked
    assert not bench.half.has_pending_work()
    bench.finish(refs)
    assert bench.pinned == 0
    bench.pool.check_integrity()


def test_a_block_is_pinned_from_the_question_to_the_order_to_copy() -> None:
    bench = Bench()
    live(bench)
    refs = bench.fill(3)
    bench.step(refs)
    bench.finish(refs)
    assert bench.pinned == 3
    assert bench.half.pins_blocks()
    bench.grant(1, 3)
    assert [job.block_id for job in bench.step().stores] == [ref.block_id for ref in refs]
    assert bench.pinned == 0
    assert not bench.half.pins_blocks()
    assert bench.half.has_pending_work()
    bench.pool.check_integrity()


def test_an_unanswered_reserve_gives_its_pins_back_and_a_late_grant_its_slots() -> None:
    """A store that is stopped must not keep device blocks, nor get more work meanwhile."""
    bench = Bench(bounds=SchedulerBounds(pin_timeout_s=0.1, reserve_timeout_s=1.0))
    live(bench)
    refs = bench.fill(4)
    bench.step(refs)
    bench.finish(refs)
    assert bench.pinned == 4
    bench.now += 0.11
    bench.step()
    assert bench.pinned == 0
    assert bench.half.has_pending_work()  # only the pins are given up
    bench.now += 0.9
    bench.step()
    assert reserved(bench) == [4]
    assert not bench.half.has_pending_work()
    bench.grant(7, 4)
    bench.step()
    assert bench.client.open(wire.Abort) == [wire.Abort((7, 8, 9, 10))]
    assert reserved(bench) == [4]  # asked for again
    assert bench.half.faults.count == 0


def test_a_grant_after_the_pins_copies_what_is_still_there() -> None:
    bench = Bench(blocks=9, bounds=SchedulerBounds(pin_timeout_s=0.1, reserve_timeout_s=1.0))
    live(bench)
    refs = bench.fill(4)
    bench.step(refs)
    bench.finish(refs)
    bench.now += 0.11
    bench.step()
    bench.pool.allocate(5)  # four that were never used, and one of those
    bench.grant(7, 4)
    assert len(bench.step().stores) == 3
    assert bench.half.tally.shed == 1
    assert len(bench.client.open(wire.Abort)) == 1
    assert not bench.half.pins_blocks()
    assert bench.half.faults.count == 0


def test_numbers_of_a_store_that_has_gone_are_never_taken_for_the_next_ones() -> None:
    """Sequences begin anew with every store: the copies of the old one must end first."""
    bench = Bench()
    live(bench)
    refs = bench.fill(6)
    bench.step(refs[:2])
    bench.grant(1, 2)
    assert [job.sequence for job in bench.step(refs[2:4]).stores] == [1, 2]
    bench.grant(3, 2)
    bench.half.matched_tokens("live", 0)
    bench.client.lose()
    bench.client.reach(arena_generation=2)
    # Granted but not given to the worker: let go. Under way in the worker: waited for.
    assert bench.step(refs[4:]).stores == ()
    bench.finish(refs)
    assert bench.pinned == 0
    bench.open_namespace()
    assert not bench.client.open(wire.Reserve)
    bench.half.on_report(WorkerReport(dropped=[1], copied=[2]))
    assert not bench.client.open(wire.Commit)
    assert not bench.client.open(wire.Abort)
    bench.step()
    assert reserved(bench) == [6]
    bench.grant(1, 6)
    assert len(bench.step().stores) == 6
    bench.copied(1, 2, 3, 4, 5, 6)
    assert bench.commit() == (1, 2, 3, 4, 5, 6)
    bench.step()
    assert bench.half.tally.demoted == 6
    assert bench.pinned == 0
    assert bench.half.faults.count == 0


def test_a_new_connection_to_the_same_store_forgets_nothing() -> None:
    bench = Bench()
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    assert len(bench.step().stores) == 2
    bench.client.reach(arena_generation=1)
    bench.open_namespace()
    bench.copied(1, 2)
    bench.commit()
    bench.step()
    assert bench.half.tally.demoted == 2


@pytest.mark.parametrize("same_store", [True, False])
def test_slots_of_a_commit_that_was_lost_go_back_to_the_store_that_has_them(
    same_store: bool,
) -> None:
    """Perhaps the commit never arrived: then the slots would be kept for as long as we live."""
    bench = Bench()
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.copied(1, 2)
    bench.client.lose()
    bench.step()
    assert not bench.client.asked
    bench.client.reach(arena_generation=1 if same_store else 2)
    bench.open_namespace()
    bench.step()
    assert bench.client.open(wire.Abort) == ([wire.Abort((1, 2))] if same_store else [])
    assert bench.half.tally.demoted == 0


def test_slots_that_the_worker_did_not_fill_go_back_to_the_store() -> None:
    bench = Bench()
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.half.on_report(WorkerReport(copied=[1], dropped=[2]))
    assert bench.client.open(wire.Abort) == [wire.Abort((2,))]
    assert bench.commit() == (1,)
    bench.step()
    assert bench.half.tally.demoted == 1
    assert reserved(bench) == [1]  # the other is tried again
    bench.finish(refs)
    assert bench.pinned == 0


def test_a_commit_that_the_store_refuses_is_tried_again() -> None:
    bench = Bench()
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.copied(1, 2)
    bench.client.answer(wire.Commit, wire.Settled(bytes([0, Miss.RESET])))
    bench.step()
    assert bench.half.tally.demoted == 1
    assert reserved(bench) == [1]


@pytest.mark.parametrize("ending", ["no answer", "crowded"])
def test_a_commit_that_is_not_answered_gives_its_slots_back(ending: str) -> None:
    bench = Bench(bounds=SchedulerBounds(commit_timeout_s=1.0))
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.copied(1, 2)
    if ending == "crowded":
        bench.client.answer(wire.Commit, CROWDED)
    bench.now += 1.1
    bench.step()
    assert bench.client.open(wire.Abort) == [wire.Abort((1, 2))]
    assert reserved(bench) == [2]
    if ending == "no answer":
        bench.commit()  # late: it says nothing about what is under way now
    bench.step()
    assert bench.half.tally.demoted == 0
    assert bench.half.faults.count == 0


def test_a_block_that_cannot_be_stored_is_given_up_after_some_tries() -> None:
    """Else an engine without requests would step for ever."""
    bench = Bench()
    refs = bench.fill(1)
    bench.step(refs)
    bench.finish(refs)
    for sequence in range(1, STORE_TRIES + 1):
        bench.grant(sequence, 1)
        assert len(bench.step().stores) == 1
        bench.dropped(sequence)
        bench.client.answer(wire.Abort, wire.Settled(bytes(1)))
        bench.step()
    assert not bench.client.asked
    assert not bench.half.has_pending_work()
    bench.pool.allocate(64)
    bench.step(refs)
    assert bench.half.tally.shed == 1


def test_a_block_that_left_the_device_before_it_ebbed_is_shed() -> None:
    bench = Bench(bounds=SchedulerBounds(store_budget_bytes=RECORD_BYTES))
    refs = bench.fill(4)
    bench.step(refs)
    bench.finish(refs)
    bench.grant(1, 1)
    assert len(bench.step().stores) == 1
    bench.pool.allocate(64)
    bench.step()
    bench.step()
    # One was being copied and one was asked for: those are not shed yet.
    assert bench.half.tally.shed == 2
    bench.client.answer(wire.Reserve, wire.Grants(int(Miss.BUSY), ()))
    bench.step()
    assert bench.half.tally.shed == 3
    bench.dropped(1)
    assert bench.half.tally.shed == 4
    bench.step()
    assert bench.half.tally.shed == 4
    assert not bench.half.has_pending_work()


def test_a_granted_block_that_was_handed_out_meanwhile_is_not_copied() -> None:
    """Without a request nothing is pinned: what a block holds is asked again before the copy."""
    bench = Bench()
    refs = bench.fill(3)
    bench.step(refs)
    bench.finish(refs)
    assert bench.pinned == 0
    bench.pool.allocate(62)  # all that were never used, and one of the three: the last
    bench.grant(1, 3)
    assert [job.sequence for job in bench.step().stores] == [1, 2]
    assert bench.client.open(wire.Abort) == [wire.Abort((3,))]
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


def test_the_backlog_holds_no_more_than_the_pool_while_copies_take_their_time() -> None:
    bench = Bench(blocks=9, bounds=SchedulerBounds(store_open_bytes=4 * RECORD_BYTES))
    first = bench.fill(4, seed=200)
    bench.step(first)
    bench.grant(1, 4)
    bench.step()
    bench.finish(first)
    for round_ in range(40):
        refs = bench.fill(4, seed=round_)
        bench.step(refs)
        bench.finish(refs)
        assert len(bench.half._demotions._backlog) <= 9
    assert bench.half.tally.shed + len(bench.half._demotions._backlog) == 160
    assert not bench.client.open(wire.Reserve)


def test_what_is_computed_anew_is_offered_anew() -> None:
    """Its record was held below once; since then the store, too, may have evicted it."""
    bench = Bench(blocks=9)
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.copied(1, 2)
    bench.commit()
    bench.step(refs)
    assert reserved(bench) == []
    bench.finish(refs)
    taken = bench.pool.allocate(8)  # the device has nothing any more
    bench.pool.free(taken[2:])
    again = bench.fill(2)
    assert [ref.key for ref in again] == [ref.key for ref in refs]
    bench.step(again)
    assert reserved(bench) == [2]
    bench.client.answer(wire.Reserve, wire.Grants(0, ((0, 0), (0, 0))))  # held
    bench.step(again)
    bench.step(again)
    assert reserved(bench) == []
    assert bench.half.tally.shed == 0


def test_with_no_request_alive_every_pin_is_given_back_and_stores_go_on() -> None:
    """Who then resets the device's prefix cache must find every block free."""
    bench = Bench()
    bench.arrive("r", 5)
    refs = bench.fill(6)
    bench.step(refs[:3])
    bench.grant(1, 3)
    bench.half.matched_tokens("r", 0)
    bench.step(refs[3:])
    bench.finish(refs)
    assert bench.pinned == 3
    bench.half.request_finished("r", [])
    assert bench.pinned == 0  # at once, not with the next step
    bench.grant(4, 3)
    assert [job.sequence for job in bench.step().stores] == [4, 5, 6]
    bench.copied(1, 2, 3, 4, 5, 6)
    bench.commit()
    later = bench.fill(2, seed=9)
    bench.step(later)
    bench.finish(later)
    assert bench.pinned == 0
    assert reserved(bench) == [2]
    bench.grant(7, 2)
    assert len(bench.step().stores) == 2
    bench.copied(7, 8)
    bench.commit()
    bench.step()
    assert bench.half.tally.demoted == 8
    assert bench.pool.reset()
    assert bench.half.faults.count == 0


def test_lazily_only_what_nears_its_eviction_ebbs() -> None:
    bench = Bench(lazy=True)
    live(bench)
    refs = bench.fill(4)
    bench.step(refs)
    assert reserved(bench) == []
    bench.finish(refs[:2])
    bench.step()
    assert reserved(bench) == [2]


def test_closing_gives_every_pin_back() -> None:
    bench = Bench()
    live(bench)
    refs = bench.fill(6)
    bench.step(refs[:3])
    bench.grant(1, 3)
    bench.half.matched_tokens("live", 0)
    bench.half._poll()  # granted, not ordered
    bench.half._demotions.plan([BlockRef(*ref) for ref in refs[3:]])
    bench.finish(refs)
    assert bench.pinned == 6
    bench.half.close()
    bench.half.close()
    assert bench.pinned == 0
    assert bench.client.closed
    bench.pool.check_integrity()
