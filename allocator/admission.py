"""What is refused when a request asks for blocks: mistakes that would have wrong bytes read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.cache_rules import CacheRules
    from ebbtide.allocator.coordinator import ComputedBlocks
    from ebbtide.allocator.kv_group import KVGroup
    from ebbtide.allocator.pool import BlockPool
    from ebbtide.allocator.request import Request


def check_counts(request: Request, computed: ComputedBlocks, counts: tuple[int, ...]) -> None:
    """Raise MisuseError for negative counts, and for nothing to do.

    `counts`: new, external, lookahead and reserved.
    """
    if min(counts) < 0 or not (counts[0] or counts[1] or computed.num_tokens):
        raise MisuseError(
            "nothing to allocate, or a negative count",
            request=request.request_id,
            new_external_lookahead_reserved=counts,
        )


def check_hash_block_size(rules: CacheRules, request: Request) -> None:
    """Raise MisuseError for a request whose hashes name other blocks than this cache's."""
    if request.hash_block_size != rules.hash_block_size:
        raise MisuseError(
            "the request is hashed at another block size",
            request=request.hash_block_size,
            cache=rules.hash_block_size,
        )


def check_hits(
    groups: Sequence[KVGroup],
    pool: BlockPool,
    rules: CacheRules,
    request: Request,
    computed: ComputedBlocks,
) -> None:
    """Hits must lead the table and still be what was asked for: else wrong bytes are read."""
    check_hash_block_size(rules, request)
    right = (
        computed.forgotten == pool.forgotten
        and computed.num_tokens % rules.alignment == 0
        and not any(group.tables.get(request.request_id) for group in groups)
    )
    for group, column in zip(groups, computed.blocks, strict=True):
        # The last name of a chain stands for all of them.
        last = computed.num_tokens // rules.hash_block_size - 1
        right = right and len(column) == -(-computed.num_tokens // group.block_size)
        if right and not column[-1].is_null:
            right = column[-1].key == request.block_hashes[last] + group.suffix
    if not right:
        raise MisuseError(
            "the hits are not, or no longer, the leading blocks of this request",
            next_step="Look up and allocate in one go, for requests without blocks",
            request=request.request_id,
            hit_tokens=computed.num_tokens,
        )
