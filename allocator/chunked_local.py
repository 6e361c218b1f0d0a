"""Groups whose tokens see the tokens before them in their own chunk only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.allocator.group_hashes import group_hashes
from ebbtide.allocator.kv_group import KVGroup
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.cache_rules import CacheRules
    from ebbtide.allocator.group_spec import ChunkedLocal
    from ebbtide.allocator.kv_group import Columns
    from ebbtide.allocator.pool import BlockPool


class ChunkedLocalGroup(KVGroup):
    """Blocks of earlier chunks are null in tables, and count as hit without being looked for.

    So a lookup in such a group alone finds tokens in an empty cache (as vLLM 0.32): it is of use
    beside full attention.
    """

    def __init__(self, index: int, spec: ChunkedLocal, pool: BlockPool, rules: CacheRules) -> None:
        super().__init__(index, spec, pool, rules)
        self.chunk = spec.chunk_tokens

    def skipped_tokens(self, num_tokens: int) -> int:
        """See `KVGroup.skipped_tokens`."""
        return num_tokens // self.chunk * self.chunk

    def admission_cap(self, blocks: int) -> int:
        """See `KVGroup.admission_cap`."""
        rules = self.rules
        held = min(self.chunk + rules.max_in_flight_tokens, rules.max_model_len)
        return -(-held // self.block_size)

    def find(
        self, members: Sequence[KVGroup], hashes: Sequence[bytes], limit: int, *, drop: bool
    ) -> tuple[Columns, int]:
        """See `KVGroup.find`: the run from the beginning of the chunk in which `limit` lies."""
        if drop:
            raise MisuseError("chunked local attention and EAGLE exclude each other")
        size = self.block_size
        before = limit // self.chunk * self.chunk // size
        names = group_hashes(hashes, self.ratio)
        unseen = [self.pool.null_block] * before
        columns = [unseen + column for column in self.run(members, names[before : limit // size])]
        return columns, len(columns[0]) * size
