"""The hit rate of the most recent requests, and the line that tells it."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.allocator.hit_rate import HitRate
from ebbtide.allocator.log_line import LogLine
from ebbtide.allocator.prefix_stats import PrefixCacheStats
from ebbtide.errors import ConfigError, MisuseError


def update(requests: int, queries: int, hits: int, *, reset: bool = False) -> PrefixCacheStats:
    return PrefixCacheStats(requests, queries, hits, reset=reset)


def test_without_queries_the_rate_is_0() -> None:
    rate = HitRate()
    assert (rate.requests, rate.ratio) == (0, 0.0)
    rate.observe(update(1, 0, 0))
    assert (rate.requests, rate.ratio) == (1, 0.0)


def test_the_rate_is_of_tokens_and_not_of_updates() -> None:
    rate = HitRate()
    rate.observe(update(1, 100, 0))
    rate.observe(update(1, 900, 600))
    assert rate.ratio == 0.6


def test_whole_updates_leave_beyond_1000_requests() -> None:
    rate = HitRate()
    rate.observe(update(400, 1000, 1000))
    rate.observe(update(600, 1000, 0))
    assert (rate.requests, rate.ratio) == (1000, 0.5)
    rate.observe(update(1, 1000, 0))
    assert (rate.requests, rate.ratio) == (601, 0.0)


def test_the_newest_update_stays_however_large() -> None:
    rate = HitRate()
    rate.observe(update(3, 10, 10))
    rate.observe(update(5000, 40, 10))
    assert (rate.requests, rate.ratio) == (5000, 0.25)
    rate.observe(update(1, 10, 10))
    assert (rate.requests, rate.ratio) == (1, 1.0)


def test_updates_without_requests_push_nothing_out() -> None:
    rate = HitRate(1)
    rate.observe(update(1, 10, 5))
    rate.observe(update(0, 0, 0))
    rate.observe(PrefixCacheStats(preempted_requests=1, preempted_queries=10))
    assert (rate.requests, rate.ratio) == (1, 0.5)


def test_a_reset_empties_the_window_before_its_update_counts() -> None:
    rate = HitRate()
    rate.observe(update(1, 10, 10))
    rate.observe(update(1, 10, 5, reset=True))
    assert (rate.requests, rate.ratio) == (1, 0.5)
    rate.observe(update(0, 0, 0, reset=True))
    assert (rate.requests, rate.ratio) == (0, 0.0)


UPDATES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 50), st.integers(0, 50), st.booleans())
)


@given(UPDATES)
def test_the_window_is_the_longest_tail_that_fits_or_the_last_update(
    updates: list[tuple[int, int, int, bool]],
) -> None:
    rate = HitRate(10)
    seen: list[tuple[int, int, int]] = []
    for requests, queries, hits, resets in updates:
        reset = resets and queries % 5 == 0
        rate.observe(update(requests, queries, hits, reset=reset))
        seen = ([] if reset else seen) + ([(requests, queries, hits)] if requests else [])
        tail = seen
        while len(tail) > 1 and sum(each[0] for each in tail) > 10:
            tail = tail[1:]
        total = sum(each[1] for each in tail)
        assert rate.requests == sum(each[0] for each in tail)
        assert rate.ratio == (sum(each[2] for each in tail) / total if total else 0)


def test_a_window_without_requests_is_refused() -> None:
    with pytest.raises(MisuseError):
        HitRate(0)


# The line.


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="ebbtide.allocator.log_line")
    return caplog


def test_the_line_has_vllms_words(clock: Clock, lines: pytest.LogCaptureFixture) -> None:
    line = LogLine(clock_s=clock)
    other = LogLine(clock_s=clock, engine=12, device="CPU")
    clock.now_s += 10
    assert line.log_if_due(0.46)
    other.observe(update(3, 1000, 492))
    assert other.log_if_due(1.0)
    assert lines.messages == [
        "Engine 000: GPU KV cache usage: 46.0%",
        "Engine 012: CPU KV cache usage: 100.0%, Prefix cache hit rate: 49.2%",
    ]


def test_the_line_comes_once_per_interval(clock: Clock, lines: pytest.LogCaptureFixture) -> None:
    line = LogLine(clock_s=clock, interval_s=2.5)
    said = []
    for _ in range(12):
        clock.now_s += 0.5
        said.append(line.log_if_due(0.5))
    assert said == [False] * 4 + [True] + [False] * 4 + [True] + [False] * 2
    assert len(lines.messages) == 2


def test_an_idle_engine_falls_silent(clock: Clock, lines: pytest.LogCaptureFixture) -> None:
    line = LogLine(clock_s=clock)

    def next_level(usage: float) -> int:
        clock.now_s += 10
        assert line.log_if_due(usage)
        return lines.records[-1].levelno

    line.observe(update(1, 10, 5))
    assert next_level(0.5) == logging.INFO
    assert next_level(0.5) == logging.INFO
    assert next_level(0.5) == logging.DEBUG
    assert next_level(0.6) == logging.INFO  # a running request took blocks
    assert next_level(0.6) == logging.INFO
    assert next_level(0.6) == logging.DEBUG
    line.observe(PrefixCacheStats(preempted_requests=1))
    assert next_level(0.6) == logging.INFO


@pytest.mark.parametrize("interval_s", [0, -1, float("nan")])
def test_other_intervals_are_refused(clock: Clock, interval_s: float) -> None:
    with pytest.raises(ConfigError, match="interval"):
        LogLine(clock_s=clock, interval_s=interval_s)
