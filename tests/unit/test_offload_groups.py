"""Several KV groups: which prefix is usable, and what a load of it asks for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scripted import Bench

from ebbtide.allocator import Request, pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.groups import KVGroup, KVGroups
from ebbtide.connectors.seam import LoadResult, WorkerReport
from ebbtide.errors import ConfigError
from ebbtide.tiers.reasons import Miss, Place

M, D, NO = Place.MEMORY, Place.DISK, Miss.NEVER_SEEN
HASH_BLOCK = 16
FULL = KVGroup(0, 16, 4096)
WINDOWED = KVGroup(1, 32, 2048, window=64)
HYBRID = KVGroups([FULL, WINDOWED], HASH_BLOCK)

SIZES = st.sampled_from([1, 2, 3, 4, 6])
GROUPS = st.lists(st.tuples(SIZES, st.none() | st.integers(1, 20)), min_size=1, max_size=3)


def usable(groups: KVGroups, held: list[set[int]], start: int, end: int) -> bool:
    """By the definition, token by token: whatever a query at `end` reads must be there."""
    for group, blocks in zip(groups.all, held, strict=True):
        first = 0 if group.window is None else max(0, end - group.window + 1)
        for token in range(max(first, start), end):
            if token // group.block_size not in blocks:
                return False
    return True


@given(
    sizes=GROUPS,
    held=st.lists(st.sets(st.integers(0, 40)), min_size=3, max_size=3),
    start_units=st.integers(0, 3),
    limit=st.integers(0, 40),
)
def test_the_longest_hit_is_what_its_definition_says(
    sizes: list[tuple[int, int | None]], held: list[set[int]], start_units: int, limit: int
) -> None:
    groups = KVGroups([KVGroup(n, size, 1, window) for n, (size, window) in enumerate(sizes)], 1)
    held = held[: len(sizes)]
    start = start_units * groups.alignment
    ends = range(start, limit + 1, groups.alignment)
    expected = max([start, *(end for end in ends if usable(groups, held, start, end))])
    assert groups.longest_hit([blocks.__contains__ for blocks in held], start, limit) == expected


@pytest.mark.parametrize(("window", "block"), [(4096, 32), (100, 16), (17, 16), (16, 16), (1, 16)])
def test_p33_a_window_never_needs_more_blocks_than_it_can_touch(window: int, block: int) -> None:
    """Also where it begins in the middle of a block."""
    group = KVGroup(0, block, 1, window)
    bound = math.ceil((window + block - 1) / block)
    needed_most = 0
    for tokens in range(1, 20_001):
        first = group.first_needed(tokens)
        needed = -(-tokens // block) - first  # of the tokens that are cached
        assert 0 <= needed <= bound
        if needed:  # exactly the blocks that hold one of the tokens in the window
            assert first * block <= max(0, tokens - window + 1) < (first + 1) * block
        needed_most = max(needed_most, needed)
    # Not more than is needed, either: all but the query's own token.
    assert needed_most == math.ceil((window + block - 2) / block)


@pytest.mark.parametrize("window", [4096, 1000])
def test_p33_blocks_before_the_window_are_not_requested(window: int) -> None:
    block = 32
    groups = KVGroups([KVGroup(0, block, 1), KVGroup(1, block, 1, window)], block)
    bound = math.ceil((window + block - 1) / block)
    for length in (1, 33, window, window + 1, window + block + 1, 2 * window + 17, 3 * window):
        bench = Bench(blocks=300, block_size=block, groups=groups)
        units = (length - 1) // block
        bench.arrive("r", length)
        # Nothing is held of the windowed group but what the window reaches.
        first = groups.all[1].first_needed(units * block)
        if units:
            bench.held([M] * units + [NO] * first + [M] * (units - first))
        assert bench.half.matched_tokens("r", 0) == units * block
        table = [0] * first + list(range(1001, 1001 + units + 1 - first))
        bench.half.on_allocated("r", [range(1, units + 2), table], 0, units * block)
        jobs = bench.step().loads
        if not units:
            assert jobs == ()
            continue
        (job,) = jobs
        windowed = [key for key in job.keys if key.endswith(b"\x00\x00\x00\x01")]
        assert len(windowed) == units - first <= bound
        assert len(job.keys) == units + len(windowed)
        assert job.block_ids[units:] == tuple(range(1001, 1001 + units - first))
        result = LoadResult("r", len(job.keys), ("memory",) * len(job.keys))
        assert bench.half.on_report(WorkerReport(loads=[result])) == [result]
        assert bench.half.tally.tokens_by_source["memory"] == units * block
        assert bench.half.faults.count == 0


def test_a_key_is_the_hash_at_the_blocks_end_and_its_group() -> None:
    hashes = Request("r", [1] * 128, hash_block_size=HASH_BLOCK).block_hashes
    assert HYBRID.keys(FULL, hashes, 2, 4) == [pack_key(hashes[n], 0) for n in (2, 3)]
    assert HYBRID.keys(WINDOWED, hashes, 0, 4) == [pack_key(hashes[n], 1) for n in (1, 3, 5, 7)]
    assert HYBRID.keys(WINDOWED, hashes, 1, 1) == []
    assert HYBRID.of_key(pack_key(hashes[0], 1)) is WINDOWED


def test_block_sizes_that_the_chain_cannot_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="hash block size"):
        KVGroups([FULL, KVGroup(1, 24, 1)], HASH_BLOCK)
    with pytest.raises(ConfigError):
        KVGroups([], HASH_BLOCK)


def test_one_lookup_holds_no_more_keys_than_the_wire_carries() -> None:
    asked = HYBRID.askable_tokens(1 << 40)
    assert asked % HYBRID.alignment == 0
    per_unit = sum(HYBRID.alignment // group.block_size for group in HYBRID.all)
    keys = sum(asked // group.block_size for group in HYBRID.all)
    assert wire.KEYS_MAX - per_unit < keys <= wire.KEYS_MAX
    assert HYBRID.askable_tokens(95) == 64


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0), (16, 0), (32, 0), (33, 32), (64, 32), (65, 64), (96, 64), (4096, 4064)],
)
def test_p28_of_several_groups_the_last_token_is_left_to_compute(
    length: int, expected: int
) -> None:
    bench = Bench(groups=HYBRID)
    bench.arrive("r", length)
    if expected:
        bench.held([M] * (expected // 16) + [D] * (expected // 32))
    assert bench.half.matched_tokens("r", 0) == expected
    assert not bench.client.asked


@pytest.mark.parametrize(
    ("full", "windowed", "expected"),
    [
        ([M] * 12, [M] * 6, 192),
        ([M] * 12, [NO, NO, NO, NO, M, M], 192),  # two blocks are all that the window needs
        ([M] * 12, [M, M, M, M, NO, M], 128),
        ([M] * 12, [M, M, M, M, M, NO], 160),
        ([M] * 12, [NO, M, M, NO, M, NO], 96),
        ([M] * 12, [M, NO, NO, NO, NO, NO], 32),
        ([M] * 12, [NO, M, NO, M, NO, M], 0),
        ([M] * 7 + [NO] * 5, [M] * 6, 96),  # the full group ends within a block of the other
        ([NO] + [M] * 11, [M] * 6, 0),
    ],
)
def test_p27_a_hit_ends_where_every_group_has_what_it_needs(
    full: list[int], windowed: list[int], expected: int
) -> None:
    bench = Bench(groups=HYBRID)
    bench.arrive("r", 193)
    bench.held([*full, *windowed])
    assert bench.half.matched_tokens("r", 0) == expected
    for local in (32, 64, 96, 128):
        found = bench.half.matched_tokens("r", local)
        assert found is not None
        # What the device has, it has for all groups: no window there needs the store.
        held = [{n for n, c in enumerate(codes) if c == M} for codes in (full, windowed)]
        ends = range(local, 193, 32)
        assert local + found == max(e for e in ends if usable(HYBRID, held, local, e))


def test_a_block_that_any_group_is_putting_is_waited_for() -> None:
    bench = Bench(groups=HYBRID)
    bench.arrive("r", 65)
    bench.held([M] * 4 + [M, Place.PENDING])
    assert bench.half.matched_tokens("r", 0) is None
    bench.held([M] * 4 + [M, M])
    assert bench.half.matched_tokens("r", 0) == 64


def test_a_load_fetches_each_group_and_a_failure_costs_the_whole_request() -> None:
    bench = Bench(groups=HYBRID)
    hashes = bench.arrive("r", 150)
    bench.held([M] * 8 + [NO, D, D, D])
    assert bench.half.matched_tokens("r", 32) == 96
    tables = [range(1, 11), [0, 0, 21, 22, 23]]  # the window has passed 64 tokens
    bench.half.on_allocated("r", tables, 32, 96)
    (job,) = bench.step().loads
    assert job.keys == (
        *(pack_key(hashes[n], 0) for n in range(2, 8)),
        *(pack_key(hashes[n], 1) for n in (5, 7)),
    )
    assert job.block_ids == (3, 4, 5, 6, 7, 8, 21, 22)
    result = LoadResult("r", 7, ("memory",) * 7 + ("corrupt",))
    assert bench.half.on_report(WorkerReport(loads=[result])) == [result]
    assert bench.half.misses_by_reason("r") == {
        "corrupt": 1,
        "behind_miss": 2,
        "partial_block": 1,
    }
    tally = bench.half.tally
    assert +tally.tokens_by_source == {"device": 32, "computed": 118}
    assert sum(tally.misses.values()) + 32 // 32 == tally.prompt_blocks == 5
    assert bench.half.matched_tokens("r", 32) == 0  # once is enough
    assert bench.half.faults.count == 0


def test_units_are_counted_by_the_slowest_tier_that_they_needed() -> None:
    bench = Bench(groups=HYBRID)
    bench.arrive("r", 129)
    bench.held([M] * 8 + [NO, NO, M, D])
    assert bench.half.matched_tokens("r", 0) == 128
    bench.half.on_allocated("r", [range(1, 10), [0, 0, 21, 22, 23]], 0, 128)
    bench.step()
    sources = ("memory", "memory", "disk", "memory") + ("memory",) * 4 + ("memory", "disk")
    bench.half.on_report(WorkerReport(loads=[LoadResult("r", 10, sources)]))
    assert +bench.half.tally.tokens_by_source == {"memory": 64, "disk": 64, "computed": 1}
    assert bench.half.faults.count == 0
