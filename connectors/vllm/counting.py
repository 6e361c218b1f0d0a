"""The scheduler half's running totals under the names of the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.connectors.offload.tally import COMPUTED
from ebbtide.connectors.vllm import stats as metric

if TYPE_CHECKING:
    from ebbtide.connectors.offload.scheduler import OffloadScheduler
    from ebbtide.connectors.vllm.stats import Values


def numbers(half: OffloadScheduler, adapter_faults: int) -> tuple[Values, Values]:
    """(totals since the start, gauges). O(labels)."""
    tally = half.tally
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
    gauges: Values = {metric.CONNECTED: {metric.NO_LABEL: float(half.connected)}}
    return totals, gauges
