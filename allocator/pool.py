"""The device blocks of one engine: who holds them, which are cached, which go next."""

from __future__ import annotations

import logging
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

from ebbtide.allocator.block import Block, FreeBlockQueue
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


class BlockPool:
    """`num_blocks` blocks, handed out and reclaimed in the order of vLLM 0.32.

    Every block without a reference stands in the free queue, cached or not; a cached one is found
    by its hash until it is handed out again (evicted) or named in `evict_blocks`. Block 0 is the
    null block, a placeholder in tables, so `num_blocks - 1` are usable. Hashes are opaque bytes
    here. Equal content is not merged: of several blocks under one hash, the first one cached that
    is still there serves lookups.

    A holder that copies from a block pins it with `touch([block])` and lets go with
    `free([block])`; a pinned block is neither handed out nor, meanwhile, evicted.

    `on_evict(block_id, block_hash)` is called for every cached block that loses its hash to an
    allocation, after the pool's state has changed. It must not raise and must not call the pool.
    Without `enable_caching` no block is ever cached and the free queue is a stack.

    Not thread-safe: belongs to the thread of the engine's scheduler.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        on_evict: Callable[[int, bytes], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise MisuseError("a pool has at least the null block", num_blocks=num_blocks)
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._free = FreeBlockQueue(self.blocks[1:])
        self.on_evict = on_evict
        # The block that serves a hash, and apart from it the younger duplicates, oldest first.
        # Duplicates are rare; an OrderedDict drops its first entry in O(1), a dict does not.
        self._serving: dict[bytes, Block] = {}
        self._younger: dict[bytes, OrderedDict[int, Block]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, cached ones among them."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced, 0..1."""
        usable = len(self.blocks) - 1
        return 1 - len(self._free) / usable if usable else 0.0

    def get_cached_block(self, block_hash: bytes) -> Block | None:
        """The block that serves `block_hash`: the first one cached that is still there. O(1)."""
        return self._serving.get(block_hash)

    def cached_prefix(self, block_hashes: Iterable[bytes]) -> list[Block]:
        """The blocks that serve the leading hashes, up to the first miss. Changes nothing. O(hits).

        Counts and queue stay as they are: `touch` the blocks before anything else is allocated.
        """
        find = self._serving.get
        found = []
        for block_hash in block_hashes:
            block = find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def cached_blocks(self, block_hash: bytes) -> list[Block]:
        """All blocks under one hash, the serving one first, then in the order they were cached."""
        serving = self._serving.get(block_hash)
        if serving is None:
            return []
        return [serving, *self._younger.get(block_hash, {}).values()]

    def allocate(self, count: int) -> list[Block]:
        """Hand out `count` blocks from the head of the queue, each with one reference. O(count).

        A cached block among them is evicted. Raises MisuseError, and changes nothing, when fewer
        are free: check `num_free_blocks` first.
        """
        taken = self._free.pop(count)
        evicted = []
        for block in taken:
            block.ref_count = 1
            block_hash = block.block_hash
            if block_hash is not None:
                self._forget(block, block_hash)
                evicted.append((block.block_id, block_hash))
        if self.on_evict is not None:
            for block_id, block_hash in evicted:
                self.on_evict(block_id, block_hash)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference each; a free block leaves the queue. O(1) each.

        Any holder may pin blocks so, not only tables. The null block is skipped.
        """
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference each; blocks without any join the queue. O(1) each.

        `blocks` come in the order in which they should be evicted: a table reversed, so that the
        end of a chain goes before its start. Those without a hash join the *head*, as nothing is
        lost by reusing them; cached ones join the tail. Raises MisuseError at a block that has no
        reference to drop; those before it are freed.
        """
        uncached: list[Block] = []
        cached: list[Block] = []
        overfreed = None
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                overfreed = block
                break
            block.ref_count -= 1
            if block.ref_count == 0:
                (uncached if block.block_hash is None else cached).append(block)
        self._free.prepend(uncached)
        self._free.append(cached)
        if overfreed is not None:
            raise MisuseError("freed more often than referenced", block=overfreed)

    def cache(self, block: Block, block_hash: bytes) -> None:
        """Let lookups find a referenced block under `block_hash`. O(1).

        Raises MisuseError for the null block, a free block, one that has a hash, or when caching is
        off.
        """
        cacheable = self.enable_caching and not block.is_null and block.ref_count > 0
        if not cacheable or block.block_hash is not None:
            raise MisuseError(
                "only a referenced block without a hash can be cached",
                block=block,
                caching=self.enable_caching,
            )
        block.block_hash = block_hash
        if self._serving.setdefault(block_hash, block) is not block:
            self._younger.setdefault(block_hash, OrderedDict())[block.block_id] = block

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make lookups forget these blocks; references and queue positions stay. O(1) each.

        Raises MisuseError, and forgets none, for an id outside the pool.
        """
        ids = list(block_ids)
        for block_id in ids:
            if not 0 <= block_id < len(self.blocks):
                raise MisuseError("no such block", block_id=block_id, blocks=len(self.blocks))
        for block_id in ids:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                self._forget(block, block.block_hash)

    def reset(self) -> bool:
        """Forget every hash. False, with a warning, while any block is referenced or pinned.

        The order of the queue is kept. O(blocks).
        """
        in_use = len(self.blocks) - 1 - len(self._free)
        if in_use:
            logger.warning("The prefix cache was not reset: %d blocks are still in use.", in_use)
            return False
        self._serving.clear()
        self._younger.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def peek_free(self, count: int) -> list[Block]:
        """Up to `count` free blocks in the order in which they will be handed out. O(count).

        Those with a hash are the next to be evicted, unless a hit or a newly freed block comes
        between. Changes nothing.
        """
        return self._free.peek(count)

    def _forget(self, block: Block, block_hash: bytes) -> None:
        block.block_hash = None
        younger = self._younger.get(block_hash)
        if self._serving[block_hash] is not block:
            assert younger is not None
            del younger[block.block_id]
        elif younger is None:
            del self._serving[block_hash]
        else:
            self._serving[block_hash] = younger.popitem(last=False)[1]
        if younger is not None and not younger:
            del self._younger[block_hash]

    def check_integrity(self) -> None:
        """Raise MisuseError unless queue, references and map agree. For tests. O(blocks)."""
        queued = list(self._free)
        ids = {block.block_id for block in queued}
        expected = {b.block_id for b in self.blocks if b.ref_count == 0 and not b.is_null}
        if len(queued) != len(self._free) or len(ids) != len(queued) or ids != expected:
            raise MisuseError(
                "the free queue is not the set of unreferenced blocks",
                queued=[block.block_id for block in queued],
                length=len(self._free),
                unreferenced=sorted(expected),
            )
        for before, after in pairwise(queued):
            if after.prev_free is not before:
                raise MisuseError("the free queue's links disagree", before=before, after=after)
        for block in self.blocks:
            linked = block.next_free is not block or block.prev_free is not block
            if block.ref_count < 0 or linked != (block.block_id in ids):
                raise MisuseError("a block's links or count are wrong", block=block)
            if block.block_hash is not None and block not in self.cached_blocks(block.block_hash):
                raise MisuseError("the map does not know a cached block", block=block)
        known = sum(len(self.cached_blocks(block_hash)) for block_hash in self._serving)
        cached = sum(block.block_hash is not None for block in self.blocks)
        if known != cached or not self._younger.keys() <= self._serving.keys():
            raise MisuseError("the map holds blocks that are not cached", map=known, cached=cached)
