"""What the device's allocator counts, for Prometheus.

The names are those of vLLM 0.32 with `ebbtide_` for `vllm:`, and the same labels, units and
buckets; preempted requests, evictions and bytes saved are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from ebbtide.allocator.prefix_stats import PrefixCacheStats
    from ebbtide.allocator.residency import Residency

LABELS = ("model_name", "engine")

USAGE = "ebbtide_kv_cache_usage_perc"
QUERIES = "ebbtide_prefix_cache_queries_total"
HITS = "ebbtide_prefix_cache_hits_total"
PREEMPTED_QUERIES = "ebbtide_preempted_prefix_cache_queries_total"
PREEMPTED_HITS = "ebbtide_preempted_prefix_cache_hits_total"
SAVED_BYTES = "ebbtide_prefix_cache_saved_bytes_total"
EVICTIONS = "ebbtide_kv_block_evictions_total"
LIFETIME = "ebbtide_kv_block_lifetime_seconds"
IDLE = "ebbtide_kv_block_idle_before_evict_seconds"
REUSE_GAP = "ebbtide_kv_block_reuse_gap_seconds"

COUNTERS = {
    QUERIES: "Prompt tokens looked up in the prefix cache, without preempted requests.",
    HITS: "Prompt tokens found in the prefix cache, without preempted requests.",
    PREEMPTED_QUERIES: "Tokens that preempted requests looked up when they were admitted again.",
    PREEMPTED_HITS: "Tokens that they found.",
    SAVED_BYTES: "Bytes of KV cache that hits spared computing: hit tokens x bytes per token.",
    EVICTIONS: "Cached blocks that gave their room to another one.",
}
HISTOGRAMS = {
    LIFETIME: "Time from a block's allocation to its eviction. Sampled.",
    IDLE: "Time from a block's last access to its eviction. Sampled.",
    REUSE_GAP: "Time between two accesses of a block, of the last four. Sampled.",
}
RESIDENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip


class AllocatorMetrics:
    """All collectors, registered once per registry; `engine` gives each engine its own series.

    `registry` None means that of prometheus-client. Raises ConfigError without prometheus-client.
    prometheus-client itself raises ValueError for a registry that has them already: `unregister`
    first. Any thread.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        prometheus = _import_prometheus()
        self._registry = prometheus.REGISTRY if registry is None else registry
        self._usage: Gauge = prometheus.Gauge(
            USAGE,
            "Share of the device's blocks that are referenced, 0..1.",
            LABELS,
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self._counters: dict[str, Counter] = {
            name: prometheus.Counter(name, text, LABELS, registry=self._registry)
            for name, text in COUNTERS.items()
        }
        self._histograms: dict[str, Histogram] = {
            name: prometheus.Histogram(
                name, text, LABELS, registry=self._registry, buckets=RESIDENCY_BUCKETS_S
            )
            for name, text in HISTOGRAMS.items()
        }

    def engine(self, model_name: str, engine: int = 0, *, bytes_per_token: int) -> EngineMetrics:
        """The series of one engine, at 0 from now on.

        `bytes_per_token` is the KV cache of one token over all layers and ranks. Raises MisuseError
        when it is negative.
        """
        if bytes_per_token < 0:
            raise MisuseError("a token has no negative size", bytes_per_token=bytes_per_token)
        values = (model_name, str(engine))
        return EngineMetrics(
            self._usage.labels(*values),
            {name: counter.labels(*values) for name, counter in self._counters.items()},
            {name: each.labels(*values) for name, each in self._histograms.items()},
            bytes_per_token,
        )

    def unregister(self) -> None:
        """Take all collectors out of the registry. Engines may go on observing, unseen."""
        for each in (self._usage, *self._counters.values(), *self._histograms.values()):
            self._registry.unregister(each)


class EngineMetrics:
    """The series of one engine; `AllocatorMetrics.engine` makes it."""

    def __init__(
        self,
        usage: Gauge,
        counters: dict[str, Counter],
        histograms: dict[str, Histogram],
        bytes_per_token: int,
    ) -> None:
        self._usage = usage
        self._counters = counters
        self._histograms = histograms
        self._bytes_per_token = bytes_per_token

    def observe(
        self,
        usage: float,
        stats: PrefixCacheStats,
        *,
        evictions: int = 0,
        residencies: Iterable[Residency] = (),
    ) -> None:
        """Add what was counted since the last call. Any thread. O(residencies).

        `usage` is 0..1, `evictions` the number of cached blocks that were handed out again,
        `residencies` what the sampler took.
        """
        self._usage.set(usage)
        for name, count in (
            (QUERIES, stats.queries),
            (HITS, stats.hits),
            (PREEMPTED_QUERIES, stats.preempted_queries),
            (PREEMPTED_HITS, stats.preempted_hits),
            (SAVED_BYTES, stats.hits * self._bytes_per_token),
            (EVICTIONS, evictions),
        ):
            self._counters[name].inc(count)
        for stay in residencies:
            self._histograms[LIFETIME].observe(stay.lifetime_s)
            self._histograms[IDLE].observe(stay.idle_s)
            for gap_s in stay.reuse_gaps_s:
                self._histograms[REUSE_GAP].observe(gap_s)


def _import_prometheus() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            "metrics need prometheus-client",
            next_step="Install it: pip install 'ebbtide[metrics]'",
            cause=str(error),
        ) from error
    return prometheus_client
