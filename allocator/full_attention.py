"""Groups whose tokens see all tokens before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ebbtide.allocator.group_hashes import group_hashes
from ebbtide.allocator.kv_group import KVGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.kv_group import Columns
    from ebbtide.allocator.request import Request


class FullAttentionGroup(KVGroup):
    """Every block counts, from the first one on."""

    sees_all: ClassVar[bool] = True

    def find(
        self, members: Sequence[KVGroup], hashes: Sequence[bytes], limit: int, *, drop: bool
    ) -> tuple[Columns, int]:
        """See `KVGroup.find`: the unbroken run from the first block."""
        size, alignment = self.block_size, self.rules.alignment
        names = group_hashes(hashes, self.ratio)
        columns = self.run(members, names[: limit // size])
        tokens = len(columns[0]) * size
        if drop and tokens:
            tokens -= min(alignment, size)
        tokens -= tokens % alignment
        for column in columns:
            del column[-(-tokens // size) :]
        return columns, tokens

    def cache_prompt_end(self, request: Request, num_tokens: int) -> int:
        """Where blocks are larger than hash blocks: make the last hash boundary of the prompt
        findable inside its block. Returns its position in tokens, 0 when nothing is new.

        As vLLM 0.32, which does so although without partial hits nobody looks for it: the block
        counts as cached from then on.
        """
        step = self.rules.hash_block_size
        if self.ratio == 1:
            return 0
        prompt = request.num_prompt_tokens
        edge = (prompt if self.rules.use_eagle else prompt - 1) // step * step
        number, inside = divmod(edge, self.block_size)
        table = self.tables.get(request.request_id, ())
        if edge <= 0 or edge > num_tokens or not inside or number >= len(table):
            return 0
        block = table[number]
        key = request.block_hashes[edge // step - 1] + self.suffix
        if block.is_null or not self.pool.cache_partial(block, key, edge):
            return 0
        return edge
