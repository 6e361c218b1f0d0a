"""What the connector counts, on vLLM's own periodic log line and `/metrics`.

Both halves hand vLLM deltas; vLLM adds up the ranks and the halves, carries the plain data to its
API processes and observes it there. `METRICS` is the one place that says which metrics exist;
everything else follows from it. The halves and the API process may be of different age: what one
does not know of the other's data it ignores, because a counter must never cost a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

LOADED_TIERS = (label(Place.MEMORY), label(Place.DISK), label(Place.REMOTE))
HIT_TIERS = ("device", *LOADED_TIERS)  # with the engine's own pool, so hits and misses add up

REQUESTS = "ebbtide_requests_total"
PROMPT_BLOCKS = "ebbtide_prompt_blocks_total"
HIT_BLOCKS = "ebbtide_hit_blocks_total"
HIT_TOKENS = "ebbtide_hit_tokens_total"
MISS_BLOCKS = "ebbtide_miss_blocks_total"
MOVED_BYTES = "ebbtide_moved_bytes_total"
DEMOTED_BLOCKS = "ebbtide_demoted_blocks_total"
SHED_BLOCKS = "ebbtide_shed_blocks_total"
LOADS = "ebbtide_loads_total"
LOAD_CHOICES = "ebbtide_load_choices_total"
FAULTS = "ebbtide_faults_total"
CONNECTED = "ebbtide_connected"
PINNED = "ebbtide_memory_pinned"
LOAD_RATE = "ebbtide_load_bytes_per_second"
PREFILL_RATE = "ebbtide_prefill_tokens_per_second"
PREDICTION_ERROR = "ebbtide_load_prediction_error_ratio"

NO_LABEL = ""  # the label value of a metric without a label of its own


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its full name, and its own label with every value that it can have."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    label: str | None = None
    values: tuple[str, ...] = (NO_LABEL,)


METRICS: tuple[Metric, ...] = (
    Metric(REQUESTS, "counter", "Requests whose whole prompt is accounted for."),
    Metric(PROMPT_BLOCKS, "counter", "Blocks of those prompts, the last, partly filled included."),
    Metric(HIT_BLOCKS, "counter", "Prompt blocks served, by tier.", "tier", HIT_TIERS),
    Metric(HIT_TOKENS, "counter", "Prompt tokens served, by tier.", "tier", HIT_TIERS),
    Metric(
        MISS_BLOCKS,
        "counter",
        "Prompt blocks that had to be computed, by reason.",
        "reason",
        tuple(label(reason) for reason in Miss),
    ),
    Metric(
        MOVED_BYTES,
        "counter",
        "Bytes copied between device blocks and the arena.",
        "edge",
        ("device_to_memory", "memory_to_device"),
    ),
    Metric(DEMOTED_BLOCKS, "counter", "Device blocks whose record was committed to the store."),
    Metric(SHED_BLOCKS, "counter", "Device blocks evicted before they could be stored."),
    Metric(
        LOADS,
        "counter",
        "Loads that ended: all blocks, some or none came.",
        "outcome",
        ("loaded", "partly", "failed"),
    ),
    Metric(
        LOAD_CHOICES,
        "counter",
        "What was chosen for held blocks: load, compute, or load to measure.",
        "choice",
        ("load", "compute", "probe"),
    ),
    Metric(
        FAULTS,
        "counter",
        "Faults of the connector that cost cache hits, by half.",
        "half",
        ("scheduler", "worker"),
    ),
    Metric(CONNECTED, "gauge", "1 while the store answers, 0 while it does not."),
    Metric(PINNED, "gauge", "1: all ranks copy through locked memory. 0: one does not, or no GPU."),
    Metric(LOAD_RATE, "gauge", "Measured load rate; 0 until measured.", "tier", LOADED_TIERS),
    Metric(PREFILL_RATE, "gauge", "Measured prompt computation rate; 0 until measured."),
    Metric(PREDICTION_ERROR, "gauge", "Mean |predicted - measured| / measured of load times."),
)

Values = dict[str, dict[str, float]]
"""Metric name -> value of its own label (`NO_LABEL` if it has none) -> number."""


@dataclass
class EbbtideStats(KVConnectorStats):  # type: ignore[misc]
    """What one half counted since its last report.

    `data` is `{"counters": Values, "gauges": Values}`: plain dicts, strings, ints and floats. It is
    copied when an object is built, so `EbbtideStats(other.data)` shares nothing. What is not of
    this form, is no finite number or, for counters, not above zero, is left out.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = {
            "counters": _numbers(self.data, "counters", lambda number: number > 0),
            "gauges": _numbers(self.data, "gauges", lambda _: True),
        }

    @classmethod
    def of(
        cls,
        counters: Mapping[str, Mapping[str, float]],
        gauges: Mapping[str, Mapping[str, float]] | None = None,
    ) -> EbbtideStats:
        """Stats from counters' deltas (see `Deltas`) and gauges' values, formed like `Values`."""
        return cls({"counters": counters, "gauges": gauges or {}})

    @property
    def counters(self) -> Values:
        """The counters' deltas."""
        return self.data["counters"]  # type: ignore[no-any-return]

    @property
    def gauges(self) -> Values:
        """The gauges' values."""
        return self.data["gauges"]  # type: ignore[no-any-return]

    def aggregate(self, other: KVConnectorStats) -> EbbtideStats:
        """Add `other` to this object and return this object; `other` stays as it is.

        Counters add up. Of a gauge the last value wins, `other`'s: vLLM aggregates the ranks in
        their order, then the scheduler half, then the steps in time. So only one half may report a
        gauge, and if all ranks do, the highest one's value is seen.
        """
        added = EbbtideStats(other.data)
        for name, values in added.counters.items():
            mine = self.counters.setdefault(name, {})
            for value, number in values.items():
                mine[value] = mine.get(value, 0) + number
        for name, values in added.gauges.items():
            self.gauges.setdefault(name, {}).update(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of the periodic log line; those of trouble only when there is some."""
        tokens, loads = self.counters.get(HIT_TOKENS, {}), self.counters.get(LOADS, {})
        line = {f"tokens_from_{tier}": tokens.get(tier, 0) for tier in LOADED_TIERS}
        line["blocks_stored"] = sum(self.counters.get(DEMOTED_BLOCKS, {}).values())
        line["loads_failed"] = loads.get("failed", 0)
        trouble = {
            "loads_partly": loads.get("partly", 0),
            "faults": sum(self.counters.get(FAULTS, {}).values()),
        }
        line |= {name: count for name, count in trouble.items() if count}
        if self.gauges.get(CONNECTED, {}).get(NO_LABEL) == 0:
            line["connected"] = 0
        return line

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "gauges": {}}

    def is_empty(self) -> bool:
        """Whether there is nothing to report: no counter moved, no gauge was set."""
        return not self.counters and not self.gauges


class Deltas:
    """Turns running totals into what was added since the last call."""

    def __init__(self) -> None:
        self._last: Values = {}

    def since(self, totals: Mapping[str, Mapping[str, float]]) -> Values:
        """What each total has grown by; without those that have not.

        A total below the last one has started again at zero, so all of it is new. One that is
        absent is remembered: it has not changed.
        """
        grown: Values = {}
        for name, values in totals.items():
            last = self._last.setdefault(name, {})
            for value, total in values.items():
                before = last.get(value, 0)
                delta = total - before if total >= before else total
                last[value] = total
                if delta:
                    grown.setdefault(name, {})[value] = delta
        return grown


class EbbtidePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`METRICS` on vLLM's registry, each with vLLM's labels and its own.

    Every series of every engine exists from the start, at 0. Built once per API process and once
    per engine object within a process; like vLLM's own metrics, the newest takes the place of
    those before it.
    """

    _registered: ClassVar[list[Counter | Gauge]] = []

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._unregister_earlier()
        self._counters: dict[tuple[int, str, str], Any] = {}
        self._gauges: dict[tuple[int, str, str], Any] = {}
        for metric in METRICS:
            family = self._create(metric)
            series = self._counters if metric.kind == "counter" else self._gauges
            for engine, labelvalues in per_engine_labelvalues.items():
                for value in metric.values:
                    own = [] if metric.label is None else [value]
                    # No set(0): it would be newer than what another API process has set.
                    series[engine, metric.name, value] = family.labels(*labelvalues, *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's deltas, set its gauges; ignore unknown names, labels and engines."""
        stats = EbbtideStats(transfer_stats_data)
        for name, values in stats.counters.items():
            for value, number in values.items():
                counter = self._counters.get((engine_idx, name, value))
                if counter is not None:
                    counter.inc(number)
        for name, values in stats.gauges.items():
            for value, number in values.items():
                gauge = self._gauges.get((engine_idx, name, value))
                if gauge is not None:
                    gauge.set(number)

    def _create(self, metric: Metric) -> Any:
        arguments: dict[str, Any] = {
            "name": metric.name,  # the client takes the _total of a counter off and puts it back
            "documentation": metric.description,
            "labelnames": [*self._labelnames, *([] if metric.label is None else [metric.label])],
        }
        if metric.kind == "counter":
            family = self._counter_cls(**arguments)
        else:  # the mode of vLLM's own gauges: of several API processes, who set it last
            family = self._gauge_cls(**arguments, multiprocess_mode="mostrecent")
        if isinstance(family, Counter | Gauge):  # Ray's have no registry
            self._registered.append(family)
        return family

    @classmethod
    def _unregister_earlier(cls) -> None:
        """vLLM takes an earlier engine's metrics off the registry, but only those named vllm:*."""
        while cls._registered:
            with suppress(KeyError):  # someone else already took it off
                REGISTRY.unregister(cls._registered.pop())


def _numbers(data: object, section: str, keep: Callable[[float], bool]) -> Values:
    """A copy of one section of foreign data: only what has the form of `Values`."""
    names = data.get(section) if isinstance(data, Mapping) else None
    found: Values = {}
    for name, values in names.items() if isinstance(names, Mapping) else ():
        if not isinstance(name, str) or not isinstance(values, Mapping):
            continue
        numbers = {
            str(value): int(number) if isinstance(number, Integral) else float(number)
            for value, number in values.items()
            if isinstance(value, str)
            and isinstance(number, Real)
            and math.isfinite(number)
            and keep(float(number))
        }
        if numbers:
            found[str(name)] = numbers
    return found
