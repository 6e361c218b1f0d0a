"""The scheduler half's running totals under the names of the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.connectors.offload.tally import COMPUTED
from ebbtide.connectors.vllm import stats as metric

if TYPE_CHECKING:
    from ebbtide.connectors.offload.load_or_compute import LoadOrCompute
    from ebbtide.connectors.offload.scheduler import OffloadScheduler
    from ebbtide.connectors.vllm.stats import Values


def numbers(
    half: OffloadScheduler, chooser: LoadOrCompute, adapter_faults: int
) -> tuple[Values, Values]:
    """(totals since the start, gauges). O(labels)."""
    tally, choices = half.tally, chooser.snapshot()
    tokens = {tier: n for tier, n in tally.tokens_by_source.items() if tier != COMPUTED}
    totals: Values = {
        metric.REQUESTS: {metric.NO_LABEL: tally.requests},
        metric.PROMPT_BLOCKS: {metric.NO_LABEL: tally.prompt_blocks},
        metric.HIT_BLOCKS: dict(tally.blocks_by_source),
        metric.HIT_TOKENS: dict(tokens),
        metric.MISS_BLOCKS: dict(tally.misses),
        metric.MOVED_BYTES: dict(tally.bytes_by_edge),
        metric.DEMOTED_BLOCKS: {metric.NO_LABEL: tally.demoted},
        metric.SHED_BLOCKS: {metric.NO_LABEL: tally.shed},
        metric.LOADS: dict(tally.loads),
        metric.FAULTS: {
            "scheduler": half.faults.count + adapter_faults,
            "worker": tally.worker_faults,
        },
    }
    totals[metric.LOAD_CHOICES] = {
        "load": choices["loads_chosen"],
        "compute": choices["computes_chosen"],
        "probe": choices["probes"],
    }
    gauges: Values = {
        metric.CONNECTED: {metric.NO_LABEL: float(half.connected)},
        metric.PINNED: {metric.NO_LABEL: float(all(tally.pinned.values()))} if tally.pinned else {},
        metric.LOAD_RATE: {
            tier: choices[f"{tier}_bytes_per_s"]
            for tier in metric.LOADED_TIERS
            if f"{tier}_bytes_per_s" in choices
        },
        metric.PREFILL_RATE: _one(choices, "prefill_tokens_per_s"),
        metric.PREDICTION_ERROR: _one(choices, "load_error_ratio"),
    }
    return totals, gauges


def _one(choices: dict[str, float], name: str) -> dict[str, float]:
    return {metric.NO_LABEL: choices[name]} if name in choices else {}
