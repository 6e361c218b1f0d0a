"""KV groups of several kinds over one pool: windows, chunks, hits that all groups agree on."""

from collections.abc import Sequence
from typing import Any

import pytest

from ebbtide.allocator import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    KVCacheManager,
    Request,
    SlidingWindow,
    group_spec,
    pack_key,
)
from ebbtide.errors import ConfigError, MisuseError

FULL, WINDOW = FullAttention(4), SlidingWindow(4, 8)


def make(*groups: GroupSpec, num_blocks: int = 60, **kwargs: Any) -> KVCacheManager:
    return KVCacheManager(num_blocks, groups, kwargs.pop("max_model_len", 4096), **kwargs)


def request(cache: KVCacheManager, name: str, tokens: Sequence[int]) -> Request:
    return Request(name, list(tokens), hash_block_size=cache.rules.hash_block_size)


def admit(cache: KVCacheManager, req: Request, **kwargs: Any) -> int:
    computed = cache.get_computed_blocks(req)
    req.junction_tokens = computed.junction_tokens
    new = req.num_tokens - computed.num_tokens
    assert cache.allocate_slots(req, new, computed, **kwargs) is not None
    req.num_computed_tokens, req.is_running = req.num_tokens, True
    cache.check_integrity()
    return computed.num_tokens


def hit(cache: KVCacheManager, tokens: Sequence[int]) -> tuple[int, int]:
    computed = cache.get_computed_blocks(request(cache, "look", tokens))
    return computed.num_tokens, computed.junction_tokens


def cached(cache: KVCacheManager, group: int) -> list[int]:
    """Ends, in tokens, of the group's cached blocks."""
    suffix = group.to_bytes(4, "big")
    keys = [block for block in cache.pool.blocks if block.key and block.key.endswith(suffix)]
    return sorted(block.num_tokens for block in keys)


# -- kinds and rules ----------------------------------------------------------------------------


def test_groups_are_named_as_in_events() -> None:
    assert group_spec("full_attention", 16) == FullAttention(16)
    assert group_spec("sliding_window", 16, 64) == SlidingWindow(16, 64)
    assert group_spec("chunked_local_attention", 16, 64) == ChunkedLocal(16, 64)


@pytest.mark.parametrize("kind", ["mamba", "cross_attention"])
def test_kinds_that_are_not_built_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind}' are not built yet"):
        group_spec(kind, 16)


def test_an_unknown_kind_is_refused_with_a_guess() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'sliding_window'"):
        group_spec("sliding_windows", 16, 64)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("full_attention", (0, None)),
        ("full_attention", (16, 8)),
        ("sliding_window", (16, None)),
        ("chunked_local_attention", (16, -1)),
    ],
)
def test_sizes_that_no_table_can_have_are_refused(kind: str, sizes: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigError):
        group_spec(kind, *sizes)


