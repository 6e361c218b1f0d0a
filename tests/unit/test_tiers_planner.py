"""The plan of what ebbs: pure, and early enough."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.tiers.planner import Candidate, plan_demotions

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

BLOCK = 1000
KEYS = st.lists(st.integers(0, 20), max_size=30)


def candidates(numbers: list[int]) -> list[Candidate]:
    return [Candidate(number, number.to_bytes(4, "big")) for number in numbers]


def plan(
    offered: Iterable[Candidate],
    free_head: Iterable[Candidate],
    budget_bytes: int,
    settled: Set[bytes] = frozenset(),
) -> list[Candidate]:
    return plan_demotions(
        offered,
        free_head,
        budget_bytes,
        record_bytes=lambda key: BLOCK,
        settled=settled.__contains__,
    )


def numbers(chosen: Iterable[Candidate]) -> list[int]:
    return [candidate.block_id for candidate in chosen]


def test_blocks_nearest_to_eviction_come_first_and_the_rest_waits() -> None:
    offered = iter(candidates([1, 2, 3]))
    assert numbers(plan(offered, candidates([8, 9]), 3 * BLOCK)) == [8, 9, 1]
    assert numbers(offered) == [2, 3]  # not looked at: they are there for the next step


def test_what_is_settled_is_never_copied_again() -> None:
    full, settled = candidates([1, 2, 3]), {(2).to_bytes(4, "big")}
    assert numbers(plan(full, full, 9 * BLOCK, settled)) == [1, 3]


def test_p95_nothing_to_do_is_an_empty_plan() -> None:
    assert plan([], [], 0) == []
    offered = iter(candidates([1]))
    assert plan(offered, candidates([2]), 0) == []
    assert numbers(offered) == [1]


def test_records_of_different_sizes_share_one_budget() -> None:
    """It is exceeded by less than one record, or a record larger than it would never ebb."""
    sizes = {1: 300, 2: 5000, 3: 300, 4: 300}
    for budget, chosen in ((1, [1]), (300, [1]), (301, [1, 2]), (5300, [1, 2]), (5301, [1, 2, 3])):
        found = plan_demotions(
            candidates([1, 2, 3, 4]),
            [],
            budget,
            record_bytes=lambda key: sizes[int.from_bytes(key, "big")],
            settled=lambda key: False,
        )
        assert numbers(found) == chosen


@given(full=KEYS, head=KEYS, settled=st.sets(st.integers(0, 20)), budget=st.integers(0, 40_000))
def test_a_plan_is_pure_within_budget_and_names_each_key_once(
    full: list[int], head: list[int], settled: set[int], budget: int
) -> None:
    newly, free = candidates(full), candidates(head)
    known = {number.to_bytes(4, "big") for number in settled}
    before = (list(newly), list(free), set(known))
    left = iter(newly)
    chosen = plan(left, free, budget, known)
    deferred = list(left)
    assert chosen == plan(newly, free, budget, known)
    assert (newly, free, known) == before
    named = [candidate.key for candidate in chosen]
    assert len(set(named)) == len(named)
    assert not known & set(named)
    assert len(chosen) * BLOCK < budget + BLOCK
    assert {c.key for c in newly} - known <= set(named) | {c.key for c in deferred}
    assert newly[len(newly) - len(deferred) :] == deferred  # in order: a prefix stays usable


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
        offered = iter([*deferred, *candidates(newly)])
        settled |= {c.key for c in plan(offered, head, handed_out * BLOCK, settled)}
        deferred = list(offered)
        for _ in range(min(handed_out, len(free))):
            assert free.popleft().key in settled
        free.extend(candidates(newly)[:handed_out])
