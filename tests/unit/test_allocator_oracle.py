"""Recorded operations of vLLM's own manager, replayed: no difference, and no fault goes unseen.

The traces were recorded by `tests/engine/allocator_oracle.py` from vLLM 0.32. Others are read from
the folder that EBBTIDE_ORACLE_TRACES names.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.oracle_replay import Record, Replays, read_trace

from ebbtide.allocator.block import Block, FreeBlockQueue
from ebbtide.allocator.cache_rules import CacheRules
from ebbtide.allocator.coordinator import HybridCoordinator, UnitaryCoordinator
from ebbtide.allocator.full_attention import FullAttentionGroup
from ebbtide.allocator.kv_cache_manager import KVCacheManager
from ebbtide.allocator.kv_group import KVGroup
from ebbtide.allocator.pool import BlockPool
from ebbtide.allocator.sliding_window import SlidingWindowGroup
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OWN = Path(__file__).parents[1] / "data" / "oracle_traces"
MORE = os.environ.get("EBBTIDE_ORACLE_TRACES")
SHAPES = 18


def traces() -> list[Path]:
    return sorted([*OWN.iterdir(), *(Path(MORE).iterdir() if MORE else ())])


@cache
def records() -> list[Record]:
    return list(read_trace(OWN / "seed11.jsonl.xz"))


def replay(lines: Sequence[Record]) -> Replays:
    replays = Replays()
    for record in lines:
        replays.apply(record)
    replays.end()
    return replays


def test_nothing_differs_in_recorded_rounds() -> None:
    rounds = operations = hit_tokens = evicted = refused = 0
    shapes: set[tuple[str, ...]] = set()
    for path in traces():
        done = replay(list(read_trace(path)))
        rounds += done.rounds
        operations += done.operations
        hit_tokens += done.hit_tokens
        evicted += done.evicted
        refused += done.refused
        shapes |= done.shapes
    assert (rounds >= 120, operations >= 13_000, len(shapes)) == (True, True, SHAPES)
    assert min(hit_tokens, evicted, refused) > 3000


# Each of these breaks one rule of vLLM's; the traces must show it.


def all_frees_to_the_tail(patch: pytest.MonkeyPatch) -> None:
    def release(self: FreeBlockQueue, uncached: list[Block], cached: list[Block]) -> None:
        self.append([*uncached, *cached])

    patch.setattr(FreeBlockQueue, "release", release)


def forward_free_order(patch: pytest.MonkeyPatch) -> None:
    def free(self: KVGroup, request_id: str) -> None:
        self.num_cached.pop(request_id, None)
        self.pool.free(self.tables.pop(request_id, []))

    patch.setattr(KVGroup, "free", free)


def newest_duplicate_serves(patch: pytest.MonkeyPatch) -> None:
    def get_cached_block(self: BlockPool, key: bytes) -> Block | None:
        found = self.cached_blocks(key)
        return found[-1] if found else None

    def cached_prefix(self: BlockPool, hashes: Sequence[bytes], suffix: bytes) -> list[Block]:
        found: list[Block] = []
        for name in hashes:
            block = get_cached_block(self, name + suffix)
            if block is None:
                break
            found.append(block)
        return found

    patch.setattr(BlockPool, "get_cached_block", get_cached_block)
    patch.setattr(BlockPool, "cached_prefix", cached_prefix)


def _find_with(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    for one in (UnitaryCoordinator, HybridCoordinator):
        find = one.find
        patch.setattr(one, "find", lambda *a, find=find: change(find, *a))


def last_token_may_be_hit(patch: pytest.MonkeyPatch) -> None:
    _find_with(patch, lambda find, self, hashes, limit: find(self, hashes, limit + 1))


def no_eagle_drop(patch: pytest.MonkeyPatch) -> None:
    for one in (FullAttentionGroup, SlidingWindowGroup):
        find = one.find
        patch.setattr(one, "find", lambda *a, find=find, drop: find(*a, drop=False))


def no_retention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingWindowGroup, "kept", lambda *a: None)


def no_prompt_end_inside_a_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullAttentionGroup, "cache_prompt_end", lambda *a: 0)


def no_window_trimming(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVGroup, "trim", lambda *a: None)


def tokens_in_flight_ignored(patch: pytest.MonkeyPatch) -> None:
    trim = KVCacheManager._trim

    def trim_at_once(self: KVCacheManager, request: Any, total: int) -> None:
        kept, request.num_in_flight_tokens = request.num_in_flight_tokens, 0
        trim(self, request, total)
        request.num_in_flight_tokens = kept

    patch.setattr(KVCacheManager, "_trim", trim_at_once)


def no_watermark(patch: pytest.MonkeyPatch) -> None:
    init = KVCacheManager.__init__

    def without(self: KVCacheManager, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "watermark": 0.0})

    patch.setattr(KVCacheManager, "__init__", without)


def no_rounding_to_the_alignment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HybridCoordinator, "cacheable_tokens", lambda self, group, tokens: tokens)


def no_junction(patch: pytest.MonkeyPatch) -> None:
    boundaries = CacheRules.replay_boundaries

    def without(self: CacheRules, request: Any) -> tuple[int, ...]:
        kept, request.junction_tokens = request.junction_tokens, 0
        found = boundaries(self, request)
        request.junction_tokens = kept
        return found

    patch.setattr(CacheRules, "replay_boundaries", without)


def no_admission_cap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingWindowGroup, "admission_cap", lambda self, blocks: blocks)


@pytest.mark.parametrize(
    "plant",
    [
        all_frees_to_the_tail,
        forward_free_order,
        newest_duplicate_serves,
        last_token_may_be_hit,
        no_eagle_drop,
        no_retention,
        no_prompt_end_inside_a_block,
        no_window_trimming,
        tokens_in_flight_ignored,
        no_watermark,
        no_rounding_to_the_alignment,
        no_junction,
        no_admission_cap,
    ],
)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = records()
    plant(monkeypatch)
    with pytest.raises((AssertionError, MisuseError)):
        replay(lines)
