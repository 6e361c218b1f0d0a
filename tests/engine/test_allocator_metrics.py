"""Residency samples, hit rates and buckets of the allocator beside vLLM's own."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.metrics.buckets import histogram_buckets
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.stats import CachingMetrics, SchedulerStats
from vllm.v1.metrics.stats import PrefixCacheStats as TheirStats

from ebbtide.allocator.hit_rate import HitRate
from ebbtide.allocator.log_line import LogLine
from ebbtide.allocator.metrics import RESIDENCY_BUCKETS_S
from ebbtide.allocator.prefix_stats import PrefixCacheStats
from ebbtide.allocator.residency import ResidencySampler


@pytest.fixture(scope="session")
def what_lasts() -> None:
    """No engine is built here: nothing lasts."""


def test_stays_are_sampled_and_measured_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**12
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    drawn = random.Random(1)
    theirs = KVCacheMetricsCollector(0.4)
    ours = ResidencySampler(0.4, clock_ns=lambda: now_ns, draw=drawn.random)
    random.seed(1)  # vLLM draws from the module
    choose = random.Random(2)
    blocks = [KVCacheBlock(number) for number in range(20)]
    ended = 0
    for _ in range(5000):
        now_ns += choose.randrange(10**9)
        block = choose.choice(blocks)
        action = choose.choices(("allocated", "accessed", "evicted", "cleared"), (4, 9, 4, 0.01))[0]
        if action == "cleared":
            theirs.reset()
            ours.cleared()
        else:
            getattr(theirs, f"on_block_{action}")(block)
            getattr(ours, action)(block.block_id)
        expected: list[Any] = theirs.drain_events() if choose.random() < 0.2 else []
        if expected:
            ended += len(expected)
            assert [tuple(stay) for stay in ours.take()] == [
                (event.lifetime_seconds, event.idle_seconds, event.reuse_gaps_seconds)
                for event in expected
            ]
    assert ended > 200


def test_the_hit_rate_is_vllms() -> None:
    choose = random.Random(3)
    theirs, ours = CachingMetrics(), HitRate()
    for _ in range(3000):
        requests = choose.choice((0, 1, 5, 200, 500, 1200))
        queries = requests * choose.randrange(1, 100)
        hits = choose.randint(0, queries)
        reset = choose.random() < 0.01
        theirs.observe(TheirStats(reset=reset, requests=requests, queries=queries, hits=hits))
        ours.observe(PrefixCacheStats(requests, queries, hits, reset=reset))
        assert ours.ratio == theirs.hit_rate
        assert (ours.requests == 0) == theirs.empty


def test_the_buckets_are_vllms() -> None:
    assert list(RESIDENCY_BUCKETS_S) == list(histogram_buckets("kv_cache_residency"))


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.mark.parametrize(("requests", "queries", "hits"), [(0, 0, 0), (3, 1000, 492), (1, 0, 0)])
def test_the_line_is_what_vllm_says_of_the_same_things(
    requests: int, queries: int, hits: int
) -> None:
    lines = Lines()
    loggers = [
        logging.getLogger(name) for name in (LoggingStatLogger.__module__, LogLine.__module__)
    ]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.addHandler(lines)
        each.setLevel(logging.DEBUG)
    try:
        theirs = LoggingStatLogger(VllmConfig(), 7)
        stats = TheirStats(requests=requests, queries=queries, hits=hits)
        theirs.record(SchedulerStats(kv_cache_usage=0.4567, prefix_cache_stats=stats), None)
        theirs.log()
        clock = iter((0.0, 10.0))
        ours = LogLine(clock_s=clock.__next__, engine=7, device=theirs.kv_cache_device)
        ours.observe(PrefixCacheStats(requests, queries, hits))
        assert ours.log_if_due(0.4567)
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.removeHandler(lines)
            each.setLevel(level)
    parts = lines.found[0].split(", ")
    prefix, _, first = parts[0].partition(": ")
    assert first.startswith("Avg prompt throughput")
    assert lines.found[1:] == [f"{prefix}: " + ", ".join(parts[4:])]
