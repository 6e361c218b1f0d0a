"""Groups whose tokens see a window of the tokens before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.allocator.group_hashes import group_hashes
from ebbtide.allocator.kv_group import KVGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.cache_rules import CacheRules
    from ebbtide.allocator.group_spec import SlidingWindow
    from ebbtide.allocator.kv_group import Columns
    from ebbtide.allocator.pool import BlockPool


class SlidingWindowGroup(KVGroup):
    """Only the last window matters: blocks before it are null in tables and in hits."""

    def __init__(self, index: int, spec: SlidingWindow, pool: BlockPool, rules: CacheRules) -> None:
        super().__init__(index, spec, pool, rules)
        self.window = spec.window_tokens
        # Blocks that a hit needs in a row; one more where the last of them is given up.
        self._needed = -(-(self.window - 1) // self.block_size)
        self._shift = int(rules.use_eagle)

    def skipped_tokens(self, num_tokens: int) -> int:
        """See `KVGroup.skipped_tokens`."""
        return max(0, num_tokens - self.window + 1)

    def admission_cap(self, blocks: int) -> int:
        """See `KVGroup.admission_cap`: the window and what is in flight, however it lies."""
        rules = self.rules
        held = min(self.window - 1 + rules.max_in_flight_tokens, rules.max_model_len)
        return -(-held // self.block_size) + 1

    def find(
        self, members: Sequence[KVGroup], hashes: Sequence[bytes], limit: int, *, drop: bool
    ) -> tuple[Columns, int]:
        """See `KVGroup.find`: the last run of cached blocks that fills a window, nulls before it.

        Failing that, the run that begins with the first block.
        """
        size, alignment, null = self.block_size, self.rules.alignment, self.pool.null_block
        names = group_hashes(hashes, self.ratio)
        needed, run = self._needed + drop, 0
        columns: Columns = [[null] * (limit // size) for _ in members]
        for number in range(limit // size - 1, -1, -1):
            blocks = self.served(members, names[number])
            if blocks is None:
                run = 0
                continue
            if run == 0 and (number if drop else number + 1) * size % alignment:
                continue  # a hit ends on a multiple of the alignment
            for column, block in zip(columns, blocks, strict=True):
                column[number] = block
            run += 1
            if run >= needed:
                length = number + run
                break
        else:
            length = self._aligned(run)
        if drop and length:
            length = self._aligned(length - 1)
        for column in columns:
            del column[length:]
        return columns, length * size

    def _aligned(self, blocks: int) -> int:
        while blocks * self.block_size % self.rules.alignment:
            blocks -= 1
        return blocks

    def kept(self, start: int, end: int, boundaries: Sequence[int]) -> list[int] | None:
        """See `KVGroup.kept`: one window per segment, and one before every boundary."""
        rules, size, shift = self.rules, self.block_size, self._shift
        needed, interval = self._needed + shift, rules.retention_interval
        kept: set[int] = set()
        segment = rules.alignment if interval is None else interval
        if segment:
            period = segment // size
            if needed >= period:
                return None
            kept.update(
                number
                for number in range(max(start, shift), end)
                if (number - shift) % period >= period - needed
            )
        if interval is not None:
            for tokens in boundaries:
                last = tokens // rules.alignment * rules.alignment // size + shift
                kept.update(range(max(start, last - needed), min(end, last)))
        return sorted(kept)
