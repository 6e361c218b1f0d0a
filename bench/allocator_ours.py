"""ebbtide's allocator as `ebbtide bench allocator` drives it; its calls are known here alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.allocator import (
    BlockPool,
    ComputedBlocks,
    FullAttention,
    KVCacheManager,
    Request,
    hash_blocks,
    native,
)
from ebbtide.bench.allocator_load import BLOCK_SIZE, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray


class Ebbtide:
    """Named for the way it hashes: with the compiled hasher, or without."""

    def __init__(self) -> None:
        self.name = "ebbtide" if native.hasher() else "ebbtide-pure"

    def hasher(self, tokens: list[int] | NDArray[np.int64]) -> Callable[[], list[bytes]]:
        return lambda: hash_blocks(tokens, BLOCK_SIZE)

    def serving(self, num_blocks: int, max_model_len: int) -> EbbtideServing:
        return EbbtideServing(num_blocks, max_model_len)

    def pool(self, num_blocks: int) -> Pool:
        pool = BlockPool(num_blocks + 1)
        return Pool(pool.allocate, pool.free)


class EbbtideServing:
    """One full-attention group, caching on."""

    def __init__(self, num_blocks: int, max_model_len: int) -> None:
        self._manager = KVCacheManager(num_blocks + 1, (FullAttention(BLOCK_SIZE),), max_model_len)

    def request(self, name: str, tokens: list[int]) -> Request:
        return Request(name, tokens, hash_block_size=BLOCK_SIZE)

    def lookup(self, request: Request) -> ComputedBlocks:
        return self._manager.get_computed_blocks(request)

    def hit_tokens(self, computed: ComputedBlocks) -> int:
        return computed.num_tokens

    def allocate(self, request: Request, computed: ComputedBlocks) -> None:
        new = request.num_tokens - computed.num_tokens
        assert self._manager.allocate_slots(request, new, computed) is not None

    def admitted(self, request: Request) -> None:
        request.num_computed_tokens = request.num_tokens
        request.is_running = True

    def decode(self, request: Request, tokens: Sequence[int]) -> None:
        allocate_slots = self._manager.allocate_slots
        for token in tokens:
            request.append_output([token])
            allocate_slots(request, 1)
            request.num_computed_tokens += 1

    def free(self, request: Request) -> None:
        self._manager.free(request)

    def table(self, request: Request) -> list[int]:
        (table,) = self._manager.get_block_ids(request.request_id)
        return table

    def num_free(self) -> int:
        return self._manager.pool.num_free_blocks
