"""The reference engine's block pool, as the halves see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.connectors.seam import BlockRef

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from ebbtide.allocator import BlockPool


GROUP = 0  # the engine has one KV group


class ReferencePool:
    """Implements `ebbtide.connectors.offload.device_pool.DevicePool`.

    The pool knows a block's hash from the moment at which its last token is scheduled, and its
    content is there when that step has run: until then the block is in `being_computed`, which the
    engine keeps. It never preempts a sequence that is in the step already.
    """

    def __init__(self, pool: BlockPool, being_computed: Set[int] = frozenset()) -> None:
        self._pool = pool
        self._being_computed = being_computed

    @property
    def num_blocks(self) -> int:
        return len(self._pool.blocks)

    def content(self, block_id: int) -> bytes | None:
        return None if block_id in self._being_computed else self._pool.blocks[block_id].key

    def free_mark(self) -> object:
        head = self._pool.peek_free(1)
        first = (head[0].block_id, head[0].key) if head else None
        return self._pool.num_free_blocks, first

    def next_to_go(self, limit: int) -> list[BlockRef]:
        return [
            BlockRef(block.block_id, block.key)
            for block in self._pool.peek_free(limit)
            if block.key is not None
        ]

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._pool.free([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
