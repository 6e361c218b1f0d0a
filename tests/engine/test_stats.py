"""The connector's counters on vLLM's own classes and a real Prometheus registry."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from tests.scripted import Bench
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from ebbtide.connectors.offload.load_or_compute import LoadOrCompute
from ebbtide.connectors.seam import WorkerReport
from ebbtide.connectors.vllm import stats as names
from ebbtide.connectors.vllm.counting import numbers
from ebbtide.connectors.vllm.stats import (
    METRICS,
    NO_LABEL,
    Deltas,
    EbbtidePromMetrics,
    EbbtideStats,
)
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
TYPES: dict[type[Any], type[Any]] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


class CountingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """As much of a connector as vLLM's metrics look at; never built."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        raise NotImplementedError

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EbbtideStats:
        return EbbtideStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> EbbtidePromMetrics:
        return EbbtidePromMetrics(*arguments)


CHILD = {
    "kv_connector": "CountingConnector",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}


@pytest.fixture
def clean_registry() -> Iterator[None]:
    yield
    EbbtidePromMetrics._unregister_earlier()
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("ebbtide")]


@pytest.fixture
def registered() -> Iterator[None]:
    """The name that MultiConnector rebuilds a child's stats by."""
    KVConnectorFactory.register_connector("CountingConnector", __name__, "CountingConnector")
    yield
    del KVConnectorFactory._registry["CountingConnector"]


@pytest.fixture
def metrics(clean_registry: None) -> EbbtidePromMetrics:
    return EbbtidePromMetrics(VllmConfig(), TYPES, LABELS, ENGINES)


def sample(name: str, engine: int = 0, **own: str) -> float | None:
    labels = {"model_name": "tiny", "engine": str(engine), **own}
    value: float | None = REGISTRY.get_sample_value(name, labels)
    return value


