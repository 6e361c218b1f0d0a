"""Which device blocks each request has: lookup, admission, growth, release.

One full-attention group. Behaviour as vLLM 0.32, so that a scheduler written against it finds the
same blocks, the same refusals and the same evictions here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ebbtide.allocator.pool import BlockPool
from ebbtide.allocator.prefix_stats import PrefixCacheStats
from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ebbtide.allocator.block import Block
    from ebbtide.allocator.request import Request


class ComputedBlocks(NamedTuple):
    """The leading blocks of a request that the cache holds, and the tokens they cover."""

    blocks: tuple[Block, ...]
    num_tokens: int


NO_COMPUTED_BLOCKS = ComputedBlocks((), 0)


class KVCacheManager:
    """Block tables over one `BlockPool`, for requests hashed at the same `block_size`.

    A step of the scheduler, for a request without blocks: `get_computed_blocks`, then
    `allocate_slots` with that result and nothing in between; for one with blocks `allocate_slots`
    alone. On None it preempts something (`free`, `num_computed_tokens = 0`) and asks again. After a
    success it advances `request.num_computed_tokens`; nothing here writes to a request.

    `watermark` is the share of all blocks that admissions leave free while requests are running.
    `on_evict` as in `BlockPool`. Not thread-safe: belongs to the scheduler's thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        watermark: float = 0.0,
        on_evict: Callable[[int, bytes], None] | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1 or max_model_len < 1 or not 0 <= watermark < 1:
            raise ConfigError(
                "the KV cache needs blocks, tokens and a watermark of 0 .. 1",
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                watermark=watermark,
            )
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching, on_evict=on_evict)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self._watermark_blocks = int(watermark * num_blocks)
        self._tables: dict[str, list[Block]] = {}
        # How many leading blocks of a table are cached. A request has an entry from the moment it
        # adopted hits or external tokens, or first cached a block, until it is freed.
        self._num_cached: dict[str, int] = {}
        # By block id, so that it never outgrows the pool, whether or not anybody takes it.
        self._newly_cached: dict[int, bytes] = {}
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced, 0..1. Cached but free counts as free."""
        return self.pool.usage

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a request, at most `num_tokens - 1` tokens.

        The last token is always recomputed, for its logits; as hits are whole blocks, a prompt of
        exactly k cached blocks hits k - 1. Output tokens count, so a preempted request can find its
        own. Changes nothing: allocate before anything else does. Empty with caching off or when the
        request does not read the cache. O(blocks hit).
        """
        self._check_block_size(request)
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return NO_COMPUTED_BLOCKS
        limit = max(request.num_tokens - 1, 0) // self.block_size
        blocks = tuple(self.pool.cached_prefix(request.block_hashes[:limit]))
        return ComputedBlocks(blocks, len(blocks) * self.block_size)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: ComputedBlocks = NO_COMPUTED_BLOCKS,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> list[Block] | None:
        """Give a request the blocks for its next step; None, and no change, if they do not fit.

        Tokens stand in this order: computed before, `new_computed_blocks` (from
        `get_computed_blocks`), `num_external_computed_tokens` (a connector will fill them),
        `num_new_tokens` (computed in this step, drafts included), `num_lookahead_tokens` (slots
        only, for drafts to come). All are cut at `max_model_len`.

        Returns the blocks taken for new and lookahead tokens, possibly none; blocks for external
        tokens are in the table only (as vLLM 0.32). Blocks that this step fills are cached at once,
        before the device has computed them, unless `delay_cache_blocks`: then `cache_blocks`
        follows when the load is confirmed. Draft tokens are never cached.

        `full_sequence_must_fit` refuses unless the whole request fits into the free blocks;
        `reserved_blocks` are left free for others, except in that check. The watermark holds only
        for a request that is not running, and only if `has_scheduled_reqs`.

        Raises MisuseError for negative counts, for nothing to do, and for hits that the cache no
        longer serves or a request with blocks brings. O(hits + blocks taken and filled).
        """
        hits, num_hit_tokens = new_computed_blocks
        counts = num_new_tokens, num_external_computed_tokens, num_lookahead_tokens, reserved_blocks
        if min(counts) < 0 or not (num_new_tokens or num_external_computed_tokens or hits):
            raise MisuseError(
                "nothing to allocate, or a negative count",
                request=request.request_id,
                new_external_lookahead_reserved=counts,
            )
        self._check_block_size(request)
        if hits:
            self._check_hits(request, new_computed_blocks)
        holds_back = has_scheduled_reqs and not request.is_running
        watermark = self._watermark_blocks if holds_back else 0
        num_free = self.pool.num_free_blocks
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            if self._blocks_needed(request, whole, hits) + watermark > num_free:
                return None
        num_local_tokens = request.num_computed_tokens + num_hit_tokens
        total = min(num_local_tokens + num_external_computed_tokens, self.max_model_len)
        upto = min(total + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        if self._blocks_needed(request, upto, hits) + watermark > num_free - reserved_blocks:
            return None

        is_admission = request.request_id not in self._tables
        table = self._tables.setdefault(request.request_id, [])
        if (hits or num_external_computed_tokens) and request.request_id not in self._num_cached:
            # Hits first: nothing allocated below may evict them.
            self.pool.touch(hits)
            table.extend(hits)
            self._num_cached[request.request_id] = len(table)
            if num_external_computed_tokens:
                self._grow(table, total)
        new_blocks = self._grow(table, upto)
        if not delay_cache_blocks:
            filled = min(total + num_new_tokens, request.num_tokens, self.max_model_len)
            self.cache_blocks(request, filled)
        if is_admission:
            self._record(request, num_hit_tokens)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let lookups find the full blocks within the first `num_tokens` tokens of a request.

        Called by the scheduler once a delayed load is confirmed; idempotent. Raises MisuseError if
        the request has fewer tokens or blocks. O(blocks not yet cached).
        """
        if not self.enable_caching:
            return
        table = self._tables.get(request.request_id, [])
        start = self._num_cached.get(request.request_id, 0)
        end = num_tokens // self.block_size
        if num_tokens > request.num_tokens or end > len(table):
            raise MisuseError(
                "more tokens to cache than the request has",
                request=request.request_id,
                num_tokens=num_tokens,
                tokens=request.num_tokens,
                blocks=len(table),
            )
        if start >= end:
            return
        for block, block_hash in zip(
            table[start:end], request.block_hashes[start:end], strict=True
        ):
            self.pool.cache(block, block_hash)
            self._newly_cached.pop(block.block_id, None)  # so that it moves to the end
            self._newly_cached[block.block_id] = block_hash
        self._num_cached[request.request_id] = end

    def free(self, request: Request) -> None:
        """Release a request's blocks, the end of its chain to be evicted first. O(blocks).

        Also the first half of a preemption. A request without blocks is left alone.
        """
        table = self._tables.pop(request.request_id, [])
        self._num_cached.pop(request.request_id, None)
        self.pool.free(reversed(table))

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table of a request, in token order; empty if it has none. O(blocks)."""
        return [block.block_id for block in self._tables.get(request_id, ())]

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make lookups forget blocks whose content turned out bad. As `BlockPool.evict_blocks`."""
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False while a request or a pin holds any. O(blocks)."""
        if not self.pool.reset():
            return False
        self._newly_cached.clear()
        self._stats.reset = True
        return True

    def take_newly_cached(self) -> list[tuple[int, bytes]]:
        """(block id, hash) of the blocks cached since the last call and still so, oldest first.

        The bytes of a block are there only after the step that was being scheduled: pin it now,
        copy it then. Blocks with the same hash are all listed. O(blocks cached).
        """
        taken, self._newly_cached = self._newly_cached, {}
        blocks = self.pool.blocks
        return [entry for entry in taken.items() if blocks[entry[0]].block_hash == entry[1]]

    def take_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        taken, self._stats = self._stats, PrefixCacheStats()
        return taken

    def check_integrity(self) -> None:
        """Raise MisuseError unless pool and tables agree. For tests and debugging. O(pool)."""
        self.pool.check_integrity()
        listed = dict.fromkeys(range(len(self.pool.blocks)), 0)
        for table in self._tables.values():
            for block in table:
                listed[block.block_id] += 1
        for block in self.pool.blocks[1:]:
            if listed[block.block_id] > block.ref_count:  # pins may add references
                raise MisuseError(
                    "a block is in more tables than it has references",
                    block=block,
                    tables=listed[block.block_id],
                )

    def _grow(self, table: list[Block], num_tokens: int) -> list[Block]:
        """Extend a table until it has slots for `num_tokens`; the blocks added."""
        missing = self._blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return []
        added = self.pool.allocate(missing)
        table.extend(added)
        return added

    def _blocks_needed(self, request: Request, num_tokens: int, hits: tuple[Block, ...]) -> int:
        """Free blocks used up by slots for `num_tokens`; a hit that is free now stops being so."""
        held = len(self._tables.get(request.request_id, ())) + len(hits)
        idle_hits = sum(block.ref_count == 0 for block in hits)
        return max(self._blocks_for(num_tokens) - held, 0) + idle_hits

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _record(self, request: Request, num_hit_tokens: int) -> None:
        """Count an admission that looked into the cache."""
        looked_up = self.enable_caching and not request.skip_reading_prefix_cache
        if looked_up and request.num_computed_tokens == 0:
            preempted = request.num_preemptions > 0
            self._stats.record(request.num_tokens, num_hit_tokens, preempted=preempted)

    def _check_block_size(self, request: Request) -> None:
        if request.block_size != self.block_size:
            raise MisuseError(
                "the request is hashed at another block size",
                request=request.block_size,
                cache=self.block_size,
            )

    def _check_hits(self, request: Request, computed: ComputedBlocks) -> None:
        """Hits must lead the table and still be what was asked for: else wrong bytes are read."""
        names = [block.block_hash for block in computed.blocks]
        if (
            request.request_id in self._tables
            or computed.num_tokens != len(names) * self.block_size
            or names != request.block_hashes[: len(names)]
        ):
            raise MisuseError(
                "the hits are not, or no longer, the leading blocks of this request",
                next_step="Look up and allocate in one go, for requests without blocks",
                request=request.request_id,
                hits=len(names),
                has_blocks=request.request_id in self._tables,
            )
