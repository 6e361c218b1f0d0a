"""The device blocks of one engine: who holds them, which are cached, which go next."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from ebbtide.allocator.block import Block
from ebbtide.allocator.eviction_policy import DEFAULT_POLICY, eviction_policy
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ebbtide.allocator.followers import KeyEvents, Residency

logger = logging.getLogger(__name__)


class BlockPool:
    """`num_blocks` blocks, handed out and reclaimed in the order of vLLM 0.32.

    Every block without a reference stands in the free queue, cached or not; a cached one is found
    by its key until it is handed out again (evicted) or named in `evict_blocks`. Block 0 is the
    null block, a placeholder in tables, so `num_blocks - 1` are usable. Keys are opaque bytes here.
    Equal content is not merged: of several blocks under one key, the first one cached that is still
    there serves lookups. A block may be found under further keys, see `cache_partial`.

    A holder that copies from a block pins it with `touch([block])` and lets go with
    `free([block])`; a pinned block is neither handed out nor, meanwhile, evicted.

    Without `enable_caching` no block is ever cached and, with the default policy, the free queue is
    a stack. `policy` is the name of an eviction policy.

    Not thread-safe: belongs to the thread of the engine's scheduler.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        policy: str = DEFAULT_POLICY,
        events: KeyEvents | None = None,
        residency: Residency | None = None,
    ) -> None:
        if num_blocks < 1:
            raise MisuseError("a pool has at least the null block", num_blocks=num_blocks)
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.evictions = 0  # blocks that lost their keys to an allocation
        self.forgotten = 0  # keys that do not lead to a block any more, for whatever reason
        self._free = eviction_policy(policy, self.blocks[1:])
        self._events = events
        self._residency = residency
        # The block that serves a key, and apart from it the younger duplicates, oldest first.
        # Duplicates are rare; an OrderedDict drops its first entry in O(1), a dict does not.
        self._serving: dict[bytes, Block] = {}
        self._younger: dict[bytes, OrderedDict[int, Block]] = {}
        self._further: dict[int, set[bytes]] = {}  # by block id: keys beside `Block.key`
        self._watchers: dict[int, Callable[[Block], None]] = {}  # by block id

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference, cached ones among them."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced, 0..1."""
        usable = len(self.blocks) - 1
        return 1 - len(self._free) / usable if usable else 0.0

    # -- finding -----------------------------------------------------------------------------------

    def get_cached_block(self, key: bytes) -> Block | None:
        """The block that serves `key`: the first one cached that is still there. O(1)."""
        return self._serving.get(key)

    def cached_prefix(self, block_hashes: Iterable[bytes], suffix: bytes = b"") -> list[Block]:
        """The blocks that serve the leading keys, up to the first miss. Changes nothing. O(hits).

        A key is a block hash and `suffix`. Counts and queue stay as they are: `touch` the blocks
        before anything else is allocated.
        """
        find = self._serving.get
        found = []
        for block_hash in block_hashes:
            block = find(block_hash + suffix)
            if block is None:
                break
            found.append(block)
        return found

    def cached_blocks(self, key: bytes) -> list[Block]:
        """All blocks under one key, the serving one first, then in the order they were cached."""
        serving = self._serving.get(key)
        if serving is None:
            return []
        return [serving, *self._younger.get(key, {}).values()]

    def keys_of(self, block: Block) -> list[bytes]:
        """The keys under which a block is cached, its own first."""
        if block.key is None:
            return []
        return [block.key, *sorted(self._further.get(block.block_id, ()))]

    # -- handing out and taking back ---------------------------------------------------------------

    def allocate(self, count: int) -> list[Block]:
        """Hand out `count` blocks from the head of the queue, each with one reference. O(count).

        A cached block among them is evicted. Raises MisuseError, and changes nothing, when fewer
        are free: check `num_free_blocks` first.
        """
        taken = self._free.pop(count)
        for block in taken:
            block.ref_count = 1
            if block.key is not None:
                self._forget(block)
                self.evictions += 1
        if self._watchers:
            self._tell_watchers(taken)
        if self._residency is not None:
            for block in taken:
                if self.enable_caching:
                    self._residency.evicted(block.block_id)
                self._residency.allocated(block.block_id)
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
            if self._residency is not None:
                self._residency.accessed(block.block_id)

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference each; blocks without any join the queue. O(1) each.

        `blocks` come in the order in which they should be evicted: a table reversed, so that the
        end of a chain goes before its start. Raises MisuseError at a block that has no reference to
        drop; those before it are freed.
        """
        uncached: list[Block] = []
        cached: list[Block] = []
        overfreed = None
        for block in blocks:
            count = block.ref_count
            if count > 1:
                block.ref_count = count - 1
            elif block.is_null:
                continue
            elif count == 0:
                overfreed = block
                break
            else:
                block.ref_count = 0
                (uncached if block.key is None else cached).append(block)
        self._free.release(uncached, cached)
        if overfreed is not None:
            raise MisuseError("freed more often than referenced", block=overfreed)

    def free_watched(self, blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None:
        """Drop one reference each of blocks whose bytes the holder reads on for as long as it can.

        Blocks without a reference join the tail of the queue, cached or not, and count as free.
        `on_reuse` is called once for each, when it is handed out again or the cache is reset; it
        must not call the pool. (As vLLM 0.32's `unpin_blocks`.) Raises MisuseError at a block that
        has no reference to drop; those before it are freed.
        """
        released: list[Block] = []
        overfreed = None
        for block in blocks:
            if block.is_null or block.ref_count == 0:
                overfreed = block
                break
            block.ref_count -= 1
            self._watchers[block.block_id] = on_reuse
            if block.ref_count == 0:
                released.append(block)
        self._free.release((), released)
        if overfreed is not None:
            raise MisuseError("freed more often than referenced", block=overfreed)

    # -- caching -----------------------------------------------------------------------------------

    def cache(self, block: Block, key: bytes, num_tokens: int = 0) -> None:
        """Let lookups find a referenced block under `key`, which names `num_tokens` tokens. O(1).

        Keys that the block has for fewer tokens are forgotten. Raises MisuseError for the null
        block, a free block, one that has a key for as many tokens, or when caching is off.
        """
        cacheable = self.enable_caching and not block.is_null and block.ref_count > 0
        if not cacheable or (block.key is not None and block.num_tokens >= num_tokens):
            raise MisuseError(
                "only a referenced block without a key can be cached",
                block=block,
                caching=self.enable_caching,
            )
        if block.key is not None:
            self._forget(block)
        block.key = key
        block.num_tokens = num_tokens
        self._serve(block, key)

    def cache_run(
        self,
        blocks: Sequence[Block],
        block_hashes: Sequence[bytes],
        suffix: bytes,
        num_tokens: int,
        block_size: int,
    ) -> None:
        """The same for blocks one behind the other, the first of which ends at `num_tokens`."""
        if not self.enable_caching:
            raise MisuseError("nothing is cached here", blocks=len(blocks))
        serving = self._serving
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            key = block_hash + suffix
            if block.key is not None or block.ref_count < 1 or key in serving:
                self.cache(block, key, num_tokens)
            else:
                block.key = key
                block.num_tokens = num_tokens
                serving[key] = block
            num_tokens += block_size

    def cache_partial(self, block: Block, key: bytes, num_tokens: int) -> bool:
        """Let lookups find a referenced block also under the key of a part of it. True if that is
        new.

        Keys that the block has for fewer tokens are forgotten. O(1).
        """
        further = self._further.get(block.block_id, ())
        if block.key == key or key in further:
            return False
        if block.key is not None and block.num_tokens < num_tokens:
            self._forget(block)
        if block.key is None:
            block.key = key
            block.num_tokens = num_tokens
        else:
            self._further.setdefault(block.block_id, set()).add(key)
        self._serve(block, key)
        return True

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
            if block.key is not None:
                self._forget(block)

    def reset(self) -> bool:
        """Forget every key. False, with a warning, while any block is referenced or pinned.

        The order of the queue is kept. O(blocks).
        """
        in_use = len(self.blocks) - 1 - len(self._free)
        if in_use:
            logger.warning("The prefix cache was not reset: %d blocks are still in use.", in_use)
            return False
        self.forgotten += len(self._serving)
        self._serving.clear()
        self._younger.clear()
        self._further.clear()
        for block in self.blocks:
            block.key = None
        self._tell_watchers([self.blocks[block_id] for block_id in self._watchers])
        if self._residency is not None:
            self._residency.cleared()
        if self._events is not None:
            self._events.cleared()
        return True

    def peek_free(self, count: int) -> list[Block]:
        """Up to `count` free blocks in the order in which they will be handed out. O(count).

        Those with a key are the next to be evicted, unless a hit or a newly freed block comes
        between. Changes nothing.
        """
        return self._free.peek(count)

    # -- inside ------------------------------------------------------------------------------------

    def _tell_watchers(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            on_reuse = self._watchers.pop(block.block_id, None)
            if on_reuse is not None:
                on_reuse(block)

    def _serve(self, block: Block, key: bytes) -> None:
        if self._serving.setdefault(key, block) is not block:
            self._younger.setdefault(key, OrderedDict())[block.block_id] = block

    def _forget(self, block: Block) -> None:
        """Drop all keys of a block."""
        key = block.key
        assert key is not None
        self._unserve(block, key)
        block.key = None
        if self._further:
            for further in sorted(self._further.pop(block.block_id, ())):
                self._unserve(block, further)

    def _unserve(self, block: Block, key: bytes) -> None:
        self.forgotten += 1
        younger = self._younger.get(key) if self._younger else None
        if self._serving[key] is not block:
            assert younger is not None
            del younger[block.block_id]
        elif younger is None:
            del self._serving[key]
        else:
            self._serving[key] = younger.popitem(last=False)[1]
        if younger is not None and not younger:
            del self._younger[key]
        if self._events is not None:
            self._events.removed(key)

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
        for block in self.blocks:
            if block.ref_count < 0 or (block.key is None and block.block_id in self._further):
                raise MisuseError("a block's count or keys are wrong", block=block)
            for key in self.keys_of(block):
                if block not in self.cached_blocks(key):
                    raise MisuseError("the map does not know a cached block", block=block)
        known = sum(len(self.cached_blocks(key)) for key in self._serving)
        cached = sum(len(self.keys_of(block)) for block in self.blocks)
        if known != cached or not self._younger.keys() <= self._serving.keys():
            raise MisuseError("the map holds blocks that are not cached", map=known, cached=cached)
        self._free.check_integrity()