def every_sample() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All our series with their values, but those that say when a counter was created."""
    return {
        (line.name, tuple(sorted(line.labels.items()))): line.value
        for family in REGISTRY.collect()
        for line in family.samples
        if line.name.startswith("ebbtide") and not line.name.endswith("_created")
    }


def some_stats() -> EbbtideStats:
    return EbbtideStats.of(
        {
            names.REQUESTS: {NO_LABEL: 2},
            names.HIT_TOKENS: {"memory": 2016, "disk": 32, "device": 64},
            names.LOADS: {"loaded": 1, "failed": 1},
            names.DEMOTED_BLOCKS: {NO_LABEL: 63},
        },
        {names.CONNECTED: {NO_LABEL: True}, names.LOAD_RATE: {"memory": 2.5e9}},
    )


# The table.


def test_the_table_names_each_metric_once_and_as_prometheus_wants_it() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.label is None) == (metric.values == (NO_LABEL,))
        assert len(set(metric.values)) == len(metric.values)


def test_every_reason_for_a_miss_is_a_label() -> None:
    (misses,) = [metric for metric in METRICS if metric.name == names.MISS_BLOCKS]
    assert set(misses.values) == {reason.name.lower() for reason in Miss}


def test_p70_one_rank_without_locked_memory_is_enough_to_say_so() -> None:
    bench, chooser = Bench(ranks=2, writers={0: 2}), LoadOrCompute(margin_ratio=0.9)
    assert numbers(bench.half, chooser, 0)[1][names.PINNED] == {}
    for pinned, shown in ((True, 1.0), (False, 0.0)):
        bench.half.on_report(WorkerReport(rank=int(pinned), pinned=pinned))
        assert numbers(bench.half, chooser, 0)[1][names.PINNED] == {NO_LABEL: shown}


# The stats.


def test_new_stats_are_empty_and_so_are_reset_ones() -> None:
    stats = EbbtideStats()
    assert stats.is_empty()
    assert EbbtideStats.of({names.REQUESTS: {NO_LABEL: 0}}).is_empty()
    stats.aggregate(some_stats())
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert stats == EbbtideStats()
    assert not EbbtideStats.of({}, {names.CONNECTED: {NO_LABEL: 0}}).is_empty()


def test_stats_survive_every_way_that_vllm_carries_them() -> None:
    stats = some_stats()
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert EbbtideStats(json.loads(json.dumps(stats.to_dict()))) == stats
    carried = MsgpackDecoder().decode(MsgpackEncoder().encode(stats.to_dict()))
    assert CountingConnector.build_kv_connector_stats(carried) == stats


def test_stats_share_nothing_with_the_data_that_they_are_built_from() -> None:
    data = some_stats().to_dict()
    before = json.dumps(data)
    first, second = EbbtideStats(data), EbbtideStats(data)
    first.aggregate(second)
    assert json.dumps(data) == before
    assert second == some_stats()
    assert first.counters[names.REQUESTS][NO_LABEL] == 4


def test_aggregate_is_associative_has_a_zero_and_leaves_the_other_alone() -> None:
    rng = random.Random(7)
    labels = ("memory", "disk", "unheard_of")

    def drawn() -> EbbtideStats:
        def values() -> dict[str, dict[str, float]]:
            chosen = rng.sample((names.HIT_TOKENS, names.LOADS, "ebbtide_newer_total"), 2)
            return {
                name: {value: rng.randrange(5) for value in rng.sample(labels, 2)}
                for name in chosen
            }

        return EbbtideStats.of(values(), values())

    for _ in range(300):
        data = [drawn().to_dict() for _ in range(3)]
        left = EbbtideStats(data[0]).aggregate(EbbtideStats(data[1]))
        left = left.aggregate(EbbtideStats(data[2]))
        others = EbbtideStats(data[1])
        right = EbbtideStats(data[0]).aggregate(others.aggregate(EbbtideStats(data[2])))
        assert left == right
        assert EbbtideStats().aggregate(left) == left == EbbtideStats(left.data)
        assert left.aggregate(EbbtideStats()) == right
        for name, value in itertools.product((names.HIT_TOKENS, names.LOADS), labels):
            parts = [part["counters"].get(name, {}).get(value, 0) for part in data]
            assert left.counters.get(name, {}).get(value, 0) == sum(parts)


def test_the_last_gauge_wins() -> None:
    first = EbbtideStats.of({}, {names.LOAD_RATE: {"memory": 5, "disk": 1}})
    first.aggregate(EbbtideStats.of({}, {names.LOAD_RATE: {"memory": 3}}))
    assert first.gauges == {names.LOAD_RATE: {"memory": 3, "disk": 1}}


@pytest.mark.parametrize(
    "data",
    [
        {"counters": None, "gauges": 3, "histograms": {"a": {"": 1}}},
        {"counters": {names.REQUESTS: 4, 5: {"": 1}}, "gauges": {names.CONNECTED: [1]}},
        {"counters": {names.REQUESTS: {NO_LABEL: -1, 7: 1}, names.LOADS: {"loaded": "many"}}},
        {"gauges": {names.LOAD_RATE: {"memory": float("nan"), "disk": float("inf")}}},
        [],
    ],
)
def test_data_of_another_form_is_left_out(data: Any, metrics: EbbtidePromMetrics) -> None:
    assert EbbtideStats(data).is_empty()
    metrics.observe(data)
    assert not any(every_sample().values())


def test_the_log_line_is_short_and_says_what_came_back() -> None:
    lines: list[tuple[object, ...]] = []
    logging = KVConnectorLogging(KVTransferConfig(**CHILD))
    logging.observe(some_stats().to_dict())
    logging.observe(some_stats().to_dict())
    logging.log(lambda *line: lines.append(line))
    logging.log(lambda *line: lines.append(line))
    assert lines == [
        (
            "KV Transfer metrics: %s",
            "tokens_from_memory=4032, tokens_from_disk=64, tokens_from_remote=0, "
            "blocks_stored=126, loads_failed=2",
        )
    ]


def test_the_log_line_tells_of_trouble() -> None:
    stats = EbbtideStats.of(
        {names.LOADS: {"partly": 2}, names.FAULTS: {"worker": 1, "scheduler": 3}},
        {names.CONNECTED: {NO_LABEL: 0}},
    )
    trouble = {"loads_partly": 2, "faults": 4, "connected": 0}
    assert stats.reduce().items() >= trouble.items()
    assert not EbbtideStats().reduce().keys() & trouble.keys()


# Deltas.


def test_deltas_add_up_to_the_totals() -> None:
    rng, deltas, added = random.Random(3), Deltas(), EbbtideStats()
    totals = {names.HIT_BLOCKS: {"memory": 0, "disk": 0}, names.REQUESTS: {NO_LABEL: 0}}
    for _ in range(50):
        for values in totals.values():
            for value in values:
                values[value] += rng.randrange(3)
        added.aggregate(EbbtideStats.of(deltas.since(totals)))
    assert added.counters == totals
    assert deltas.since(totals) == {}


def test_a_total_that_started_again_is_new_and_an_absent_one_is_remembered() -> None:
    deltas = Deltas()
    deltas.since({names.LOADS: {"loaded": 10, "failed": 4}})
    assert deltas.since({names.LOADS: {"loaded": 3}}) == {names.LOADS: {"loaded": 3}}
    assert deltas.since({}) == {}
    grown = deltas.since({names.LOADS: {"loaded": 3, "failed": 5}})
    assert grown == {names.LOADS: {"failed": 1}}


# Prometheus.


def test_every_series_is_there_from_the_start_at_zero(metrics: EbbtidePromMetrics) -> None:
    expected = set()
    for metric, engine in itertools.product(METRICS, ENGINES):
        for value in metric.values:
            own = {metric.label: value} if metric.label else {}
            labels = {"model_name": "tiny", "engine": str(engine), **own}
            expected.add((metric.name, tuple(sorted(labels.items()))))
    assert dict.fromkeys(expected, 0) == every_sample()
    helps = {family.name: family.documentation for family in REGISTRY.collect()}
    for metric in METRICS:
        assert helps[metric.name.removesuffix("_total")] == metric.description


def test_every_metric_of_the_table_can_be_observed(metrics: EbbtidePromMetrics) -> None:
    of_kind: dict[str, dict[str, dict[str, float]]] = {"counter": {}, "gauge": {}}
    numbers = itertools.count(1)
    for metric in METRICS:
        of_kind[metric.kind][metric.name] = {value: next(numbers) for value in metric.values}
    stats = EbbtideStats.of(of_kind["counter"], of_kind["gauge"])
    metrics.observe(stats.to_dict(), 1)
    for metric in METRICS:
        for value, number in of_kind[metric.kind][metric.name].items():
            own = {metric.label: value} if metric.label else {}
            assert sample(metric.name, 1, **own) == number
            assert sample(metric.name, 0, **own) == 0


def test_counters_add_up_and_gauges_follow(metrics: EbbtidePromMetrics) -> None:
    metrics.observe(some_stats().to_dict())
    later = EbbtideStats.of({names.REQUESTS: {NO_LABEL: 1}}, {names.CONNECTED: {NO_LABEL: 0}})
    metrics.observe(later.to_dict())
    assert sample(names.REQUESTS) == 3
    assert sample(names.HIT_TOKENS, tier="memory") == 2016
    assert sample(names.CONNECTED) == 0
    assert sample(names.LOAD_RATE, tier="memory") == 2.5e9


def test_unknown_names_labels_kinds_and_engines_are_ignored(metrics: EbbtidePromMetrics) -> None:
    before = every_sample()
    newer = EbbtideStats.of(
        {
            "ebbtide_of_a_newer_half_total": {NO_LABEL: 1},
            names.MISS_BLOCKS: {"a_newer_reason": 3},
            names.HIT_TOKENS: {"computed": 9},
            names.REQUESTS: {"tier": 1},
            names.CONNECTED: {NO_LABEL: 1},  # a gauge among the counters
        },
        {names.LOAD_RATE: {"tape": 1}, names.REQUESTS: {NO_LABEL: 1}},
    )
    metrics.observe(newer.to_dict())
    metrics.observe(some_stats().to_dict(), engine_idx=7)
    assert every_sample() == before
    known = EbbtideStats.of({names.MISS_BLOCKS: {"evicted": 2, "a_newer_reason": 1}})
    metrics.observe(known.aggregate(newer).to_dict())
    assert sample(names.MISS_BLOCKS, reason="evicted") == 2


def test_a_second_engine_in_the_process_takes_the_place_of_the_first(
    clean_registry: None,
) -> None:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**CHILD))
    first = KVConnectorProm(config, LABELS, ENGINES)
    first.observe(some_stats().to_dict())
    second = KVConnectorProm(config, LABELS, {0: ["tiny", "0"]})
    assert sample(names.REQUESTS) == 0
    second.observe(some_stats().to_dict())
    first.observe(some_stats().to_dict())
    assert sample(names.REQUESTS) == 2
    assert sample(names.REQUESTS, engine=1) is None


def test_metrics_that_someone_else_took_off_the_registry_do_no_harm(
    metrics: EbbtidePromMetrics,
) -> None:
    for collector in EbbtidePromMetrics._registered:
        REGISTRY.unregister(collector)
    EbbtidePromMetrics(VllmConfig(), TYPES, LABELS, ENGINES)
    assert sample(names.CONNECTED) == 0


def test_a_child_of_multi_connector(clean_registry: None, registered: None) -> None:
    children = {"connectors": [CHILD, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=children
    )
    ranks = [MultiKVConnectorStats({"CountingConnector": some_stats()}) for _ in range(3)]
    payload = ranks[0].aggregate(ranks[1]).aggregate(ranks[2]).to_dict()
    payload = MsgpackDecoder().decode(MsgpackEncoder().encode(payload))

    prom = KVConnectorProm(VllmConfig(kv_transfer_config=transfer), LABELS, ENGINES)
    prom.observe(payload, 1)
    assert sample(names.HIT_TOKENS, 1, tier="memory") == 3 * 2016
    assert sample(names.HIT_TOKENS, 0, tier="memory") == 0

    rebuilt = MultiConnector.build_kv_connector_stats(payload)
    assert rebuilt is not None
    line = rebuilt.aggregate(ranks[1]).reduce()["CountingConnector"]
    assert line["tokens_from_memory"] == 4 * 2016


API_PROCESS = """
import json, sys
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from ebbtide.connectors.vllm.stats import EbbtidePromMetrics
types = {kind: kind for kind in (Counter, Gauge, Histogram)}
metrics = EbbtidePromMetrics(VllmConfig(), types, ["model_name", "engine"], {0: ["tiny", "0"]})
metrics.observe(json.loads(sys.argv[1]))
"""


@pytest.mark.long
def test_several_api_processes_add_counters_up_and_the_newest_gauge_is_seen(
    tmp_path: Path,
) -> None:
    first = some_stats()
    second = EbbtideStats.of({names.REQUESTS: {NO_LABEL: 5}})  # has heard of no gauge
    for stats in (first, second):
        subprocess.run(
            [sys.executable, "-c", API_PROCESS, json.dumps(stats.to_dict())],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            check=True,
            timeout=110,
        )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]  # theirs
    labels = {"model_name": "tiny", "engine": "0"}
    assert registry.get_sample_value(names.REQUESTS, labels) == 7
    assert registry.get_sample_value(names.CONNECTED, labels) == 1
