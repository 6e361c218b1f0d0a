"""vLLM's worker hooks on the worker half: one object per rank, in the rank's process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ebbtide.connectors.offload.load import TIERS
from ebbtide.connectors.offload.worker import OffloadWorker
from ebbtide.connectors.vllm.cache_groups import replicas_of, taking_part
from ebbtide.connectors.vllm.connection import Connection
from ebbtide.connectors.vllm.layout import layouts_of
from ebbtide.connectors.vllm.metadata import Handshake, Reports, Shard
from ebbtide.tiers.device import device_copies

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ebbtide.connectors.seam import LoadJob, LoadResult, StepMetadata, WorkerReport
    from ebbtide.connectors.vllm.settings import Settings
    from ebbtide.kernels.layout import PagedLayout


class WorkerSide:
    """Worker thread only. Its `half` supervises itself; what remains here is bookkeeping."""

    def __init__(
        self, vllm_config: VllmConfig, cache_config: KVCacheConfig, settings: Settings
    ) -> None:
        self._vllm_config = vllm_config
        self._cache_config = cache_config
        self._settings = settings
        self._groups = taking_part(cache_config)
        self._half: OffloadWorker | None = None
        self._connection: Connection | None = None
        self._handshake: Handshake | None = None
        self._jobs: dict[str, LoadJob] = {}  # under way, by request
        self._report: WorkerReport | None = None
        self._invalid: set[int] = set()
        self._faults = 0  # reported so far

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The device tensors exist: describe them, reach the store, be ready to copy.

        Raises ConfigError for what cannot work. A store that cannot be reached is waited for in
        the background: everything is a miss until it answers.
        """
        layouts = layouts_of(kv_caches, self._cache_config, self._groups)
        rank, tp_rank = _rank_of(self._vllm_config)
        tp_size = self._vllm_config.parallel_config.tensor_parallel_size
        shards, writes = {}, []
        for number, layout in layouts.items():
            spec = self._cache_config.kv_cache_groups[number].kv_cache_spec
            replicas = replicas_of(spec, tp_size)
            text = json.dumps(layout.describe(), sort_keys=True)
            shards[number] = Shard(layout.record_bytes, text, replicas)
            if tp_rank % replicas == 0:
                writes.append(number)
        self._handshake = Handshake(shards, self._backends(), _dtypes(layouts))
        self._connection = Connection(self._settings, "worker", arena=True)
        self._half = OffloadWorker(
            self._connection.client,
            device_copies(layouts, self._settings.config.connector.copy),
            rank=rank,
            writes=writes,
            load_timeout_s=self._settings.config.connector.load_timeout_s,
        )

    @property
    def handshake(self) -> Handshake | None:
        """For the scheduler half, once."""
        return self._handshake

    def start_step(self, step: StepMetadata) -> None:
        """Before anything writes to a device block in this step."""
        if self._half is not None:
            self._jobs.update((job.request_id, job) for job in step.loads)
            self._half.start_step(step)

    def finish_step(self) -> tuple[set[str], set[str]]:
        """After the forward pass: (requests whose load ended, those of them to be computed)."""
        finished: set[str] = set()
        failed: set[str] = set()
        if self._half is None:
            return finished, failed
        self._report = report = self._half.finish_step()
        report.faults = self._half.faults.count - self._faults
        self._faults += report.faults
        for result in report.loads:
            job = self._jobs.pop(result.request_id, None)
            finished.add(result.request_id)
            bad = _failed_blocks(job, result)
            if bad:
                failed.add(result.request_id)
                self._invalid.update(bad)
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks of loads that failed, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_reports(self) -> Reports | None:
        """What this rank finished, for the scheduler half; None when it is nothing."""
        report, self._report = self._report, None
        if report is None or not (
            report.copied or report.dropped or report.loads or report.bytes_by_edge or report.faults
        ):
            return None
        return Reports((report,))

    def close(self) -> None:
        """Copies first, then the connection."""
        if self._half is not None:
            self._half.close()
        if self._connection is not None:
            self._connection.close()

    def _backends(self) -> str:
        """Attention backends of this rank's layers and, on a CPU, how it packs keys."""
        layers = self._vllm_config.compilation_config.static_forward_context
        found = set()
        for number in self._groups:
            for name in self._cache_config.kv_cache_groups[number].layer_names:
                layer = layers.get(name)
                backend = getattr(layer, "attn_backend", None)
                if backend is not None:
                    found.add(f"{backend.get_name()}:{getattr(layer, 'isa', '')}")
        return ",".join(sorted(found))


def _rank_of(vllm_config: VllmConfig) -> tuple[int, int]:
    """(rank in the order of records, tensor-parallel rank) of this process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    stage, tp_rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
    return stage * vllm_config.parallel_config.tensor_parallel_size + tp_rank, tp_rank


def _dtypes(layouts: Mapping[int, PagedLayout]) -> str:
    """The element types that the caches really have."""
    return "+".join(sorted({str(one.dtype).removeprefix("torch.") for one in layouts.values()}))


def _failed_blocks(job: LoadJob | None, result: LoadResult) -> set[int]:
    if job is None:
        return set()
    pairs = zip(job.block_ids, result.sources, strict=True)
    return {block_id for block_id, source in pairs if source not in TIERS}
