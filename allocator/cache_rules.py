"""What holds for all KV groups of one cache: sizes, limits, and which positions are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.allocator.group_spec import ChunkedLocal, SlidingWindow, check_spec
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.group_spec import GroupSpec
    from ebbtide.allocator.request import Request


@dataclass(frozen=True, slots=True)
class CacheRules:
    """Sizes in tokens. As vLLM 0.32, without partial hits and context parallelism.

    `alignment` is the least common multiple of the groups' block sizes: hits of several groups end
    on its multiples. `hash_block_size` divides every group's block size.
    `retention_interval`: None keeps every block of a sliding window findable, 0 only those at which
    a prompt can be resumed, r > 0 also one window in r tokens.
    `use_eagle`: the last block of a hit is given up, so that its hidden states are computed anew.
    """

    alignment: int
    hash_block_size: int
    max_model_len: int
    max_in_flight_tokens: int
    use_eagle: bool = False
    retention_interval: int | None = 0
    reprefillable_tokens: int = 0

    def replay_boundaries(self, request: Request) -> tuple[int, ...]:
        """Positions at which a later request that begins with the prompt can resume."""
        prompt = request.num_prompt_tokens
        if self.use_eagle:
            size = self.alignment
            ends = {(prompt - 1) // size * size - size, prompt // size * size - size}
            boundaries = tuple(sorted({max(end, 0) for end in ends}))
        else:
            boundaries = (prompt - 1,)
        junction = request.junction_tokens
        return (*boundaries, junction) if junction else boundaries


def cache_rules(
    groups: Sequence[GroupSpec],
    max_model_len: int,
    *,
    hash_block_size: int | None = None,
    max_in_flight_tokens: int | None = None,
    use_eagle: bool = False,
    retention_interval: int | None = 0,
    prefill_lookahead_tokens: int = 0,
) -> CacheRules:
    """The rules that groups and settings give. Raises ConfigError where they exclude each other."""
    for spec in groups:
        check_spec(spec)
    sizes = [spec.block_size for spec in groups]
    alignment = math.lcm(*sizes)
    hash_block_size = hash_block_size or math.gcd(*sizes) or 1
    rules = CacheRules(
        alignment,
        hash_block_size,
        max_model_len,
        max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
        use_eagle,
        retention_interval,
        max(0, prefill_lookahead_tokens - 1),
    )
    if min(max_model_len, hash_block_size, rules.max_in_flight_tokens + 1) < 1:
        raise ConfigError("lengths are at least one token", rules=rules)
    if any(size % hash_block_size for size in sizes):
        raise ConfigError(
            "the hash block size divides every block size",
            hash_block_size=hash_block_size,
            block_sizes=sizes,
        )
    if len(groups) == 1 and sizes[0] != hash_block_size:
        raise ConfigError(
            "one group alone is hashed at its own block size",
            hash_block_size=hash_block_size,
            block_size=sizes[0],
        )
    _check_retention(groups, rules)
    for spec in groups:
        if isinstance(spec, ChunkedLocal) and (use_eagle or spec.block_size != alignment):
            raise ConfigError(
                "chunked local attention needs one block size for all groups and no EAGLE",
                block_sizes=sizes,
                use_eagle=use_eagle,
            )
    return rules


def _check_retention(groups: Sequence[GroupSpec], rules: CacheRules) -> None:
    interval = rules.retention_interval
    if interval is None or interval == 0:
        return
    sparse = any(isinstance(spec, SlidingWindow) for spec in groups)
    if interval < 0 or interval % rules.alignment or not sparse:
        raise ConfigError(
            "a retention interval is a multiple of the block sizes' least common multiple, "
            "for caches with a sliding window",
            retention_interval=interval,
            alignment=rules.alignment,
        )
