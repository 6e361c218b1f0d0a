"""The allocator's metrics in a real registry."""

from __future__ import annotations

import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ebbtide.allocator import metrics as names
from ebbtide.allocator.metrics import AllocatorMetrics
from ebbtide.allocator.prefix_stats import PrefixCacheStats
from ebbtide.allocator.residency import Residency
from ebbtide.errors import ConfigError, MisuseError

ENGINE = {"model_name": "tiny", "engine": "1"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """What a scrape shows of engine 1, without buckets and creation times."""
    return {
        line.name: line.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for line in family.samples
        if line.labels == ENGINE and not line.name.endswith("_created")
    }


def test_every_series_is_there_before_anything_happened(registry: CollectorRegistry) -> None:
    AllocatorMetrics(registry).engine("tiny", 1, bytes_per_token=1)
    histograms = {f"{name}_{part}" for name in names.HISTOGRAMS for part in ("count", "sum")}
    assert samples(registry) == dict.fromkeys(
        {
            "ebbtide_kv_cache_usage_perc",
            "ebbtide_prefix_cache_queries_total",
            "ebbtide_prefix_cache_hits_total",
            "ebbtide_preempted_prefix_cache_queries_total",
            "ebbtide_preempted_prefix_cache_hits_total",
            "ebbtide_prefix_cache_saved_bytes_total",
            "ebbtide_kv_block_evictions_total",
            *histograms,
        },
        0.0,
    )
    assert set(names.HISTOGRAMS) == {
        "ebbtide_kv_block_lifetime_seconds",
        "ebbtide_kv_block_idle_before_evict_seconds",
        "ebbtide_kv_block_reuse_gap_seconds",
    }


def test_what_is_observed_adds_up_and_usage_does_not(registry: CollectorRegistry) -> None:
    engine = AllocatorMetrics(registry).engine("tiny", 1, bytes_per_token=1024)
    engine.observe(0.75, PrefixCacheStats(2, 100, 64, 1, 50, 48), evictions=3)
    engine.observe(
        0.5,
        PrefixCacheStats(1, 10, 0),
        evictions=1,
        residencies=[Residency(4.0, 1.0, (0.5, 0.25)), Residency(2.0, 2.0, ())],
    )
    assert samples(registry) == {
        "ebbtide_kv_cache_usage_perc": 0.5,
        "ebbtide_prefix_cache_queries_total": 110,
        "ebbtide_prefix_cache_hits_total": 64,
        "ebbtide_preempted_prefix_cache_queries_total": 50,
        "ebbtide_preempted_prefix_cache_hits_total": 48,
        "ebbtide_prefix_cache_saved_bytes_total": 65536,
        "ebbtide_kv_block_evictions_total": 4,
        "ebbtide_kv_block_lifetime_seconds_count": 2,
        "ebbtide_kv_block_lifetime_seconds_sum": 6.0,
        "ebbtide_kv_block_idle_before_evict_seconds_count": 2,
        "ebbtide_kv_block_idle_before_evict_seconds_sum": 3.0,
        "ebbtide_kv_block_reuse_gap_seconds_count": 2,
        "ebbtide_kv_block_reuse_gap_seconds_sum": 0.75,
    }


def test_the_buckets_are_vllms(registry: CollectorRegistry) -> None:
    engine = AllocatorMetrics(registry).engine("tiny", 1, bytes_per_token=1)
    engine.observe(0, PrefixCacheStats(), residencies=[Residency(0.3, 0.3, (0.3,))])
    for name in names.HISTOGRAMS:
        bounds = [
            float(line.labels["le"])
            for family in registry.collect()
            for line in family.samples
            if line.name == f"{name}_bucket"
        ]
        milliseconds = (1, 2, 5, 10, 20, 50, 100, 200, 500)
        seconds = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, float("inf"))
        assert bounds == [*(each / 1000 for each in milliseconds), *seconds]
        for le, count in (("0.2", 0), ("0.5", 1)):
            labels = {**ENGINE, "le": le}
            assert registry.get_sample_value(f"{name}_bucket", labels) == count


def test_engines_count_apart(registry: CollectorRegistry) -> None:
    metrics = AllocatorMetrics(registry)
    metrics.engine("tiny", 1, bytes_per_token=2).observe(0.1, PrefixCacheStats(1, 9, 8))
    metrics.engine("tiny", 0, bytes_per_token=3).observe(0.2, PrefixCacheStats(1, 5, 4))
    assert samples(registry)[names.SAVED_BYTES] == 16
    other = {**ENGINE, "engine": "0"}
    assert registry.get_sample_value(names.SAVED_BYTES, other) == 12


def test_the_registry_of_the_process_is_the_default_and_is_left_clean() -> None:
    metrics = AllocatorMetrics()
    metrics.engine("tiny", 1, bytes_per_token=1)
    with pytest.raises(ValueError, match="Duplicated"):
        AllocatorMetrics()
    assert REGISTRY.get_sample_value(names.USAGE, ENGINE) == 0
    metrics.unregister()
    assert REGISTRY.get_sample_value(names.USAGE, ENGINE) is None
    AllocatorMetrics().unregister()


def test_a_negative_size_is_refused(registry: CollectorRegistry) -> None:
    with pytest.raises(MisuseError):
        AllocatorMetrics(registry).engine("tiny", bytes_per_token=-1)


def test_without_prometheus_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'ebbtide\[metrics\]'"):
        AllocatorMetrics()
