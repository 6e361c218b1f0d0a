"""Another connector, as a fault: it fills the blocks of a load some steps after it was asked to.

Until then they hold rubbish. It keeps what a worker computed in this process' memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

STEPS_LATE = 2
RUBBISH = 3.0


class Plan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Blocks to fill, and blocks to keep, by hash."""

    def __init__(self) -> None:
        self.loads: dict[str, list[tuple[bytes, int]]] = {}
        self.keeps: list[tuple[bytes, int]] = []


class SlowRemote(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """One group, one rank. `kept` outlives the engine; `filled` counts loads that ended."""

    kept: ClassVar[dict[bytes, list[torch.Tensor]]] = {}
    filled: ClassVar[int] = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.requests: dict[str, Request] = {}
        self.first: dict[str, int] = {}
        self.plan = Plan()
        self.late: dict[str, tuple[int, list[tuple[bytes, int]]]] = {}
        self.caches: list[torch.Tensor] = []

    # -- scheduler ---------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        first = end = num_computed_tokens // self.block_size
        limit = (request.num_tokens - 1) // self.block_size
        while end < limit and bytes(request.block_hashes[end]) in self.kept:
            end += 1
        self.first[request.request_id] = first
        return (end - first) * self.block_size, end > first

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            first = self.first[request.request_id]
            self.plan.loads[request.request_id] = [
                (bytes(request.block_hashes[i]), ids[i])
                for i in range(first, first + num_external_tokens // self.block_size)
            ]

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan, self.plan = self.plan, Plan()
        for new in scheduler_output.scheduled_new_reqs:
            hashes = self.requests[new.req_id].block_hashes
            full = (
                new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            ) // (self.block_size)
            plan.keeps += [(bytes(hashes[i]), new.block_ids[0][i]) for i in range(full)]
        return plan

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def reset_cache(self) -> None:
        return None

    # -- worker ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, pairs in self._get_connector_metadata().loads.items():
            self.late[request_id] = (STEPS_LATE, pairs)
            for cache in self.caches:
                for _, block_id in pairs:
                    cache[block_id].fill_(RUBBISH)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for block_hash, block_id in self._get_connector_metadata().keeps:
            self.kept.setdefault(block_hash, [cache[block_id].clone() for cache in self.caches])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        done = set()
        for request_id, (steps, pairs) in list(self.late.items()):
            self.late[request_id] = (steps - 1, pairs)
            if steps <= 0:
                del self.late[request_id]
                for block_hash, block_id in pairs:
                    for cache, bytes_ in zip(self.caches, self.kept[block_hash], strict=True):
                        cache[block_id].copy_(bytes_)
                done.add(request_id)
                type(self).filled += 1
        return None, done or None
