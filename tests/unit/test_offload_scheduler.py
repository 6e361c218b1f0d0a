"""The scheduler half alone: what it says is held, and how it counts."""

from __future__ import annotations

import pytest
from tests.scripted import Bench

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import CROWDED, LOST
from ebbtide.connectors.offload.scheduler import SchedulerBounds
from ebbtide.connectors.seam import LoadResult, StepMetadata, WorkerReport
from ebbtide.tiers.reasons import Miss, Place

M, D = Place.MEMORY, Place.DISK


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 32), (33, 32), (4096, 4096)],
)
def test_p28_a_load_that_brings_more_brings_the_block_of_the_last_token_too(
    length: int, expected: int
) -> None:
    """The engine computes that one token again."""
    bench = Bench(blocks=300)
    bench.arrive("r", length)
    if expected:
        bench.held([M] * (expected // 16))
    assert not bench.client.asked  # nothing is asked about a block that is computed in any case
    assert bench.half.matched_tokens("r", 0) == expected


def test_p28_no_load_brings_the_block_of_the_last_token_alone() -> None:
    bench = Bench()
    bench.arrive("r", 64)
    bench.held([M] * 4)
    assert [bench.half.matched_tokens("r", local) for local in (0, 32, 48, 64)] == [64, 32, 0, 0]
    bench.half.on_allocated("r", [range(1, 5)], 48, 0)
    assert +bench.half.tally.blocks_by_source == {"device": 3}
    assert +bench.half.tally.misses == {"last_token": 1}


def test_p28_the_block_of_the_last_token_has_a_reason_of_its_own_when_it_was_asked_for() -> None:
    bench = Bench()
    bench.arrive("r", 64)
    bench.held([M] * 3 + [Miss.EVICTED])
    assert bench.half.matched_tokens("r", 0) == 48
    bench.half.on_allocated("r", [range(1, 5)], 0, 48)
    assert bench.half.misses_by_reason("r") == {"evicted": 1}


@pytest.mark.parametrize("local", [0, 16, 32, 48])
@pytest.mark.parametrize(
    ("hit_tokens", "expected"), [(0, 0), (1, 0), (15, 0), (16, 16), (17, 16), (31, 16), (33, 32)]
)
def test_p27_only_whole_blocks_are_reported(hit_tokens: int, expected: int, local: int) -> None:
    bench = Bench()
    names = bench.arrive("r", 64 + 1)
    bench.held([M if (n + 1) * 16 <= hit_tokens else Miss.NEVER_SEEN for n in range(len(names))])
    assert bench.half.matched_tokens("r", local) == max(0, expected - local)


def test_p21_a_hit_ends_at_the_first_block_that_nobody_holds() -> None:
    bench = Bench()
    bench.arrive("r", 16 * 8 + 1)
    bench.held([M, M, D, Miss.EVICTED, M, D, M, M])
    assert bench.half.matched_tokens("r", 0) == 48
    assert bench.half.matched_tokens("r", 16) == 32
    assert bench.half.matched_tokens("r", 64) == 64  # what the device holds needs nobody below


def test_an_answer_that_is_late_is_none_first_and_a_value_then() -> None:
    bench = Bench()
    bench.arrive("r", 65)
    for _ in range(5):
        assert bench.half.matched_tokens("r", 0) is None
        bench.now += 0.005
    bench.held([M] * 4)
    assert [bench.half.matched_tokens("r", 0) for _ in range(100)] == [64] * 100
    assert len(bench.client.asked) == 0


def test_a_lookup_without_answer_is_a_miss_by_timeout() -> None:
    bench = Bench(bounds=SchedulerBounds(lookup_timeout_s=0.05))
    bench.arrive("r", 65)
    assert bench.half.matched_tokens("r", 0) is None
    bench.now += 0.051
    assert bench.half.matched_tokens("r", 0) == 0
    bench.half.on_allocated("r", [range(1, 6)], 0, 0)
    assert bench.half.misses_by_reason("r") == {
        "timeout": 1,
        "behind_miss": 3,
        "partial_block": 1,
    }
    bench.held([M] * 4)  # too late for this admission, and no harm
    bench.step()
    assert bench.half.faults.count == 0


def test_blocks_that_somebody_is_putting_are_waited_for_within_the_same_bound() -> None:
    bench = Bench()
    bench.arrive("r", 65)
    bench.held([M, Place.PENDING, M, M])
    assert bench.half.matched_tokens("r", 0) is None
    bench.held([M, M, M, M])
    assert bench.half.matched_tokens("r", 0) == 64
    bench.arrive("s", 65)
    bench.held([M, Place.PENDING, M, M])
    assert bench.half.matched_tokens("s", 0) is None
    bench.now += 1
    bench.held([M, Place.PENDING, M, M])
    assert bench.half.matched_tokens("s", 0) == 16


@pytest.mark.parametrize("failure", [LOST, CROWDED])
def test_a_store_that_goes_away_is_a_miss_at_once(failure: wire.Failure) -> None:
    """Also when it never comes back: the request is not asked about again and again."""
    bench = Bench()
    bench.arrive("r", 65)
    assert bench.half.matched_tokens("r", 0) is None
    bench.client.answer(wire.Lookup, failure)
    assert bench.half.matched_tokens("r", 0) == 0
    assert bench.half.matched_tokens("r", 0) == 0
    assert not bench.client.asked
    bench.half.on_allocated("r", [range(1, 6)], 0, 0)
    assert bench.half.misses_by_reason("r")["unknown"] == 1
    bench.arrive("s", 65)
    assert bench.half.matched_tokens("s", 0) == (0 if failure is LOST else None)


def test_p84_every_token_and_block_is_counted_once() -> None:
    bench = Bench(block_size=8, blocks=400)
    bench.arrive("r", 1000)
    for _ in range(5):  # asked five times, counted once
        assert bench.half.matched_tokens("r", 600) is None
    bench.held([M] * 80 + [D] * 20 + [Miss.EVICTED] + [Miss.NEVER_SEEN] * 24)
    assert bench.half.matched_tokens("r", 600) == 200
    bench.half.on_allocated("r", [range(1, 126)], 600, 200)
    assert bench.half.tally.requests == 0  # not before the load has ended
    (job,) = bench.step().loads
    assert (len(job.keys), job.block_ids) == (25, tuple(range(76, 101)))
    sources = ("memory",) * 5 + ("disk",) * 20
    bench.half.on_report(WorkerReport(loads=[LoadResult("r", 25, sources)]))
    # Preempted and admitted again, with a load: nothing of that counts.
    bench.half.matched_tokens("r", 0)
    bench.held([M] * 125)
    assert bench.half.matched_tokens("r", 0) == 1000
    bench.half.on_allocated("r", [range(1, 126)], 0, 1000)
    bench.step()
    bench.half.on_report(WorkerReport(loads=[LoadResult("r", 125, ("memory",) * 125)]))
    bench.half.request_finished("r", [])
    # A load of 160 tokens that fails.
    bench.arrive("s", 250)
    bench.held([M] * 20 + [Miss.NEVER_SEEN] * 11)
    assert bench.half.matched_tokens("s", 0) == 160
    bench.half.on_allocated("s", [range(1, 33)], 0, 160)
    bench.step()
    bench.half.on_report(WorkerReport(loads=[LoadResult("s", 0, ("io_error",) + ("disk",) * 19)]))
    tally = bench.half.tally
    assert (tally.requests, tally.prompt_tokens, tally.prompt_blocks) == (2, 1250, 125 + 32)
    assert +tally.tokens_by_source == {"device": 600, "memory": 40, "disk": 160, "computed": 450}
    assert +tally.misses == {
        "evicted": 1,
        "never_seen": 1,
        "io_error": 1,
        "behind_miss": 24 + 10 + 19,
        "partial_block": 1,
    }
    assert sum(tally.misses.values()) + (600 + 40 + 160) // 8 == tally.prompt_blocks
    assert bench.half.faults.count == 0


def test_p95_the_cheapest_tier_serves_each_block_and_an_empty_step_is_no_work() -> None:
    bench = Bench()
    bench.arrive("r", 161)
    bench.held([M] * 8 + [D] * 2)
    assert bench.half.matched_tokens("r", 0) == 160
    assert bench.step([]) == StepMetadata(arena_generation=1, namespace=0)
    assert not bench.client.asked


def test_a_handle_is_worth_nothing_at_another_store() -> None:
    """There the same number may mean another model's blocks, under the same keys."""
    bench = Bench()
    names = bench.arrive("r", 65)
    bench.held([M] * 4)
    bench.step()
    bench.client.reach(arena_generation=2)  # and a fault keeps the half from noticing
    bench.half.request_finished("r", names)
    assert not bench.client.told
    bench.arrive("s", 65)
    assert not bench.client.open(wire.Lookup)
    assert bench.half.matched_tokens("s", 0) == 0
    bench.client.answer(wire.OpenNamespace, wire.NamespaceOpened(7, b"d" * 32, 0, 0))
    assert bench.half.matched_tokens("s", 0) is None
    (lookup,) = bench.client.open(wire.Lookup)
    assert isinstance(lookup, wire.Lookup)
    assert lookup.namespace == 7


def test_p70_which_rank_copies_without_locked_memory_is_known() -> None:
    bench = Bench(ranks=2, writers={0: 2})
    before = bench.half.tally.mark()
    bench.half.on_report(WorkerReport(0, pinned=True))
    bench.half.on_report(WorkerReport(1))  # nothing is known of it yet
    assert bench.half.tally.pinned == {0: True}
    assert bench.half.tally.mark() != before
    bench.half.on_report(WorkerReport(1, pinned=False))
    assert bench.half.tally.pinned == {0: True, 1: False}