@pytest.mark.parametrize(
    ("groups", "settings"),
    [
        ((FULL, FullAttention(6)), {"hash_block_size": 4}),
        ((FULL,), {"hash_block_size": 2}),
        ((FULL,), {"retention_interval": 8}),  # nothing sparse to retain
        ((FULL, WINDOW), {"retention_interval": 6}),
        ((FULL, WINDOW), {"retention_interval": -4}),
        ((FullAttention(8), ChunkedLocal(4, 16)), {}),
        ((FULL, ChunkedLocal(4, 16)), {"use_eagle": True}),
        ((FULL,), {"max_model_len": 0}),
        ((FULL,), {"policy": "random"}),
    ],
)
def test_rules_that_exclude_each_other_are_refused(
    groups: tuple[GroupSpec, ...], settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        make(*groups, **settings)


# -- windows ------------------------------------------------------------------------------------


def test_blocks_out_of_the_window_are_given_back() -> None:
    cache = make(WINDOW, num_blocks=9)
    req = request(cache, "a", range(30))
    for _ in range(7):  # more blocks than the pool has, one after the other
        assert cache.allocate_slots(req, 4) is not None
        req.num_computed_tokens += 4
        cache.check_integrity()
    assert cache.get_block_ids("a") == ([0, 0, 0, 0, 2, 3, 1],)  # what was given back is next
    assert cache.pool.num_free_blocks == 5
    cache.remove_skipped_blocks(req, 28)
    assert cache.get_block_ids("a") == ([0, 0, 0, 0, 0, 3, 1],)


def test_tokens_still_in_flight_keep_their_window() -> None:
    cache = make(WINDOW)
    req = request(cache, "a", range(40))
    cache.allocate_slots(req, 24)
    req.num_computed_tokens, req.num_in_flight_tokens = 24, 8
    cache.allocate_slots(req, 4)
    assert cache.get_block_ids("a")[0][:3] == [0, 0, 3]
    req.num_in_flight_tokens = 0
    cache.allocate_slots(req, 4)
    assert cache.get_block_ids("a")[0][:5] == [0, 0, 0, 0, 5]


@pytest.mark.parametrize(
    ("interval", "ends", "resent", "shared"),
    [(None, [8, 12, 16, 20, 24, 28], 28, 16), (0, [24, 28], 28, 0), (16, [12, 16, 24, 28], 28, 16)],
)
def test_a_window_keeps_what_its_retention_says(
    interval: int | None, ends: list[int], resent: int, shared: int
) -> None:
    cache = make(WINDOW, retention_interval=interval)
    req = request(cache, "a", range(30))
    admit(cache, req)
    found = cached(cache, 0)
    assert [end for end in found if end >= 8] == ends
    cache.free(req)
    assert hit(cache, range(30))[0] == resent
    assert hit(cache, [*range(18), *range(100, 112)])[0] == shared


def test_a_junction_is_kept_for_the_next_who_shares() -> None:
    cache = make(FULL, WINDOW)
    first = request(cache, "a", range(30))
    admit(cache, first)
    shared = [*range(14), *range(100, 110)]
    assert hit(cache, shared) == (0, 12)
    second = request(cache, "b", shared)
    admit(cache, second)
    assert hit(cache, [*range(14), *range(200, 210)]) == (12, 0)


def test_a_whole_request_needs_no_more_than_its_window_at_once() -> None:
    cache = make(WINDOW, num_blocks=8, max_in_flight_tokens=8)
    long = request(cache, "a", range(400))
    assert cache.allocate_slots(long, 8, full_sequence_must_fit=True) is not None
    full = make(FULL, num_blocks=8, max_in_flight_tokens=8)
    long = request(full, "a", range(400))
    assert full.allocate_slots(long, 8, full_sequence_must_fit=True) is None


# -- several groups -----------------------------------------------------------------------------


def test_all_groups_must_have_their_part_of_a_hit() -> None:
    cache = make(FULL, WINDOW, retention_interval=None)
    req = request(cache, "a", range(24))
    admit(cache, req)
    full, window = cache.get_block_ids("a")
    cache.free(req)
    assert hit(cache, range(25)) == (24, 0)
    cache.evict_blocks([window[5]])
    assert hit(cache, range(25)) == (20, 24)
    cache.evict_blocks([full[2]])
    assert hit(cache, range(25)) == (8, 0)
    assert admit(cache, request(cache, "b", range(25))) == 8


def test_hits_of_every_group_are_held_before_any_block_is_taken() -> None:
    cache = make(FULL, FullAttention(4), num_blocks=9)
    first = request(cache, "a", range(13))
    admit(cache, first)  # 8 blocks
    cache.free(first)
    again = request(cache, "b", range(16))
    computed = cache.get_computed_blocks(again)
    assert computed.num_tokens == 12
    assert cache.allocate_slots(again, 0, computed, num_external_computed_tokens=4) is not None
    kept = [block.block_id for column in computed.blocks for block in column]
    assert [ids[:3] for ids in cache.get_block_ids("b")] == [kept[:3], kept[3:]]
    cache.check_integrity()


def test_chunks_before_the_last_count_as_hit_unseen() -> None:
    cache = make(ChunkedLocal(4, 8))
    assert hit(cache, range(21)) == (16, 0)  # alone it finds tokens in an empty cache
    beside = make(FULL, ChunkedLocal(4, 8))
    assert hit(beside, range(21)) == (0, 0)
    req = request(beside, "a", range(21))
    admit(beside, req)
    assert hit(beside, range(21)) == (20, 0)
    computed = beside.get_computed_blocks(request(beside, "b", range(21)))
    assert [block.is_null for block in computed.blocks[1]] == [True] * 4 + [False]


def test_larger_blocks_are_named_by_their_last_hash() -> None:
    cache = make(FULL, FullAttention(8))
    req = request(cache, "a", range(24))
    admit(cache, req)
    assert cached(cache, 0) == [4, 8, 12, 16, 20, 24]
    last = cache.pool.get_cached_block(pack_key(req.block_hashes[5], 1))
    assert last is not None
    assert (last.block_id, last.num_tokens) == (cache.get_block_ids("a")[1][2], 24)


def test_the_last_boundary_of_a_prompt_is_findable_inside_its_block() -> None:
    cache = make(FULL, FullAttention(8))
    req = request(cache, "a", range(21))
    admit(cache, req)
    assert cached(cache, 1) == [8, 16]  # 20 is not a multiple of the alignment: not computed yet
    req.append_output([1, 2, 3])
    cache.allocate_slots(req, 3)
    block = cache.pool.blocks[cache.get_block_ids("a")[1][2]]
    names = [pack_key(req.block_hashes[number], 1) for number in (5, 4)]
    assert cache.pool.keys_of(block) == names
    cache.evict_blocks([block.block_id])
    assert cache.pool.keys_of(block) == []
    cache.check_integrity()


def test_eagle_gives_the_last_block_of_a_hit_up() -> None:
    cache = make(FULL, use_eagle=True)
    admit(cache, request(cache, "a", range(17)))
    assert hit(cache, range(17))[0] == 12


def test_tokens_that_may_be_computed_again_are_not_cached() -> None:
    cache = make(FULL, prefill_lookahead_tokens=3)
    req = request(cache, "a", range(17))
    admit(cache, req)
    assert cached(cache, 0) == [4, 8, 12]  # 17 - 2 tokens are final


# -- the other ways out -------------------------------------------------------------------------


def test_tables_can_be_forgotten_before_their_blocks_are_freed() -> None:
    cache = make(FULL, WINDOW)
    req = request(cache, "a", range(9))
    admit(cache, req)
    blocks = cache.pop_blocks_for_free(req)
    assert [block.block_id for block in blocks] == [1, 2, 3, 4, 5, 6]
    assert cache.get_block_ids("a") == ([], [])
    assert cache.pool.num_free_blocks == 53
    cache.pool.free(reversed(blocks))
    cache.check_integrity()
    assert cache.usage == 0


def test_a_hit_can_be_cut() -> None:
    cache = make(FULL, WINDOW, retention_interval=None)
    req = request(cache, "a", range(25))
    admit(cache, req)
    computed = cache.get_computed_blocks(request(cache, "b", range(25)))
    cut = cache.truncate_computed_blocks(computed, 16)
    assert (cut.num_tokens, [len(column) for column in cut.blocks]) == (16, [4, 4])
    for wrong in (14, 28):
        with pytest.raises(MisuseError, match="block boundaries"):
            cache.truncate_computed_blocks(computed, wrong)


def test_cached_tokens_of_a_request_are_estimated() -> None:
    cache = make(FULL, WINDOW)
    req = request(cache, "a", range(26))
    assert cache.estimate_cached_tokens(req) == 0
    admit(cache, req)
    assert cache.estimate_cached_tokens(req) == 24
    assert cache.get_block_ids_for_computed_tokens("a", 9) == ([1, 2, 3], [8, 9, 10])
    cache.evict_blocks(cache.get_block_ids("a")[1])
    assert cache.estimate_cached_tokens(req) == 0
