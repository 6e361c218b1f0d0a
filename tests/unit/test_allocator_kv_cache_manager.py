"""Admission, growth and release of requests over one full-attention group."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ebbtide.allocator import (
    FullAttention,
    KVCacheManager,
    PrefixCacheStats,
    Request,
    hash_blocks,
    pack_key,
)
from ebbtide.errors import ConfigError, MisuseError


def make(num_blocks: int = 11, block_size: int = 4, **kwargs: Any) -> KVCacheManager:
    kwargs.setdefault("track_newly_cached", True)
    groups = [FullAttention(block_size)]
    return KVCacheManager(num_blocks, groups, kwargs.pop("max_model_len", 8192), **kwargs)


def table(cache: KVCacheManager, name: str) -> list[int]:
    (ids,) = cache.get_block_ids(name)
    return ids


def keys(req: Request) -> list[bytes]:
    return [pack_key(block_hash, 0) for block_hash in req.block_hashes]


def request(name: str, tokens: Sequence[int], block_size: int = 4, **kwargs: Any) -> Request:
    return Request(name, tokens, hash_block_size=block_size, **kwargs)


def admit(cache: KVCacheManager, req: Request, **kwargs: Any) -> int | None:
    """What a scheduler does with a whole prompt. The tokens hit, or None if refused."""
    computed = cache.get_computed_blocks(req)
    new = req.num_tokens - computed.num_tokens
    if cache.allocate_slots(req, new, computed, **kwargs) is None:
        return None
    req.num_computed_tokens, req.is_running = req.num_tokens, True
    cache.check_integrity()
    return computed.num_tokens


def decode(cache: KVCacheManager, req: Request, token: int) -> None:
    req.append_output([token])
    assert cache.allocate_slots(req, 1) is not None
    req.num_computed_tokens += 1


def queue(cache: KVCacheManager) -> list[int]:
    return [block.block_id for block in cache.pool.peek_free(len(cache.pool.blocks))]


def cached_ids(cache: KVCacheManager) -> list[int]:
    return [b.block_id for b in cache.pool.blocks if b.key is not None]


def test_the_six_step_example() -> None:
    cache = make(11)
    r0 = request("r0", range(15))
    r1 = request("r1", [*range(10), 50, 51, 52, 53])
    r2 = request("r2", [*range(12), *range(60, 77)])
    assert queue(cache) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]

    assert admit(cache, r0) == 0
    assert table(cache, "r0") == [1, 2, 3, 4]
    assert (queue(cache), cached_ids(cache)) == ([5, 6, 7, 8, 9, 10], [1, 2, 3])
    decode(cache, r0, 100)
    assert (queue(cache), cached_ids(cache)) == ([5, 6, 7, 8, 9, 10], [1, 2, 3, 4])
    decode(cache, r0, 101)
    assert table(cache, "r0") == [1, 2, 3, 4, 5]
    assert queue(cache) == [6, 7, 8, 9, 10]

    assert admit(cache, r1) == 8
    assert table(cache, "r1") == [1, 2, 6, 7]
    assert (queue(cache), cached_ids(cache)) == ([8, 9, 10], [1, 2, 3, 4, 6])
    cache.free(r0)
    assert (queue(cache), cached_ids(cache)) == ([5, 8, 9, 10, 4, 3], [1, 2, 3, 4, 6])
    cache.free(r1)
    assert queue(cache) == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]

    assert admit(cache, r2) == 12
    assert table(cache, "r2") == [1, 2, 3, 7, 5, 8, 9, 10]
    assert (queue(cache), cached_ids(cache)) == ([4, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (4096, 4080)]
)
def test_p28_a_fully_cached_prompt_leaves_its_last_token_to_compute(length: int, hit: int) -> None:
    cache = make(600, 16)
    prompt = [7 * i % 1000 for i in range(length)]
    stored = request("stored", prompt, 16)
    assert admit(cache, stored) == 0
    again = request("again", prompt, 16)
    for _ in range(3):  # a lookup changes nothing
        assert cache.get_computed_blocks(again).num_tokens == hit
    assert admit(cache, again) == hit
    cache.free(stored)
    cache.free(again)
    cache.check_integrity()
    assert cache.usage == 0


def test_lookups_stop_at_the_first_block_missing() -> None:
    cache = make()
    first = request("a", range(16))
    admit(cache, first)
    cache.evict_blocks([table(cache, "a")[1]])
    assert cache.get_computed_blocks(request("b", range(17))).num_tokens == 4


def test_salted_requests_share_nothing() -> None:
    cache = make()
    admit(cache, request("a", range(9), cache_salt="tenant"))
    assert admit(cache, request("b", range(9))) == 0
    assert admit(cache, request("c", range(9), cache_salt="tenant")) == 8


def test_caching_off_hits_nothing() -> None:
    cache = make(enable_caching=False)
    admit(cache, request("a", range(9)))
    assert admit(cache, request("b", range(9))) == 0
    cache.cache_blocks(request("b", range(9)), 9)
    assert (cached_ids(cache), cache.take_newly_cached()) == ([], [])
    assert cache.take_stats() == PrefixCacheStats()


def test_requests_that_skip_reading_still_write() -> None:
    cache = make()
    admit(cache, request("a", range(9), skip_reading_prefix_cache=True))
    assert admit(cache, request("b", range(9), skip_reading_prefix_cache=True)) == 0
    assert admit(cache, request("c", range(9))) == 8
    assert cache.take_stats() == PrefixCacheStats(requests=1, queries=9, hits=8)


def test_a_preempted_request_finds_its_own_output() -> None:
    cache = make()
    req = request("a", range(6))
    admit(cache, req)
    for token in (7, 8, 9):
        decode(cache, req, token)
    cache.free(req)
    req.num_computed_tokens, req.is_running = 0, False
    req.num_preemptions += 1
    assert admit(cache, req) == 8
    assert cache.take_stats() == PrefixCacheStats(
        requests=1, queries=6, preempted_requests=1, preempted_queries=9, preempted_hits=8
    )
    assert cache.take_stats() == PrefixCacheStats()


def test_chunked_admission_caches_what_each_chunk_fills() -> None:
    cache = make()
    req = request("a", range(14))
    for new, cached in ((6, 1), (6, 3), (2, 3)):
        assert cache.allocate_slots(req, new) is not None
        req.num_computed_tokens += new
        assert len(cached_ids(cache)) == cached
    assert cache.take_stats().queries == 14  # counted once
    assert table(cache, "a") == [1, 2, 3, 4]


def test_lookahead_slots_are_allocated_and_never_cached() -> None:
    cache = make()
    req = request("a", range(6))
    got = cache.allocate_slots(req, 6, num_lookahead_tokens=3)
    assert got is not None
    assert [block.block_id for block in got[0]] == [1, 2, 3]
    drafts = make()
    assert drafts.allocate_slots(request("a", range(6)), 8) is not None  # 2 of them drafts
    assert cached_ids(drafts) == [1]


def test_everything_is_cut_at_the_models_length() -> None:
    cache = make(max_model_len=8)
    req = request("a", range(10))
    assert cache.allocate_slots(req, 10, num_lookahead_tokens=9) is not None
    assert table(cache, "a") == [1, 2]
    assert cached_ids(cache) == [1, 2]


def test_external_tokens_are_in_the_table_but_not_in_the_answer() -> None:
    cache = make()
    admit(cache, request("a", range(5)))
    req = request("b", range(15))
    computed = cache.get_computed_blocks(req)
    got = cache.allocate_slots(req, 3, computed, num_external_computed_tokens=8)
    assert got is not None
    assert [block.block_id for block in got[0]] == [5]
    assert table(cache, "b") == [1, 3, 4, 5]
    assert cached_ids(cache) == [1, 3, 4]
    cache.check_integrity()


def test_a_delayed_load_is_cached_when_confirmed() -> None:
    cache = make()
    req = request("a", range(13))
    got = cache.allocate_slots(req, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
    assert got == ([],)
    assert (cached_ids(cache), len(table(cache, "a"))) == ([], 3)
    req.num_computed_tokens = 12
    for _ in range(2):
        cache.cache_blocks(req, req.num_computed_tokens)
        assert cached_ids(cache) == [1, 2, 3]
    assert cache.take_newly_cached() == list(zip([1, 2, 3], keys(req), strict=True))


def test_hits_that_are_free_count_against_the_free_blocks() -> None:
    cache = make(5)
    old = request("old", range(12))
    admit(cache, old)
    cache.free(old)
    again = request("again", range(17))
    computed = cache.get_computed_blocks(again)
    assert computed.num_tokens == 12
    before = queue(cache)
    assert cache.allocate_slots(again, 5, computed) is None  # 3 hits and 2 more of 4
    assert (queue(cache), table(cache, "again")) == (before, [])
    assert cache.allocate_slots(again, 4, computed) is not None
    assert cache.pool.num_free_blocks == 0


def test_watermark_holds_for_admissions_beside_running_requests() -> None:
    cache = make(11, watermark=0.3)  # 3 of 11 blocks
    big = request("big", range(32))
    assert cache.allocate_slots(big, 32) is None
    assert cache.allocate_slots(big, 32, has_scheduled_reqs=False) is not None
    big.num_computed_tokens, big.is_running = 32, True
    big.append_output([1])
    assert cache.allocate_slots(big, 1) is not None
    assert cache.allocate_slots(request("small", [1]), 1) is None


def test_full_sequence_must_fit_looks_at_the_whole_request() -> None:
    cache = make(5)
    long = request("long", range(17))
    assert cache.allocate_slots(long, 4, full_sequence_must_fit=True) is None
    assert cache.allocate_slots(long, 4, reserved_blocks=4) is None
    assert cache.allocate_slots(long, 4, reserved_blocks=3) is not None
    fits = request("fits", range(100, 112))
    assert cache.allocate_slots(fits, 4, full_sequence_must_fit=True, reserved_blocks=2) is not None


def test_newly_cached_blocks_are_told_once_and_only_if_still_so() -> None:
    cache = make(4)
    first = request("a", range(8))
    admit(cache, first)
    assert cache.take_newly_cached() == [(1, keys(first)[0]), (2, keys(first)[1])]
    assert cache.take_newly_cached() == []
    cache.free(first)
    second, third = request("b", range(20, 32)), request("c", range(40, 44))
    admit(cache, second)  # takes all three
    cache.free(second)
    admit(cache, third)  # evicts the end of b
    b0, b1, _ = keys(second)
    assert cache.take_newly_cached() == [(3, b0), (2, b1), (1, keys(third)[0])]


def test_newly_cached_never_outgrows_the_pool() -> None:
    cache = make(4)
    for number in range(50):
        req = request("a", range(number * 100, number * 100 + 8))
        admit(cache, req)
        cache.free(req)
    assert cache._newly_cached is not None
    assert len(cache._newly_cached) <= 3


def test_reset_needs_every_request_gone() -> None:
    cache = make()
    req = request("a", range(9))
    admit(cache, req)
    assert not cache.reset_prefix_cache()
    assert not cache.take_stats().reset
    cache.free(req)
    assert cache.reset_prefix_cache()
    assert cache.take_newly_cached() == []
    assert cache.take_stats().reset
    assert not cache.take_stats().reset
    assert cache.get_computed_blocks(request("b", range(9))).num_tokens == 0


def test_freeing_an_unknown_request_does_nothing() -> None:
    cache = make()
    cache.free(request("ghost", range(4)))
    assert queue(cache) == list(range(1, 11))


@pytest.mark.parametrize(
    ("new", "kwargs"),
    [
        (0, {}),
        (0, {"num_lookahead_tokens": 4}),
        (-1, {}),
        (4, {"num_external_computed_tokens": -1}),
        (4, {"num_lookahead_tokens": -1}),
        (4, {"reserved_blocks": -1}),
    ],
)
def test_counts_that_make_no_sense_are_refused(new: int, kwargs: dict[str, Any]) -> None:
    cache = make()
    with pytest.raises(MisuseError, match="nothing to allocate"):
        cache.allocate_slots(request("a", range(4)), new, **kwargs)
    assert queue(cache) == list(range(1, 11))


def test_hits_that_are_not_the_requests_own_prefix_are_refused() -> None:
    cache = make()
    owner = request("owner", range(9))
    admit(cache, owner)
    hit = cache.get_computed_blocks(request("x", range(9)))
    with pytest.raises(MisuseError, match="hits are not"):  # another request's
        cache.allocate_slots(request("y", range(50, 60)), 2, hit)
    with pytest.raises(MisuseError, match="hits are not"):  # wrong length
        cache.allocate_slots(request("x", range(9)), 1, hit._replace(num_tokens=7))
    with pytest.raises(MisuseError, match="hits are not"):  # it has blocks already
        cache.allocate_slots(owner, 1, hit)
    cache.evict_blocks([hit.blocks[0][1].block_id])
    with pytest.raises(MisuseError, match="hits are not"):  # stale
        cache.allocate_slots(request("x", range(9)), 1, hit)
    cache.check_integrity()


def test_caching_more_than_there_is_is_refused() -> None:
    cache = make()
    req = request("a", range(8))
    cache.allocate_slots(req, 4)
    for wrong in (8, 9):
        with pytest.raises(MisuseError, match="more tokens to cache"):
            cache.cache_blocks(req, wrong)


def test_other_block_sizes_are_refused() -> None:
    cache = make()
    other = request("a", range(8), block_size=8)
    with pytest.raises(MisuseError, match="another block size"):
        cache.get_computed_blocks(other)
    with pytest.raises(MisuseError, match="another block size"):
        cache.allocate_slots(other, 8)


@pytest.mark.parametrize(
    ("blocks", "size", "length", "watermark"),
    [(0, 4, 8, 0.0), (4, 0, 8, 0.0), (4, 4, 0, 0.0), (4, 4, 8, -0.1), (4, 4, 8, 1.0)],
)
def test_impossible_sizes_are_refused(
    blocks: int, size: int, length: int, watermark: float
) -> None:
    with pytest.raises(ConfigError):
        KVCacheManager(blocks, [FullAttention(size)], length, watermark=watermark)


def test_integrity_check_sees_a_table_without_references() -> None:
    cache = make()
    req = request("a", range(9))
    admit(cache, req)
    tables = cache.groups[0].tables
    tables["b"] = tables["a"]
    with pytest.raises(MisuseError, match="more tables"):
        cache.check_integrity()


# ------------------------------------------------------------------------------ requests


def test_requests_name_their_blocks_as_tokens_arrive() -> None:
    req = request("a", range(6))
    assert req.block_hashes == hash_blocks(range(6), 4)
    for step in ([6], [7], [8, 9, 10, 11, 12], []):
        req.append_output(step)
    assert req.block_hashes == hash_blocks(range(13), 4)
    assert (req.prompt_token_ids, req.output_token_ids) == (list(range(6)), list(range(6, 13)))
    assert req.all_token_ids == list(range(13))
    assert (req.num_prompt_tokens, req.num_tokens) == (6, 13)


def test_requests_take_an_array_as_a_prompt() -> None:
    assert request("a", np.arange(6)).block_hashes == request("a", range(6)).block_hashes  # type: ignore[arg-type]
    assert request("a", np.arange(6)).all_token_ids == list(range(6))  # type: ignore[arg-type]


def test_requests_refuse_ids_that_are_not_ints_at_once() -> None:
    wrong: Any = np.int64(3)
    for prompt in ([wrong, 1, 2, 3, 4], [1, 2, 3, 4, wrong]):
        with pytest.raises(MisuseError, match="int64"):
            request("a", prompt)
    req = request("a", range(3))
    with pytest.raises(MisuseError, match="int64"):
        req.append_output([3, wrong])
    assert (req.num_tokens, req.block_hashes) == (3, [])
