"""Groups agree on one hit: how long a cached prefix is when each group must have its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ebbtide.allocator.chunked_local import ChunkedLocalGroup
from ebbtide.allocator.full_attention import FullAttentionGroup
from ebbtide.allocator.group_spec import ChunkedLocal, FullAttention
from ebbtide.allocator.sliding_window import SlidingWindowGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.block import Block
    from ebbtide.allocator.cache_rules import CacheRules
    from ebbtide.allocator.group_spec import GroupSpec
    from ebbtide.allocator.kv_group import Columns, KVGroup
    from ebbtide.allocator.pool import BlockPool


class ComputedBlocks(NamedTuple):
    """The leading blocks of a request that the cache holds, per group, and the tokens they cover.

    `junction_tokens`: how far some group alone would have reached, if further; else 0. A scheduler
    keeps it on the request, so that sparse groups keep what is needed there.
    `forgotten` is the pool's count at the lookup: a hit is good until the pool forgets a key.
    """

    blocks: tuple[Sequence[Block], ...]
    num_tokens: int
    junction_tokens: int = 0
    forgotten: int = 0


NO_COMPUTED_BLOCKS = ComputedBlocks((), 0)


class Coordinator:
    """Finds nothing and caches nothing: for caches that are switched off."""

    def __init__(self, groups: Sequence[KVGroup], rules: CacheRules) -> None:
        self.groups = groups
        self.rules = rules

    def find(self, hashes: Sequence[bytes], limit: int) -> ComputedBlocks:
        """The longest hit within `limit` tokens. Changes nothing."""
        return NO_COMPUTED_BLOCKS

    def cacheable_tokens(self, group: KVGroup, num_tokens: int) -> int:
        """Of so many computed tokens those whose blocks a later hit could use."""
        return 0


class UnitaryCoordinator(Coordinator):
    """One group: its own hit."""

    def find(self, hashes: Sequence[bytes], limit: int) -> ComputedBlocks:
        """See `Coordinator.find`."""
        columns, tokens = self.groups[0].find(self.groups, hashes, limit, drop=self.rules.use_eagle)
        if not tokens:
            return NO_COMPUTED_BLOCKS
        return ComputedBlocks((columns[0],), tokens, 0, self.groups[0].pool.forgotten)

    def cacheable_tokens(self, group: KVGroup, num_tokens: int) -> int:
        """See `Coordinator.cacheable_tokens`."""
        return max(0, num_tokens - self.rules.reprefillable_tokens)


class HybridCoordinator(Coordinator):
    """Several groups: the longest length at which each of them has what it needs.

    As vLLM 0.32: groups of one spec are looked up together, full attention first; whoever finds
    less shortens it for all, until nobody does.
    """

    def __init__(self, groups: Sequence[KVGroup], rules: CacheRules) -> None:
        super().__init__(groups, rules)
        by_spec: dict[GroupSpec, list[KVGroup]] = {}
        for group in groups:
            by_spec.setdefault(group.spec, []).append(group)
        self._spec_groups = sorted(by_spec.values(), key=lambda members: not members[0].sees_all)
        # A hit shortened by one other kind is still one of full attention: one pass is enough.
        self._one_pass = len(self._spec_groups) == 2 and self._spec_groups[0][0].sees_all

    def find(self, hashes: Sequence[bytes], limit: int) -> ComputedBlocks:
        """See `Coordinator.find`."""
        found: dict[int, tuple[Columns, int]] = {}  # by spec group
        verified: set[int] = set()
        hit, longest = limit, 0
        while True:
            current = hit
            for number, members in enumerate(self._spec_groups):
                if members[0].sees_all and number in found:
                    current = min(current, found[number][1])
                    continue
                current = self._find_in(number, members, hashes, current, found, verified)
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if self._one_pass:
                break
        columns: list[Sequence[Block]] = [()] * len(self.groups)
        for number, members in enumerate(self._spec_groups):
            for group, column in zip(members, found[number][0], strict=True):
                if group.sees_all:
                    del column[-(-hit // group.block_size) :]
                columns[group.index] = column
        junction = longest if longest > hit else 0
        if not hit and not junction:
            return NO_COMPUTED_BLOCKS
        return ComputedBlocks(tuple(columns), hit, junction, self.groups[0].pool.forgotten)

    def _find_in(
        self,
        number: int,
        members: list[KVGroup],
        hashes: Sequence[bytes],
        limit: int,
        found: dict[int, tuple[Columns, int]],
        verified: set[int],
    ) -> int:
        """Look up one spec group within `limit` tokens. Returns its length.

        With EAGLE a group gives up its last block once, and may look one block further for it.
        """
        group, rules = members[0], self.rules
        drop = rules.use_eagle and number not in verified
        if drop:
            limit_here = min(limit + group.block_size, len(hashes) * rules.hash_block_size)
        else:
            limit_here = limit
        columns, tokens = group.find(members, hashes, limit_here, drop=drop)
        if drop:
            verified.add(number)
        elif tokens < limit:
            verified.clear()
        found[number] = columns, tokens
        return tokens

    def cacheable_tokens(self, group: KVGroup, num_tokens: int) -> int:
        """See `Coordinator.cacheable_tokens`: hits end on multiples of the alignment; EAGLE looks
        one block past them.
        """
        rules = self.rules
        aligned = num_tokens // rules.alignment * rules.alignment
        if not (rules.use_eagle and aligned):
            return aligned
        final = max(0, num_tokens - rules.reprefillable_tokens)
        return min(final, final // rules.alignment * rules.alignment + group.block_size)


def make_groups(
    specs: Sequence[GroupSpec], pool: BlockPool, rules: CacheRules
) -> tuple[KVGroup, ...]:
    """Empty tables for each group."""
    groups: list[KVGroup] = []
    for index, spec in enumerate(specs):
        if isinstance(spec, FullAttention):
            groups.append(FullAttentionGroup(index, spec, pool, rules))
        elif isinstance(spec, ChunkedLocal):
            groups.append(ChunkedLocalGroup(index, spec, pool, rules))
        else:
            groups.append(SlidingWindowGroup(index, spec, pool, rules))
    return tuple(groups)


def make_coordinator(
    groups: Sequence[KVGroup], rules: CacheRules, *, enable_caching: bool
) -> Coordinator:
    """The one that fits the number of groups."""
    if not enable_caching or not groups:
        return Coordinator(groups, rules)
    if len(groups) == 1:
        return UnitaryCoordinator(groups, rules)
    return HybridCoordinator(groups, rules)
