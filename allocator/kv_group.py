"""One KV group: the block tables of all requests in it, and what each has cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ebbtide.allocator.group_hashes import group_hashes
from ebbtide.allocator.hashing import GROUP_BYTES
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ebbtide.allocator.block import Block
    from ebbtide.allocator.cache_rules import CacheRules
    from ebbtide.allocator.group_spec import GroupSpec
    from ebbtide.allocator.pool import BlockPool
    from ebbtide.allocator.request import Request

Columns = list[list["Block"]]  # per group of a lookup its blocks


class KVGroup:
    """Tables of blocks, append-only but for blocks out of sight, which become the null block.

    A request is *tracked* from the moment it adopted hits or external tokens, or first cached a
    block, until it is freed. Scheduler's thread only. Costs are O(blocks named) each.
    """

    sees_all: ClassVar[bool] = False  # every block of a hit is needed: no nulls in its columns

    def __init__(self, index: int, spec: GroupSpec, pool: BlockPool, rules: CacheRules) -> None:
        self.index = index
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        self.rules = rules
        self.suffix = index.to_bytes(GROUP_BYTES, "big")  # of this group's keys
        self.ratio = spec.block_size // rules.hash_block_size  # hash blocks in a block
        self.tables: dict[str, list[Block]] = {}
        self.num_cached: dict[str, int] = {}

    # -- what a kind of attention decides ----------------------------------------------------------

    def skipped_tokens(self, num_tokens: int) -> int:
        """Leading tokens that a step behind `num_tokens` computed ones cannot see."""
        return 0

    def admission_cap(self, blocks: int) -> int:
        """Of so many blocks for a whole request those that it can hold at any one time."""
        return blocks

    def find(
        self, members: Sequence[KVGroup], hashes: Sequence[bytes], limit: int, *, drop: bool
    ) -> tuple[Columns, int]:
        """The longest hit of groups of one spec, within `limit` tokens: blocks per group, tokens.

        `drop` gives the last block up, for EAGLE. Changes nothing.
        """
        raise NotImplementedError

    def kept(self, start: int, end: int, boundaries: Sequence[int]) -> list[int] | None:
        """Which of the blocks [start, end) are to be findable; None: all."""
        return None

    # -- admission ---------------------------------------------------------------------------------

    def blocks_needed(
        self, request_id: str, upto: int, hits: Sequence[Block], total: int, *, capped: bool
    ) -> int:
        """Free blocks used up by slots for `upto` tokens; a hit that is free now stops being so.

        `total` are the tokens that count as computed then. `capped`: for a whole request, of which
        never more than its admission cap is held.
        """
        required = -(-upto // self.block_size)
        if capped:
            required = min(required, self.admission_cap(required))
        table = self.tables.get(request_id)
        have = len(table) if table else 0
        if request_id in self.num_cached:
            return max(required - have, 0)
        skipped = self.skipped_tokens(total) // self.block_size
        needed = max(required - max(skipped, len(hits) + have), 0)
        for block in hits[max(0, skipped - have) :]:
            if block.ref_count == 0 and not block.is_null:
                needed += 1
        return needed

    def adopt(self, request_id: str, hits: Sequence[Block], total: int) -> None:
        """Begin a table with the hits that `total` computed tokens can still see."""
        skipped = self.skipped_tokens(total) // self.block_size
        table = self.tables.setdefault(request_id, [])
        if skipped:
            hits = hits[skipped:]
            table.extend([self.pool.null_block] * skipped)
        self.pool.touch(hits)
        table.extend(hits)
        self.num_cached[request_id] = len(table)

    def adopt_external(self, request_id: str, external: int, total: int) -> None:
        """Blocks for `external` tokens that end at `total`, unless nobody will see any of them."""
        skipped = self.skipped_tokens(total)
        if skipped <= 0 or total - skipped > 0:
            self.grow(request_id, total)

    def grow(self, request_id: str, upto: int) -> list[Block]:
        """Extend a table until it has slots for `upto` tokens; the blocks added."""
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = []
        missing = -(-upto // self.block_size) - len(table)
        if missing <= 0:
            return []
        added = self.pool.allocate(missing)
        table.extend(added)
        return added

    # -- later -------------------------------------------------------------------------------------

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that a step behind `num_tokens` computed ones cannot see."""
        skipped = self.skipped_tokens(num_tokens)
        table = self.tables.get(request_id)
        if skipped <= 0 or not table:
            return
        null, freed = self.pool.null_block, []
        for number in range(min(skipped // self.block_size, len(table)) - 1, -1, -1):
            if table[number] is null:
                break
            freed.append(table[number])
            table[number] = null
        self.pool.free(freed)

    def cache(self, request: Request, num_tokens: int, boundaries: Sequence[int]) -> list[int]:
        """Let lookups find the full blocks within `num_tokens` tokens; the numbers of those kept.

        Idempotent: blocks cached before are left alone.
        """
        request_id = request.request_id
        start, end = self.num_cached.get(request_id, 0), num_tokens // self.block_size
        if start >= end:
            return []
        table = self.tables.get(request_id, [])
        if end > len(table):
            raise MisuseError(
                "more tokens to cache than the request has blocks for",
                request=request_id,
                num_tokens=num_tokens,
                blocks=len(table),
            )
        names, size = group_hashes(request.block_hashes, self.ratio), self.block_size
        kept = self.kept(start, end, boundaries)
        if kept is None and not table[start].is_null:
            run = names[start:end]
            self.pool.cache_run(table[start:end], run, self.suffix, (start + 1) * size, size)
            kept = list(range(start, end))
        else:
            wanted = range(start, end) if kept is None else kept
            kept = [number for number in wanted if not table[number].is_null]
            for number in kept:
                key = names[number] + self.suffix
                self.pool.cache(table[number], key, (number + 1) * size)
        self.num_cached[request_id] = end
        return kept

    def free(self, request_id: str) -> None:
        """Release a request's blocks, the end of its chain to be evicted first."""
        table = self.pop(request_id)
        table.reverse()
        self.pool.free(table)

    def pop(self, request_id: str) -> list[Block]:
        """Forget a request without releasing its blocks, which the caller does: its table."""
        self.num_cached.pop(request_id, None)
        return self.tables.pop(request_id, [])

    def run(self, members: Sequence[KVGroup], names: Iterable[bytes]) -> Columns:
        """Per group the blocks that serve the leading names, up to the first that one lacks."""
        if len(members) == 1:
            return [self.pool.cached_prefix(names, self.suffix)]
        columns: Columns = [[] for _ in members]
        for name in names:
            blocks = self.served(members, name)
            if blocks is None:
                break
            for column, block in zip(columns, blocks, strict=True):
                column.append(block)
        return columns

    def served(self, members: Sequence[KVGroup], block_hash: bytes) -> list[Block] | None:
        """The block that serves a hash in each of these groups; None unless all have one."""
        found = []
        for member in members:
            block = self.pool.get_cached_block(block_hash + member.suffix)
            if block is None:
                return None
            found.append(block)
        return found
