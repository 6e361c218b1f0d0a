"""Whose shard lies where in a record, for every shape of ranks."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.fabricated import BLOCK, LAYER_BYTES, cache_of, full, hands, mla, window
from tests.scripted import Bench

from ebbtide.config import capacity_table, load_config
from ebbtide.connectors.vllm.announce import Announcements
from ebbtide.connectors.vllm.cache_groups import replicas_of, taking_part
from ebbtide.connectors.vllm.geometry import Geometry
from ebbtide.connectors.vllm.metadata import Handshake
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ebbtide.connectors.vllm.geometry import Rank

HEADS = 8  # of the model
LAYERS = 2  # of a group and rank


def heads(tp: int, total: int = HEADS) -> Any:
    return full(max(1, total // tp), shards=total)


def assert_exact_cover(geometry: Geometry, ranks: dict[Rank, Handshake]) -> None:
    """Per group: the shards of the writers fill the record without a hole or an overlap."""
    places = sorted(ranks)
    for group in geometry.groups.all:
        spans: dict[int, int] = {}
        held = 0
        for index, place in enumerate(places):
            shard = ranks[place].shards.get(group.number)
            if shard is None:
                continue
            start = geometry.shard_offsets[index][group.number]
            held += 1
            assert spans.setdefault(start, start + shard.record_bytes) == start + shard.record_bytes
        edges = sorted(spans.items())
        assert edges[0][0] == 0
        assert edges[-1][1] == group.record_bytes
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(edges))
        assert len(edges) == geometry.writers[group.number] <= held


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_writes_its_heads_side_by_side(tp: int, pp: int) -> None:
    cache = cache_of(heads(tp), layers=LAYERS)
    ranks = hands(cache, tp=tp, pp=pp)
    geometry = Geometry.of(cache, ranks)
    shard = HEADS // tp * LAYERS * LAYER_BYTES
    assert geometry.ranks == tp * pp
    assert geometry.writers == {0: tp * pp}
    assert geometry.shard_offsets == tuple((index * shard,) for index in range(tp * pp))
    assert geometry.groups.all[0].record_bytes == tp * pp * shard
    assert_exact_cover(geometry, ranks)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_latents_that_all_ranks_hold_are_stored_once(tp: int, pp: int) -> None:
    cache = cache_of(mla(), layers=LAYERS)
    ranks = hands(cache, tp=tp, pp=pp)
    geometry = Geometry.of(cache, ranks)
    assert replicas_of(mla(), tp) == tp
    assert geometry.writers == {0: pp}
    assert geometry.groups.all[0].record_bytes == pp * LAYERS * LAYER_BYTES
    stages = [stage for stage in range(pp) for _ in range(tp)]
    assert geometry.shard_offsets == tuple((s * LAYERS * LAYER_BYTES,) for s in stages)
    assert_exact_cover(geometry, ranks)


@pytest.mark.parametrize(("total", "tp"), [(1, 2), (1, 4), (2, 4), (2, 8), (4, 8)])
def test_fewer_heads_than_ranks_are_stored_once_each(total: int, tp: int) -> None:
    cache = cache_of(heads(tp, total), layers=LAYERS)
    ranks = hands(cache, tp=tp)
    geometry = Geometry.of(cache, ranks)
    one = LAYERS * LAYER_BYTES
    assert geometry.writers == {0: total}
    assert geometry.groups.all[0].record_bytes == total * one
    assert [offset for (offset,) in geometry.shard_offsets] == [
        rank // (tp // total) * one for rank in range(tp)
    ]
    assert_exact_cover(geometry, ranks)


def test_unknown_replication_counts_as_none() -> None:
    cache = cache_of(full(1, shards=None))
    assert Geometry.of(cache, hands(cache, tp=4)).writers == {0: 4}


def test_stages_without_layers_of_a_group_have_no_shard_of_it() -> None:
    cache = cache_of(full(4), window(4), layers=LAYERS)
    ranks = hands(cache, tp=2, pp=2, without=[(0, 1)])
    geometry = Geometry.of(cache, ranks)
    shard = 4 * LAYERS * LAYER_BYTES
    assert geometry.writers == {0: 4, 1: 2}
    assert [group.record_bytes for group in geometry.groups.all] == [4 * shard, 2 * shard]
    assert geometry.shard_offsets == ((0, 0), (shard, 0), (2 * shard, 0), (3 * shard, shard))
    assert [group.window for group in geometry.groups.all] == [None, 128]
    assert_exact_cover(geometry, ranks)


def test_p35_groups_that_vllm_does_not_cache_leave_a_gap_in_the_numbers() -> None:
    cache = cache_of(full(4), window(4), full(2))
    cache.kv_cache_groups[1].enable_kv_transfer = False
    ranks = {place: Handshake({n: s for n, s in one.shards.items() if n != 1}, "", "float32")
             for place, one in hands(cache, tp=2).items()}  # fmt: skip
    geometry = Geometry.of(cache, ranks)
    assert sorted(geometry.writers) == [0, 2]
    assert [group.number for group in geometry.groups.all] == [0, 2]
    assert all(len(offsets) == 3 for offsets in geometry.shard_offsets)
    assert_exact_cover(geometry, ranks)


def any_engine(chance: random.Random) -> tuple[KVCacheConfig, dict[Rank, Handshake]]:
    tp, pp = chance.choice([1, 2, 4, 8]), chance.choice([1, 2, 3])
    kinds: list[Callable[[], Any]] = [
        lambda: heads(tp, chance.choice([1, 2, 4, 8, 16])),
        lambda: window(max(1, 8 // tp), shards=8),
        mla,
    ]
    count = chance.randint(1, 4)
    cache = cache_of(*(chance.choice(kinds)() for _ in range(count)), layers=chance.randint(1, 3))
    without = [
        (stage, number)
        for number in range(count)
        for stage in chance.sample(range(pp), chance.randint(0, pp - 1))
    ]
    ranks = hands(cache, tp=tp, pp=pp, without=without)
    grown: dict[tuple[int, int], int] = {}  # stages need not have equally many layers
    for (stage, _), one in ranks.items():
        for number, shard in one.shards.items():
            size = grown.setdefault((stage, number), chance.randint(1, 3)) * shard.record_bytes
            one.shards[number] = replace(shard, record_bytes=size)
    return cache, ranks


@pytest.mark.parametrize("seed", range(200))
def test_shards_of_any_engine_cover_the_record_exactly(seed: int) -> None:
    cache, ranks = any_engine(random.Random(seed))
    geometry = Geometry.of(cache, ranks)
    assert geometry.ranks == len(ranks) == len(geometry.shard_offsets)
    assert_exact_cover(geometry, ranks)


@pytest.mark.parametrize("change", [{"record_bytes": 512}, {"layout": "other"}, {"replicas": 1}])
def test_replicas_that_differ_are_refused(change: dict[str, Any]) -> None:
    cache = cache_of(mla())
    ranks = hands(cache, tp=4)
    if "replicas" in change:
        ranks[0, 2].shards[0] = replace(ranks[0, 2].shards[0], replicas=1)
        change = {"record_bytes": 512}  # rank 3 now stands for rank 0's bytes, and differs
    ranks[0, 3].shards[0] = replace(ranks[0, 3].shards[0], **change)
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        Geometry.of(cache, ranks)


def test_a_group_of_which_nobody_has_a_layer_is_refused() -> None:
    cache = cache_of(full(), window())
    with pytest.raises(ConfigError, match="group 1"):
        Geometry.of(cache, hands(cache, without=[(0, 1)]))


def test_block_sizes_that_the_hash_chain_cannot_name_are_refused() -> None:
    cache = cache_of(full())
    cache.hash_block_size = BLOCK * 2
    with pytest.raises(ConfigError, match="--block-size"):
        Geometry.of(cache, hands(cache))


def odd_specs() -> list[Any]:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        RSWASpec,
        SlidingWindowMLASpec,
        UniformTypeKVCacheSpecs,
    )

    common: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 32,
        "dtype": torch.float32,
    }
    rswa = RSWASpec(**common, rswa_window=64)
    return [
        MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,)),
        ChunkedLocalAttentionSpec(**common, attention_chunk_size=64),
        SlidingWindowMLASpec(**common, sliding_window=64),
        rswa,
        UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": full(), "b": rswa}),
    ]


@pytest.mark.parametrize("index", range(5))
def test_groups_that_cannot_be_restored_are_refused_by_name(index: int) -> None:
    cache = cache_of(full(), odd_specs()[index])
    with pytest.raises(ConfigError, match=r"group 1 holds .*run this model without ebbtide"):
        taking_part(cache)


def test_a_model_without_any_cacheable_group_is_refused() -> None:
    cache = cache_of(full())
    cache.kv_cache_groups[0].enable_kv_transfer = False
    with pytest.raises(ConfigError, match="Run this model without ebbtide"):
        taking_part(cache)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_p73_the_plan_of_all_ranks_is_said_at_the_start(
    tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes are totals: the ranks' parts add up to them, but for less than a block a rank."""
    cache = cache_of(heads(tp), layers=LAYERS)
    geometry = Geometry.of(cache, hands(cache, tp=tp))
    (group,) = geometry.groups.all
    assert geometry.shard_bytes(group) == [group.record_bytes // tp] * tp
    config = load_config({"memory": {"capacity": "50GiB"}}, {}).config
    bench = Bench(groups=geometry.groups, ranks=geometry.ranks, writers=geometry.writers)
    settings: Any = SimpleNamespace(config=config)
    announce = Announcements(settings)
    with caplog.at_level(logging.INFO):
        announce.step(bench.half, geometry)
        announce.step(bench.half, geometry)
    (plan,) = [line for line in caplog.messages if "KV group 0 alone" in line]
    assert plan.endswith("\n" + capacity_table(config, [group.record_bytes // tp] * tp))
    assert plan.splitlines()[2].split()[:2] == ["memory", "50GiB"]
