"""The class that vLLM builds: every hook of `KVConnectorBase_V1`, each behind the supervisor.

vLLM builds it as scheduler half in the engine core and as worker half in every rank, often in
different processes: nothing is shared but what vLLM carries between them. A fault in a hook becomes
a miss, a counter and a log line; only what is wrong at the start stops the engine, in words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ebbtide.connectors.seam import StepMetadata
from ebbtide.connectors.supervisor import FaultLog, hook, nothing
from ebbtide.connectors.vllm.announce import log_like_vllm
from ebbtide.connectors.vllm.metadata import Reports, Step
from ebbtide.connectors.vllm.plugin import register
from ebbtide.connectors.vllm.scheduler_side import SchedulerSide
from ebbtide.connectors.vllm.settings import read_settings
from ebbtide.connectors.vllm.stats import EbbtidePromMetrics, EbbtideStats
from ebbtide.connectors.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


# What the hooks answer when they have failed: a miss, in the hook's own words.
def _nothing_ended(*_: Any) -> KVConnectorTransferResults:
    return KVConnectorTransferResults()


def _no_blocks(_: Any) -> set[int]:
    return set()


def _no_reports(_: Any) -> Reports | None:
    return None


def _no_match(*_: Any) -> tuple[int | None, bool]:
    return 0, False


def _no_sources(*_: Any) -> dict[CacheHitSource, int]:
    return {}


def _free_at_once(*_: Any) -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _empty_step(*_: Any) -> KVConnectorMetadata:
    return Step(StepMetadata(settle_stores=True))


def _no_stats(_: Any) -> KVConnectorStats | None:
    return None


def _no(_: Any) -> bool:
    return False


class EbbtideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """See `docs/vllm.md`. Raises ConfigError while the engine starts, and nothing later."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.faults = FaultLog()
        log_like_vllm()
        settings = read_settings(vllm_config)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler_side = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            self.worker_side = WorkerSide(vllm_config, kv_cache_config, settings)

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None
        return self.scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None
        return self.worker_side

    # -- the worker's start ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake

    # -- the worker's step -------------------------------------------------------------------------

    @hook(nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # The one hook that comes before this step writes to any block, so the whole step starts
        # here: sources are guarded, and loads run beside the forward pass instead of behind it.
        if isinstance(kv_connector_metadata, Step):
            self._worker.start_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # a request runs when its load has ended

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    @hook(_nothing_ended)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self._worker.finish_step()
        if len(self._kv_cache_config.kv_cache_groups) == 1:
            failed = set()  # reported block by block
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    @hook(_no_blocks)
    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid = self._worker.take_invalid_blocks()
        return invalid if len(self._kv_cache_config.kv_cache_groups) == 1 else set()

    @hook(_no_reports)
    def build_connector_worker_meta(self) -> Reports | None:
        return self._worker.take_reports()

    # -- the scheduler's start ---------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.shake_hands(metadata)

    # -- the scheduler's requests ------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody its blocks; the default is True for producers, `kv_both` included."""
        return False

    @hook(nothing)
    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    @hook(_no_match)
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @hook(nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.on_allocated(request, blocks.get_block_ids(), num_external_tokens)

    @hook(_no_sources)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    @hook(_free_at_once)
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.request_finished(request, block_ids)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # -- the scheduler's step ----------------------------------------------------------------------

    @hook(_empty_step)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return Step(self._scheduler.build_step(scheduler_output))

    @hook(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            self._scheduler.on_reports(reports)

    @hook(_no)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_work

    @hook(_no)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.holds_blocks

    def take_events(self) -> Iterable[KVCacheEvent]:
        return ()

    @hook(_no)
    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    # -- both --------------------------------------------------------------------------------------

    @hook(_no_stats)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.scheduler_side is None:
            return None
        return self._scheduler.stats(self.faults.count)

    @hook(nothing)
    def shutdown(self) -> None:
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.close()

    # -- of the class ------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A block of all layers in one piece where the backend may; on a CPU it may not.

        vLLM 0.32 drops the wish with a warning for most CPU backends and fails with one (MLA).
        """
        from vllm.platforms import current_platform

        return "BLHNC" if current_platform.is_cuda_alike() else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return EbbtideStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> EbbtidePromMetrics:
        return EbbtidePromMetrics(*args)


register()
