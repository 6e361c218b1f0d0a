"""KV-cache groups: how tokens become keys, and how long a hit is when groups differ.

A model with sliding windows has several groups: layers that keep everything, and layers that only
keep the last tokens. A prefix of length T is usable when every full group holds all of it and
every windowed group holds the blocks that its window needs at T (vLLM 0.32,
`v1/core/kv_cache_coordinator.py`: longest common hit over all groups).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.allocator import pack_key
from ebbtide.allocator.hashing import GROUP_BYTES
from ebbtide.connectors import protocol as wire
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NULL_BLOCK = 0  # nobody's device block


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One group: `block_size` and `window` in tokens, `record_bytes` of one block, all shards."""

    number: int
    block_size: int
    record_bytes: int
    window: int | None = None  # None: full attention

    def first_needed(self, end: int) -> int:
        """The first block that a query at token `end` attends to (its own token included)."""
        if self.window is None:
            return 0
        return max(0, end - self.window + 1) // self.block_size


class KVGroups:
    """All groups of one engine. `hash_block_size`: tokens per hash of the engine's hash chain.
    `fails_whole`: a block that cannot be loaded costs its whole request, as far as the engine can
    say; so it is with more than one group unless told otherwise.

    Raises ConfigError for block sizes that the hash chain cannot name.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        hash_block_size: int,
        *,
        fails_whole: bool | None = None,
    ) -> None:
        odd = [group for group in groups if group.block_size % hash_block_size]
        if not groups or odd:
            raise ConfigError(
                "The block size of a KV group is no multiple of the hash block size",
                next_step="Choose a --block-size that divides the block sizes of all groups.",
                groups=[group.block_size for group in odd],
                hash_block_size=hash_block_size,
            )
        self.all = tuple(groups)
        self.fails_whole = len(groups) > 1 if fails_whole is None else fails_whole
        self.hash_block_size = hash_block_size
        self.alignment = math.lcm(*(group.block_size for group in groups))
        self.windowed = any(group.window is not None for group in groups)
        self._by_number = {group.number: group for group in groups}

    @classmethod
    def single(cls, block_size: int, record_bytes: int) -> KVGroups:
        """One full-attention group, number 0."""
        return cls([KVGroup(0, block_size, record_bytes)], block_size)

    def of_key(self, key: bytes) -> KVGroup:
        """The group that a packed key names."""
        return self._by_number[group_number(key)]

    def keys(
        self, group: KVGroup, block_hashes: Sequence[bytes], first: int, end: int
    ) -> list[bytes]:
        """The keys of the group's blocks `first` to `end`: a block has the hash at its end."""
        if end <= first:
            return []
        step = group.block_size // self.hash_block_size
        last = pack_key(block_hashes[end * step - 1], group.number)  # checks; the others are alike
        suffix = last[-GROUP_BYTES:]
        return [block_hashes[i * step - 1] + suffix for i in range(first + 1, end)] + [last]

    def all_keys(self, block_hashes: Sequence[bytes], tokens: int) -> list[list[bytes]]:
        """Per group the keys of the first `tokens` tokens."""
        return [self.keys(group, block_hashes, 0, tokens // group.block_size) for group in self.all]

    @property
    def unit_bytes(self) -> int:
        """The records of all groups for one unit of a prefix."""
        return sum(self.alignment // g.block_size * g.record_bytes for g in self.all)

    def places(
        self, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> list[tuple[KVGroup, int, int]]:
        """(group, number in the chain, device block) of all between two tokens, tables per group.

        Without those that no block holds: a window has passed them.
        """
        return [
            (group, block, table[block])
            for group, table in zip(self.all, block_ids, strict=True)
            for block in range(start // group.block_size, end // group.block_size)
            if table[block] != NULL_BLOCK
        ]

    def askable_tokens(self, tokens: int) -> int:
        """Of `tokens`, how many one lookup can ask for, cut to whole blocks of every group."""
        per_unit = sum(self.alignment // group.block_size for group in self.all)
        return min(tokens // self.alignment, wire.KEYS_MAX // per_unit) * self.alignment

    def longest_hit(self, held: Sequence[Callable[[int], bool]], start: int, limit: int) -> int:
        """The largest usable prefix, in tokens: `start` <= result <= `limit`, aligned.

        `held[g](i)`: whether a tier holds block `i` of group `all[g]`. `start`: tokens that the
        device has, with all that their windows need; aligned. O(blocks between the two).
        """
        end = limit // self.alignment * self.alignment
        for group, holds in zip(self.all, held, strict=True):
            if group.window is None:
                block = start // group.block_size
                while block < end // group.block_size and holds(block):
                    block += 1
                end = block * group.block_size // self.alignment * self.alignment
        windowed = [
            (group, _runs(holds, start // group.block_size, end // group.block_size))
            for group, holds in zip(self.all, held, strict=True)
            if group.window is not None
        ]
        while end > start and not all(
            _covered(group, runs, start, end) for group, runs in windowed
        ):
            end -= self.alignment
        return max(start, end)


def group_number(key: bytes) -> int:
    """The group that a packed key names, without its checks: keys here are our own. O(1)."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def _runs(holds: Callable[[int], bool], first: int, end: int) -> dict[int, int]:
    """Per block: how many neighbours up to and including it are held, counted from `first` on."""
    runs: dict[int, int] = {}
    run = 0
    for block in range(first, end):
        run = run + 1 if holds(block) else 0
        runs[block] = run
    return runs


def _covered(group: KVGroup, runs: dict[int, int], start: int, end: int) -> bool:
    """Whether the window at `end` is held, as far as it lies behind `start`."""
    last = end // group.block_size - 1
    first = max(start // group.block_size, group.first_needed(end))
    return last < first or runs[last] >= last - first + 1
