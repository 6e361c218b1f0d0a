"""The plan of what ebbs: pure, and early enough."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.tiers.planner import Candidate, plan_demotions

BLOCK = 1000
KEYS = st.lists(st.integers(0, 20), max_size=30)


def candidates(numbers: list[int]) -> list[Candidate]:
    return [Candidate(number, number.to_bytes(4, "big")) for number in numbers]


def test_blocks_nearest_to_eviction_come_first_and_the_rest_waits() -> None:
    plan = plan_demotions(
        candidates([1, 2, 3]),
        candidates([8, 9]),
        3 * BLOCK,
        record_bytes=BLOCK,
        settled=set(),
    )
    assert [c.block_id for c in plan.demote] == [8, 9, 1]
    assert [c.block_id for c in plan.deferred] == [2, 3]


def test_what_is_settled_is_never_copied_again() -> None:
    full, settled = candidates([1, 2, 3]), {(2).to_bytes(4, "big")}
    plan = plan_demotions(full, full, 9 * BLOCK, record_bytes=BLOCK, settled=settled)
    assert [c.block_id for c in plan.demote] == [1, 3]
    assert plan.deferred == []


def test_p95_nothing_to_do_is_an_empty_plan() -> None:
    assert plan_demotions([], [], 0, record_bytes=BLOCK, settled=set()) == ([], [])
    plan = plan_demotions(candidates([1]), [], 0, record_bytes=0, settled=set())
    assert (plan.demote, len(plan.deferred)) == ([], 1)


@given(full=KEYS, head=KEYS, settled=st.sets(st.integers(0, 20)), budget=st.integers(0, 40_000))
def test_a_plan_is_pure_within_budget_and_names_each_key_once(
    full: list[int], head: list[int], settled: set[int], budget: int
) -> None:
    newly, free = candidates(full), candidates(head)
    known = {number.to_bytes(4, "big") for number in settled}
    before = (list(newly), list(free), set(known))
    plan = plan_demotions(newly, free, budget, record_bytes=BLOCK, settled=known)
    assert plan == plan_demotions(newly, free, budget, record_bytes=BLOCK, settled=known)
    assert (newly, free, known) == before
    named = [c.key for c in (*plan.demote, *plan.deferred)]
    assert len(set(named)) == len(named)
    assert not known & set(named)
    assert len(plan.demote) * BLOCK <= budget
    assert {c.key for c in newly} - known <= set(named)
    order = [c.block_id for c in plan.deferred]
    assert order == sorted(order, key=full.index)  # chain order, so a prefix stays usable


@given(
    handed_out=st.integers(1, 6),
    pool=st.integers(6, 40),
    steps=st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=40),
)
def test_a_block_is_planned_before_the_pool_evicts_it(
    handed_out: int, pool: int, steps: list[list[int]]
) -> None:
    """The guarantee, against a pool that hands `handed_out` blocks out per step."""
    free: deque[Candidate] = deque(candidates(list(range(100, 100 + pool))))
    settled: set[bytes] = set()
    deferred: list[Candidate] = []
    for newly in steps:
        head = [free[n] for n in range(min(handed_out, len(free)))]
        plan = plan_demotions(
            [*deferred, *candidates(newly)],
            head,
            handed_out * BLOCK,
            record_bytes=BLOCK,
            settled=settled,
        )
        settled |= {c.key for c in plan.demote}
        deferred = plan.deferred
        for _ in range(min(handed_out, len(free))):
            assert free.popleft().key in settled
        free.extend(candidates(newly)[:handed_out])
