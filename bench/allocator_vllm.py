"""vLLM's own allocator as `ebbtide bench allocator` drives it, without a model. vLLM 0.32."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.bench.allocator_load import BLOCK_SIZE, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


class Vllm:
    """Raises ModuleNotFoundError where vLLM is not installed. Importing it takes some 10 s."""

    name = "vllm"

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.request import Request

        function = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(function)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, function)
        self._block_pool = BlockPool
        self._request = Request
        self._params = SamplingParams(max_tokens=1 << 20)

    def hasher(self, tokens: list[int] | NDArray[np.int64]) -> Callable[[], list[bytes]]:
        """It takes lists alone: an array is made a list before the clock starts."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        request = self._request("hash", ids, self._params, None)
        hasher = self._hasher
        return lambda: hasher(request)

    def serving(self, num_blocks: int, max_model_len: int) -> VllmServing:
        def request(name: str, tokens: list[int]) -> Any:
            return self._request(name, tokens, self._params, None, block_hasher=self._hasher)

        return VllmServing(num_blocks, max_model_len, request)

    def pool(self, num_blocks: int) -> Pool:
        pool = self._block_pool(num_blocks + 1, True, BLOCK_SIZE)
        return Pool(pool.get_new_blocks, pool.free_blocks)


class VllmServing:
    """One full-attention group, caching on, events and statistics off."""

    def __init__(
        self, num_blocks: int, max_model_len: int, request: Callable[[str, list[int]], Any]
    ) -> None:
        import torch
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import RequestStatus

        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=max_model_len,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self.request = request
        self._running = RequestStatus.RUNNING

    def lookup(self, request: Any) -> Any:
        return self._manager.get_computed_blocks(request)

    def hit_tokens(self, computed: Any) -> int:
        return int(computed[1])

    def allocate(self, request: Any, computed: Any) -> None:
        blocks, hit, _ = computed
        new = request.num_tokens - hit
        assert self._manager.allocate_slots(request, new, hit, blocks) is not None

    def admitted(self, request: Any) -> None:
        request.num_computed_tokens = request.num_tokens
        request.status = self._running

    def decode(self, request: Any, tokens: Sequence[int]) -> None:
        allocate_slots = self._manager.allocate_slots
        for token in tokens:
            request.append_output_token_ids([token])
            allocate_slots(request, 1)
            request.num_computed_tokens += 1

    def free(self, request: Any) -> None:
        self._manager.free(request)

    def table(self, request: Any) -> list[int]:
        (table,) = self._manager.get_block_ids(request.request_id)
        return list(table)

    def num_free(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())
