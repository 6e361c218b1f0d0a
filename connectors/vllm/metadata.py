"""What travels between the halves through vLLM: down with a step, up with its result, and once at
the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from ebbtide.connectors.seam import StepMetadata, WorkerReport


@dataclass(frozen=True)
class Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Down, once per step, to every rank."""

    step: StepMetadata


@dataclass(frozen=True)
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Up, once per step in which a rank finished something."""

    reports: tuple[WorkerReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        """Those of several ranks, side by side: each counts for itself."""
        if not isinstance(other, Reports):
            return self
        return Reports((*self.reports, *other.reports))


@dataclass(frozen=True)
class Shard:
    """One rank's part of the blocks of one KV group."""

    record_bytes: int  # of this rank's part of a block
    layout: str  # JSON, see `PagedLayout.describe`
    replicas: int  # neighbouring TP ranks that hold the same bytes


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Up, once, when the rank's caches are registered."""

    shards: dict[int, Shard]  # by KV group; groups of which the rank has layers
    backends: str  # attention backends and instruction set of its layers, for the namespace
    kv_dtype: str
