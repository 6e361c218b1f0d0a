"""Sampled stays of blocks, on a clock and a source of randomness that the test owns."""

from __future__ import annotations

import random

import pytest

from ebbtide.allocator.residency import Residency, ResidencySampler
from ebbtide.errors import ConfigError

SECOND = 1_000_000_000


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


def never_drawn() -> float:
    raise AssertionError("drawn for nothing")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sampler(clock: Clock) -> ResidencySampler:
    return ResidencySampler(1.0, clock_ns=clock, draw=lambda: 0.5)


def test_a_stay_has_a_lifetime_an_idle_time_and_gaps(
    sampler: ResidencySampler, clock: Clock
) -> None:
    sampler.allocated(7)
    for seconds in (1, 2, 4):
        clock.pass_s(seconds)
        sampler.accessed(7)
    clock.pass_s(8)
    sampler.evicted(7)
    assert sampler.take() == [Residency(15.0, 8.0, (2.0, 4.0))]
    assert sampler.take() == []


def test_a_block_that_nobody_accessed_was_idle_all_its_life(
    sampler: ResidencySampler, clock: Clock
) -> None:
    sampler.allocated(1)
    clock.pass_s(3)
    sampler.evicted(1)
    sampler.allocated(1)
    clock.pass_s(1)
    sampler.accessed(1)
    sampler.evicted(1)
    assert sampler.take() == [Residency(3.0, 3.0, ()), Residency(1.0, 0.0, ())]


def test_gaps_lie_between_the_last_four_accesses(sampler: ResidencySampler, clock: Clock) -> None:
    sampler.allocated(1)
    for seconds in range(1, 8):
        clock.pass_s(seconds)
        sampler.accessed(1)
    sampler.evicted(1)
    assert sampler.take()[0].reuse_gaps_s == (5.0, 6.0, 7.0)


def test_stays_end_in_their_order_and_blocks_are_told_apart(
    sampler: ResidencySampler, clock: Clock
) -> None:
    sampler.allocated(1)
    clock.pass_s(1)
    sampler.allocated(2)
    clock.pass_s(1)
    sampler.evicted(2)
    sampler.evicted(1)
    sampler.evicted(1)
    assert [stay.lifetime_s for stay in sampler.take()] == [1.0, 2.0]
    assert len(sampler) == 0


def test_blocks_are_followed_with_the_given_probability(clock: Clock) -> None:
    draws = [0.0, 0.2499, 0.25, 0.99]
    sampler = ResidencySampler(0.25, clock_ns=clock, draw=iter(draws).__next__)
    for block_id in range(4):
        sampler.allocated(block_id)
    assert len(sampler) == 2
    for block_id in range(4):
        sampler.accessed(block_id)
        sampler.evicted(block_id)
    assert len(sampler.take()) == 2
    seeded = random.Random(3)
    sampler = ResidencySampler(clock_ns=clock, draw=seeded.random)
    for block_id in range(100_000):
        sampler.allocated(block_id)
    assert 900 < len(sampler) < 1100


def test_only_an_allocation_draws(clock: Clock) -> None:
    sampler = ResidencySampler(0.5, clock_ns=clock, draw=never_drawn)
    sampler.accessed(1)
    sampler.evicted(1)
    assert sampler.take() == []


def test_a_reset_forgets_stays_and_what_was_not_taken(sampler: ResidencySampler) -> None:
    sampler.allocated(1)
    sampler.evicted(1)
    sampler.allocated(2)
    sampler.cleared()
    sampler.evicted(2)
    assert sampler.take() == []


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_other_ratios_are_refused(clock: Clock, ratio: float) -> None:
    with pytest.raises(ConfigError, match="share of blocks"):
        ResidencySampler(ratio, clock_ns=clock, draw=random.random)
