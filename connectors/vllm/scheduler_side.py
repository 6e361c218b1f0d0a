"""vLLM's scheduler hooks on the scheduler half: one object, in the engine core's process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ebbtide.connectors.offload.load_or_compute import LoadOrCompute
from ebbtide.connectors.offload.scheduler import OffloadScheduler, SchedulerBounds
from ebbtide.connectors.seam import StepMetadata
from ebbtide.connectors.vllm.announce import Announcements
from ebbtide.connectors.vllm.connection import Connection
from ebbtide.connectors.vllm.counting import numbers
from ebbtide.connectors.vllm.device_pool import VllmPool
from ebbtide.connectors.vllm.fill import Fill, computed_before
from ebbtide.connectors.vllm.geometry import Geometry
from ebbtide.connectors.vllm.identity import describe, say_adapters_by_name, weights_of
from ebbtide.connectors.vllm.metadata import Handshake, Reports
from ebbtide.connectors.vllm.prefill_clock import PrefillClock
from ebbtide.connectors.vllm.reset import reset_store
from ebbtide.connectors.vllm.stats import Deltas, EbbtideStats, Values
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ebbtide.connectors.vllm.geometry import Rank
    from ebbtide.connectors.vllm.settings import Settings

_HIT_SOURCE = {
    "memory": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "remote": CacheHitSource.EXTERNAL_UNSPECIFIED,
}


class SchedulerSide:
    """Engine-core thread only.

    The half is built at the first request or step: only then has vLLM fixed the root of its hash
    chain.
    """

    def __init__(
        self, vllm_config: VllmConfig, cache_config: KVCacheConfig, settings: Settings
    ) -> None:
        self._vllm_config = vllm_config
        self._cache_config = cache_config
        self._settings = settings
        self._stores = settings.stores
        self._weights = weights_of(vllm_config, settings.config.connector.weights_revision)
        self._nonce = ""
        self._manager: KVCacheManager | None = None
        self._pool: VllmPool | None = None
        self._handshakes: dict[Rank, Handshake] = {}
        self._geometry: Geometry | None = None
        self._connection: Connection | None = None
        self._half: OffloadScheduler | None = None
        self._fill: Fill | None = None
        self._chooser = LoadOrCompute(
            margin_ratio=settings.config.connector.compute_margin_ratio,
            always_load=settings.config.connector.always_load,
        )
        self._announce = Announcements(settings)
        for warning in settings.warnings:
            self._announce.once(warning)
        self._requests: dict[str, Request] = {}
        self._local_tokens: dict[str, int] = {}  # at the last question, by request
        self._clock = PrefillClock()
        self._deltas = Deltas()
        self._mark: tuple[int, ...] = ()  # of the totals that were reported last
        self._gauges: Values = {}
        self._closed = False

    # -- start ------------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's block tables."""
        self._manager = manager

    def shake_hands(self, handshakes: Mapping[Rank, object]) -> None:
        """All ranks have described themselves. Raises ConfigError for what cannot work."""
        theirs = {rank: one for rank, one in handshakes.items() if isinstance(one, Handshake)}
        if len(theirs) != len(handshakes) or not theirs:
            raise ConfigError(
                "The ranks' handshakes did not arrive",
                next_step="Under MultiConnector, list EbbtideConnector first.",
                ranks=len(handshakes),
                ours=len(theirs),
            )
        self._handshakes = theirs
        self._geometry = Geometry.of(self._cache_config, theirs)
        self._connection = Connection(self._settings, "scheduler", arena=False)

    @property
    def half(self) -> OffloadScheduler | None:
        """The scheduler half; None while the engine is still starting."""
        if self._half is None and not self._closed:
            self._build()
        return self._half

    def _build(self) -> None:
        geometry, manager, connection = self._geometry, self._manager, self._connection
        if geometry is None or manager is None or connection is None:
            return
        pool = VllmPool(manager.block_pool)
        if not pool.caching and geometry.groups.windowed:
            self._stores = False  # blocks that a window has passed are given back unannounced
            self._announce.once(
                "ebbtide stores nothing: this model has sliding windows, and prefix caching is off"
            )
        connector = self._settings.config.connector
        weights = self._weights.poll()
        bounds = SchedulerBounds(
            lookup_timeout_s=self._settings.config.limits.lookup_timeout_s,
            store_budget_bytes=connector.store_budget_bytes if self._stores else 0,
            commit_timeout_s=connector.store_timeout_s,
        )
        self._pool = pool
        self._half = OffloadScheduler(
            connection.client,
            pool,
            descriptor=self._descriptor(weights),
            groups=geometry.groups,
            ranks=geometry.ranks,
            writers=geometry.writers,
            shard_offsets=geometry.shard_offsets,
            bounds=bounds,
            lazy=connector.stores == "lazy",
            pending=weights is None,
            chooser=self._chooser,
        )
        self._fill = Fill(geometry.groups, manager, prompt_only=connector.prompt_only)

    def _descriptor(self, weights: str | None) -> list[list[object]]:
        from vllm.v1.core import kv_cache_utils

        assert self._geometry is not None
        return describe(
            self._vllm_config,
            self._cache_config,
            self._geometry,
            self._handshakes,
            weights=f"{weights or 'not known yet'}{self._nonce}",
            hash_root=bytes(kv_cache_utils.NONE_HASH),
        ).pairs()

    # -- requests ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """The keys go out now."""
        half, fill = self.half, self._fill
        if half is None or fill is None:
            return
        self._requests[request.request_id] = request
        say_adapters_by_name(self._announce, request)
        if self._stores:
            fill.arrived(request)
        half.on_new_request(request.request_id, request.block_hashes, request.num_prompt_tokens)

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens that a load would bring behind the device's own; None: ask again next step."""
        half = self.half
        self._local_tokens[request.request_id] = local_tokens
        if half is None or not self._asks(request):
            return 0
        return half.matched_tokens(request.request_id, local_tokens, request.num_tokens)

    def on_allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """The request has blocks: count it, and start its load."""
        half, fill, geometry = self._half, self._fill, self._geometry
        if half is None or fill is None or geometry is None or not self._asks(request):
            return
        if external_tokens:
            fill.forget(request.request_id)  # its blocks are not computed, whatever vLLM counts
            self._clock.forget(request.request_id)
        tables = [block_ids[group.number] for group in geometry.groups.all]
        local = self._local_tokens.get(request.request_id, 0)
        half.on_allocated(request.request_id, tables, local, external_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Its last full blocks ebb too."""
        half, fill, pool = self._half, self._fill, self._pool
        self._local_tokens.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)
        self._clock.forget(request.request_id)
        if half is None or fill is None or pool is None:
            return
        fill.finished(request, block_ids)
        half.request_finished(request.request_id, request.block_hashes)
        if not pool.caching:
            held = [block_id for table in block_ids for block_id in table]
            pool.released(held, lambda key: half.wants(key) or fill.holds(key))

    def _asks(self, request: Request) -> bool:
        return self._settings.loads and not request.skip_reading_prefix_cache

    # -- steps ------------------------------------------------------------------------------------

    def build_step(self, scheduled: SchedulerOutput) -> StepMetadata:
        """Plan this step's copies."""
        half, fill, pool = self.half, self._fill, self._pool
        if half is None or fill is None or pool is None:
            return StepMetadata()
        self._know_weights(half)
        newly_full = fill.take()  # full since an earlier step: computed by now, or queued before us
        pool.computed(newly_full)
        before = computed_before(scheduled)
        self._clock.scheduled(scheduled, before, self._requests)
        if self._stores:
            pool.lost(fill.scheduled(scheduled, before))
        step = half.build_step(newly_full)
        pool.let_go(lambda key: half.wants(key) or fill.holds(key))
        assert self._geometry is not None
        self._announce.step(half, self._geometry)
        return step

    def _know_weights(self, half: OffloadScheduler) -> None:
        """The weights have been hashed meanwhile: the namespace is final."""
        if half.namespace.pending:
            weights = self._weights.poll()
            if weights is not None:
                half.describe(self._descriptor(weights), pending=False)
            elif self._weights.failed:
                self._announce.once(
                    "ebbtide stores and loads nothing: the weights have no identity. %s",
                    self._weights.failed,
                )

    def on_reports(self, reports: Reports) -> None:
        """What the ranks finished."""
        if self._half is not None:
            for report in reports.reports:
                self._half.on_report(report)

    @property
    def has_pending_work(self) -> bool:
        """Keep stepping while copies are under way."""
        if self._half is None or self._fill is None or self._pool is None:
            return False
        return bool(self._half.has_pending_work() or self._fill.waiting or self._pool.keeps_blocks)

    @property
    def holds_blocks(self) -> bool:
        """Better to wait for a moment than to preempt."""
        return bool(
            (self._half is not None and self._half.pins_blocks())
            or (self._pool is not None and self._pool.keeps_blocks)
        )

    # -- reset, end -------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget this namespace in every tier, durably. Blocking, by an operator's request only.

        Afterwards the weights may be others behind the same files, so what is written from now on
        carries a nonce that no restart has; not so when the user vouches for a revision.
        """
        half = self.half
        if half is None:
            return True
        done = reset_store(self._settings, half.namespace.descriptor)
        if done:
            half.forget_loads()
            if self._settings.config.connector.weights_revision is None:
                self._nonce = f" after reset {os.urandom(8).hex()}"
                weights = self._weights.poll()
                half.describe(self._descriptor(weights), pending=weights is None)
        return done

    def close(self) -> None:
        """Give pins and the connection back. Idempotent."""
        self._closed = True
        self._weights.close()
        if self._half is not None:
            self._half.close()
        if self._connection is not None:
            self._connection.close()

    # -- numbers ----------------------------------------------------------------------------------

    def hit_sources(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens of the load that was just planned, by vLLM's name of the tier."""
        half = self._half
        if half is None:
            return {}
        by_tier = half.expected_tokens(request.request_id)
        return {_HIT_SOURCE[tier]: tokens for tier, tokens in by_tier.items() if tokens}

    def stats(self, faults: int) -> EbbtideStats | None:
        """What was counted since the last call; None when it is nothing.

        vLLM asks once for the results of every step, in their order.
        """
        half = self._half
        if half is None:
            return None
        for prefill in self._clock.step_ended():
            self._chooser.observe_prefill(prefill.tokens, prefill.elapsed_s)
        mark = (*half.tally.mark(), half.faults.count + faults, half.connected)
        if mark == self._mark:
            return None
        self._mark = mark
        totals, gauges = numbers(half, self._chooser, faults)
        grown = self._deltas.since(totals)
        changed = gauges != self._gauges
        self._gauges = gauges
        return EbbtideStats.of(grown, gauges) if grown or changed else None
