"""vLLM's block pool, as the halves see it.

vLLM names a block when it is scheduled, before it is computed; only this class knows which blocks
have been computed since. With prefix caching switched off vLLM does not name blocks at all: then a
block's content stands as long as its request has it, and a finished request's blocks are kept by
one reference until they have ebbed or `KEEP_S` is over.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ebbtide.connectors.seam import BlockRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool

KEEP_S = 1.0
KEPT_SHARE = 0.5  # of the pool, at most


class VllmPool:
    """Implements `ebbtide.connectors.offload.device_pool.DevicePool`. Scheduler thread only."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._now = now
        self._computed: dict[int, bytes] = {}  # block -> key; bounded by the pool's size
        self._kept: dict[int, float] = {}  # block -> until when; without prefix caching only

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def caching(self) -> bool:
        """Whether the pool itself remembers what its blocks hold."""
        return bool(self._pool.enable_caching)

    def computed(self, refs: Iterable[BlockRef]) -> None:
        """These blocks hold their keys' content from now on."""
        self._computed.update(refs)

    def content(self, block_id: int) -> bytes | None:
        key = self._computed.get(block_id)
        if key is None or not self._pool.enable_caching:
            return key
        return key if self._pool.blocks[block_id].block_hash == key else None

    def free_mark(self) -> object:
        queue = self._pool.free_block_queue
        head = queue.fake_free_list_head.next_free_block
        return queue.num_free_blocks, head.block_id, head.block_hash

    def next_to_go(self, limit: int) -> list[BlockRef]:
        found: list[BlockRef] = []
        if not self._pool.enable_caching:
            return found
        queue = self._pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        for _ in range(limit):
            if block is None or block is tail:
                break
            key = block.block_hash
            if key is not None and self._computed.get(block.block_id) == key:
                found.append(BlockRef(block.block_id, bytes(key)))
            block = block.next_free_block
        return found

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    # -- without prefix caching -------------------------------------------------------------------

    def released(self, block_ids: Iterable[int], wanted: Callable[[bytes], bool]) -> None:
        """A request is about to give these blocks back. Those still wanted are kept a moment."""
        if self._pool.enable_caching:
            return
        most = int(self.num_blocks * KEPT_SHARE)
        until = self._now() + KEEP_S
        for block_id in block_ids:
            key = self._computed.get(block_id)
            if key is None or block_id in self._kept:
                continue
            if wanted(key) and len(self._kept) < most:
                self._kept[block_id] = until
                self.pin([block_id])
            else:
                del self._computed[block_id]

    def lost(self, block_ids: Iterable[int]) -> None:
        """A preemption took these blocks: their content is nobody's any more."""
        if not self._pool.enable_caching:
            for block_id in block_ids:
                if block_id not in self._kept:
                    self._computed.pop(block_id, None)

    def let_go(self, wanted: Callable[[bytes], bool]) -> None:
        """Give kept blocks back that have ebbed, or were kept for too long. Once per step."""
        if not self._kept:
            return
        now = self._now()
        for block_id, until in list(self._kept.items()):
            if now > until or not wanted(self._computed[block_id]):
                del self._kept[block_id]
                del self._computed[block_id]
                self.unpin([block_id])

    @property
    def keeps_blocks(self) -> bool:
        """Some blocks come back soon."""
        return bool(self._kept)
