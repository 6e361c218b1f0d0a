"""Which device blocks each request has: lookup, admission, growth, release.

Behaviour as vLLM 0.32, so that a scheduler written against it finds the same blocks, the same
refusals and the same evictions here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.allocator.admission import check_counts, check_hash_block_size, check_hits
from ebbtide.allocator.cache_rules import cache_rules
from ebbtide.allocator.coordinator import (
    NO_COMPUTED_BLOCKS,
    ComputedBlocks,
    make_coordinator,
    make_groups,
)
from ebbtide.allocator.eviction_policy import DEFAULT_POLICY
from ebbtide.allocator.full_attention import FullAttentionGroup
from ebbtide.allocator.pool import BlockPool
from ebbtide.allocator.prefix_stats import PrefixCacheStats
from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ebbtide.allocator.block import Block
    from ebbtide.allocator.followers import CacheEvents, Residency
    from ebbtide.allocator.group_spec import GroupSpec
    from ebbtide.allocator.request import Request


class KVCacheManager:
    """Block tables over one `BlockPool`, per KV group, for requests hashed at `hash_block_size`.

    A step of the scheduler, for a request without blocks: `get_computed_blocks`, then
    `allocate_slots` with that result and nothing in between; for one with blocks `allocate_slots`
    alone. On None it preempts something (`free`, `num_computed_tokens = 0`) and asks again. After a
    success it advances `request.num_computed_tokens`; nothing here writes to a request.

    `num_blocks` includes the null block. `watermark` is the share of all blocks that admissions
    leave free while requests are running. `policy`, `events` and `residency` as in `BlockPool`;
    `track_newly_cached` keeps what `take_newly_cached` gives. The rest as in `cache_rules`.
    Not thread-safe: belongs to the scheduler's thread. Raises ConfigError for what cannot work.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[GroupSpec],
        max_model_len: int,
        *,
        hash_block_size: int | None = None,
        max_in_flight_tokens: int | None = None,
        use_eagle: bool = False,
        retention_interval: int | None = 0,
        prefill_lookahead_tokens: int = 0,
        enable_caching: bool = True,
        watermark: float = 0.0,
        policy: str = DEFAULT_POLICY,
        events: CacheEvents | None = None,
        residency: Residency | None = None,
        track_newly_cached: bool = False,
    ) -> None:
        if num_blocks < 1 or not 0 <= watermark < 1:
            raise ConfigError(
                "the KV cache needs blocks and a watermark of 0 .. 1",
                num_blocks=num_blocks,
                watermark=watermark,
            )
        self.rules = cache_rules(
            groups,
            max_model_len,
            hash_block_size=hash_block_size,
            max_in_flight_tokens=max_in_flight_tokens,
            use_eagle=use_eagle,
            retention_interval=retention_interval,
            prefill_lookahead_tokens=prefill_lookahead_tokens,
        )
        self.pool = BlockPool(
            num_blocks,
            enable_caching=enable_caching,
            policy=policy,
            events=events,
            residency=residency,
        )
        self.groups = make_groups(groups, self.pool, self.rules)
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self._coordinator = make_coordinator(self.groups, self.rules, enable_caching=enable_caching)
        self._events = events
        self._watermark_blocks = int(watermark * num_blocks)
        # By block id, so that it never outgrows the pool, whether or not anybody takes it.
        self._newly_cached: dict[int, bytes] | None = {} if track_newly_cached else None
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced, 0..1. Cached but free counts as free."""
        return self.pool.usage

    def blocks_for_request(self, num_tokens: int) -> int:
        """Free blocks without which a request of that length is never admitted whole."""
        return sum(group.blocks_needed("", num_tokens, (), 0, capped=True) for group in self.groups)

    # -- looking up --------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a request, at most `num_tokens - 1` tokens.

        The last token is always recomputed, for its logits; as hits are whole blocks, a prompt of
        exactly k cached blocks hits k - 1. Output tokens count, so a preempted request can find its
        own. Changes nothing: allocate before anything else does. Empty with caching off or when the
        request does not read the cache. O(blocks hit).
        """
        check_hash_block_size(self.rules, request)
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return NO_COMPUTED_BLOCKS
        limit = max(request.num_tokens - 1, 0)
        return self._coordinator.find(request.block_hashes, limit)

    def report_reused(self, request: Request, computed: ComputedBlocks) -> None:
        """Tell the events of the blocks of a hit, for a request that wants to hear of all its own
        (`kv_cache_report_mode = "full"` in vLLM).
        """
        if self._events is not None and computed.num_tokens:
            for group, column in zip(self.groups, computed.blocks, strict=True):
                self._events.reused(request, group.index, group.spec, len(column))

    # -- allocating --------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed: ComputedBlocks = NO_COMPUTED_BLOCKS,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> tuple[list[Block], ...] | None:
        """Give a request the blocks for its next step; None if they do not fit.

        Tokens stand in this order: computed before, `computed` (from `get_computed_blocks`),
        `num_external_computed_tokens` (a connector will fill them), `num_new_tokens` (computed in
        this step, drafts included), `num_lookahead_tokens` (slots only, for drafts to come). All
        are cut at `max_model_len`.

        Returns per group the blocks taken for new and lookahead tokens, possibly none; blocks for
        external tokens are in the table only (as vLLM 0.32). Blocks that this step fills are cached
        at once, before the device has computed them, unless `delay_cache_blocks`: then
        `cache_blocks` follows when the load is confirmed. Draft tokens are never cached. Blocks out
        of every later step's sight are given back, also where the answer is None then.

        `full_sequence_must_fit` refuses unless the whole request fits into the free blocks;
        `reserved_blocks` are left free for others, except in that check. The watermark holds only
        for a request that is not running, and only if `has_scheduled_reqs`.

        Raises MisuseError for negative counts, for nothing to do, and for hits that the cache no
        longer serves or a request with blocks brings. O(hits + blocks taken and filled).
        """
        external, lookahead = num_external_computed_tokens, num_lookahead_tokens
        if num_new_tokens <= 0 or external or lookahead or reserved_blocks:
            counts = num_new_tokens, external, lookahead, reserved_blocks
            check_counts(request, computed, counts)
        if computed.num_tokens:
            check_hits(self.groups, self.pool, self.rules, request, computed)
        elif request.hash_block_size != self.rules.hash_block_size:
            check_hash_block_size(self.rules, request)
        limit, pool = self.max_model_len, self.pool
        holds_back = has_scheduled_reqs and not request.is_running
        watermark = self._watermark_blocks if holds_back else 0
        before = request.num_computed_tokens + computed.num_tokens + external
        total = min(before, limit)
        hits = computed.blocks or self._no_hits
        if full_sequence_must_fit:
            whole = min(request.num_tokens, limit)
            needed = self._blocks_needed(request, whole, hits, total, capped=True)
            if needed + watermark > pool.num_free_blocks:
                return None
        upto = min(total + num_new_tokens + lookahead, limit)
        self._trim(request, total)
        needed = self._blocks_needed(request, upto, hits, before, capped=False)
        if needed + watermark > pool.num_free_blocks - reserved_blocks:
            return None

        request_id = request.request_id
        is_admission = request_id not in self.groups[0].tables if self.groups else False
        if (computed.num_tokens or external) and not self._is_tracked(request_id):
            # Hits of all groups first: nothing allocated below may evict them.
            for group, column in zip(self.groups, hits, strict=True):
                group.adopt(request_id, column, before)
            if external:
                for group in self.groups:
                    group.adopt_external(request_id, external, before)
        new_blocks = tuple([group.grow(request_id, upto) for group in self.groups])
        if not delay_cache_blocks and self.enable_caching:
            self._cache(request, min(total + num_new_tokens, request.num_tokens, limit))
        if is_admission:
            self._record(request, computed.num_tokens)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let lookups find the full blocks within the first `num_tokens` tokens of a request.

        Called by the scheduler once a delayed load is confirmed; idempotent. Raises MisuseError if
        the request has fewer tokens or blocks. O(blocks not yet cached).
        """
        if num_tokens > request.num_tokens:
            raise MisuseError(
                "more tokens to cache than the request has",
                request=request.request_id,
                num_tokens=num_tokens,
                tokens=request.num_tokens,
            )
        if self.enable_caching:
            self._cache(request, num_tokens)

    def remove_skipped_blocks(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks that no step behind `num_tokens` computed tokens can see."""
        for group in self.groups:
            if not group.sees_all:
                group.trim(request.request_id, num_tokens)

    def free(self, request: Request) -> None:
        """Release a request's blocks, the end of its chain to be evicted first. O(blocks).

        Also the first half of a preemption. A request without blocks is left alone.
        """
        for group in self.groups:
            group.free(request.request_id)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Per group the block table of a request, in token order; empty if it has none. 0 is the
        null block. O(blocks).
        """
        return tuple(
            [block.block_id for block in group.tables.get(request_id, ())] for group in self.groups
        )

    def pop_blocks_for_free(self, request: Request) -> list[Block]:
        """Forget a request's tables without releasing its blocks: the caller gives them to
        `pool.free`, reversed, when nothing reads or writes them any more. Groups one behind the
        other, each in token order.
        """
        blocks: list[Block] = []
        for group in self.groups:
            blocks += group.pop(request.request_id)
        return blocks

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_tokens: int
    ) -> tuple[list[int], ...]:
        """The tables, cut behind the blocks that the first `num_tokens` tokens lie in."""
        tables = zip(self.groups, self.get_block_ids(request_id), strict=True)
        return tuple(ids[: -(-num_tokens // group.block_size)] for group, ids in tables)

    def truncate_computed_blocks(self, computed: ComputedBlocks, num_tokens: int) -> ComputedBlocks:
        """A hit cut at fewer tokens, a multiple of every block size. Changes no count."""
        columns = []
        for group, column in zip(self.groups, computed.blocks, strict=True):
            if num_tokens % group.block_size or num_tokens > computed.num_tokens:
                raise MisuseError(
                    "a hit is cut at block boundaries within it",
                    num_tokens=num_tokens,
                    hit_tokens=computed.num_tokens,
                    block_size=group.block_size,
                )
            columns.append(column[: num_tokens // group.block_size])
        return computed._replace(blocks=tuple(columns), num_tokens=num_tokens)

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of a request are cached in every group, at most. O(blocks)."""
        tables = [group.tables.get(request.request_id, ()) for group in self.groups]
        covered = [max((b.num_tokens for b in table if b.key), default=0) for table in tables]
        return min(covered, default=0)

    # -- the cache as a whole ----------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make lookups forget blocks whose content turned out bad. As `BlockPool.evict_blocks`."""
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. False while a request or a pin holds any. O(blocks)."""
        if not self.pool.reset():
            return False
        if self._newly_cached is not None:
            self._newly_cached.clear()
        self._stats.reset = True
        return True

    def take_newly_cached(self) -> list[tuple[int, bytes]]:
        """(block id, key) of the blocks cached since the last call and still so, oldest first.

        The bytes of a block are there only after the step that was being scheduled: pin it now,
        copy it then. Blocks with the same key are all listed. Empty without `track_newly_cached`.
        O(blocks cached).
        """
        if not self._newly_cached:
            return []
        taken, self._newly_cached = self._newly_cached, {}
        blocks = self.pool.blocks
        return [entry for entry in taken.items() if blocks[entry[0]].key == entry[1]]

    def take_stats(self) -> PrefixCacheStats:
        """The counts since the last call."""
        taken, self._stats = self._stats, PrefixCacheStats()
        return taken

    def check_integrity(self) -> None:
        """Raise MisuseError unless pool and tables agree. For tests and debugging. O(pool)."""
        self.pool.check_integrity()
        listed = dict.fromkeys(range(len(self.pool.blocks)), 0)
        for group in self.groups:
            for table in group.tables.values():
                for block in table:
                    listed[block.block_id] += 1
        for block in self.pool.blocks[1:]:
            if listed[block.block_id] > block.ref_count:  # pins may add references
                raise MisuseError(
                    "a block is in more tables than it has references",
                    block=block,
                    tables=listed[block.block_id],
                )

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _no_hits(self) -> tuple[Sequence[Block], ...]:
        return ((),) * len(self.groups)

    def _is_tracked(self, request_id: str) -> bool:
        return any(request_id in group.num_cached for group in self.groups)

    def _blocks_needed(
        self,
        request: Request,
        upto: int,
        hits: Sequence[Sequence[Block]],
        total: int,
        *,
        capped: bool,
    ) -> int:
        needed = 0
        for group, column in zip(self.groups, hits, strict=True):
            needed += group.blocks_needed(request.request_id, upto, column, total, capped=capped)
        return needed

    def _trim(self, request: Request, total: int) -> None:
        self.remove_skipped_blocks(request, total - request.num_in_flight_tokens)

    def _cache(self, request: Request, num_tokens: int) -> None:
        """Cache the blocks of every group that `num_tokens` computed tokens fill."""
        boundaries: Sequence[int] | None = None
        for group in self.groups:
            upto = self._coordinator.cacheable_tokens(group, num_tokens)
            start, end = group.num_cached.get(request.request_id, 0), upto // group.block_size
            if start < end:
                boundaries = boundaries or self.rules.replay_boundaries(request)
                kept = group.cache(request, upto, boundaries)
                if self._newly_cached is not None:
                    self._note(group.tables[request.request_id], kept)
                if self._events is not None:
                    self._events.stored(request, group.index, group.spec, start, end, kept)
            if group.ratio > 1 and isinstance(group, FullAttentionGroup):
                edge = group.cache_prompt_end(request, upto)
                if edge and self._events is not None:
                    self._events.stored_partial(request, group.index, group.spec, edge)

    def _note(self, table: Sequence[Block], kept: Iterable[int]) -> None:
        assert self._newly_cached is not None
        for number in kept:
            block = table[number]
            assert block.key is not None
            self._newly_cached.pop(block.block_id, None)  # so that it moves to the end
            self._newly_cached[block.block_id] = block.key

    def _record(self, request: Request, num_hit_tokens: int) -> None:
        """Count an admission that looked into the cache."""
        looked_up = self.enable_caching and not request.skip_reading_prefix_cache
        if looked_up and request.num_computed_tokens == 0:
            preempted = request.num_preemptions > 0
            self._stats.record(request.num_tokens, num_hit_tokens, preempted=preempted)
