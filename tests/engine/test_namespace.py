"""Which engines share blocks: by what they would call their blocks. Only one test starts one."""

from __future__ import annotations

import copy
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.fabricated import (
    BLOCK,
    cache_of,
    described,
    digest,
    full,
    hands,
    mla,
    vllm_config,
    window,
    with_model_values,
    with_values,
    without_seed,
)

from ebbtide.connectors.offload.groups import KVGroups
from ebbtide.connectors.vllm.identity import effective_kv_dtype
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from tests.engine.conftest import Tiers
    from tests.engine.models import Models


@pytest.fixture(scope="module")
def config(models: Models) -> Any:
    return vllm_config(models["llama"])


# ------------------------------------------------------------------ a real engine


def test_a_live_engine_describes_what_it_really_has(models: Models, tiers: Tiers) -> None:
    from tests.engine.in_process import Engine
    from vllm.v1.core import kv_cache_utils

    with Engine(models["llama"], transfer=tiers(disk=False)) as engine:
        half = engine.scheduler.connector.scheduler_side.half
        found = dict(half.namespace.descriptor)
        root = kv_cache_utils.NONE_HASH.hex()
    assert found["engine"].startswith("vllm/0.")
    assert found["model"].startswith("LlamaForCausalLM ")
    assert found["weights"].startswith("sha256/")
    assert found["kv_dtype"] == "float32 as float32"
    assert found["block_size"] == BLOCK
    assert found["layers"][0].startswith("0 FullAttentionSpec block=32 window=None heads=4x32+32")
    assert found["layout"].startswith("LBHNC hash=32 ")
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (1, 1)
    machine, isa = found["attention_isa"].split(" cpu CPU_ATTN:")
    assert machine == f"{platform.machine()}-{sys.byteorder}"
    assert isa  # how keys are packed: equal sizes, other bytes
    assert found["hash_root"] == root
    assert found["pickle_minors"] == ""


# ------------------------------------------------------------------ P01, P04: roots and hashes

ROOTS = """
import os
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
for seed in (None, "7"):
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    for name in ("sha256_cbor", "xxhash_cbor"):
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(name))
        print(kv_cache_utils.NONE_HASH.hex())
"""


def roots_elsewhere() -> list[bytes]:
    """The roots of a strong and of a weak hash chain in a process of its own: first without a
    seed, then with seed 7."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ROOTS],
        env=without_seed(),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return [bytes.fromhex(line) for line in done.stdout.split()[-4:]]


def roots_here(monkeypatch: pytest.MonkeyPatch, seed: str | None) -> list[bytes]:
    """The same in this process."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    with monkeypatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            patch.setenv("PYTHONHASHSEED", seed)
        for name in ("NONE_HASH", "_NONE_HASH_SEED"):  # put back at the end
            patch.setattr(kv_cache_utils, name, None, raising=False)
        found = []
        for name in ("sha256_cbor", "xxhash_cbor"):
            kv_cache_utils.init_none_hash(get_hash_fn_by_name(name))
            found.append(bytes(kv_cache_utils.NONE_HASH))
        return found


@pytest.mark.long
def test_p01_processes_share_exactly_when_their_roots_agree(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = roots_elsewhere()
    unset, seven = theirs[:2], theirs[2:]
    assert roots_here(monkeypatch, "7") == seven
    mine = roots_here(monkeypatch, None)
    assert mine[0] == unset[0]
    assert mine[1] != unset[1]  # random: why nothing of it is persisted
    eight = roots_here(monkeypatch, "8")
    roots = [seven[0], eight[0], unset[0], seven[1], unset[1], mine[1]]
    assert len({digest(config, root=root) for root in roots}) == len(roots)
    assert described(config, root=seven[0]).hash_root == seven[0].hex()  # for humans, too


def test_p04_the_algorithm_is_part_of_the_name_and_pickled_ones_bring_versions(config: Any) -> None:
    algorithms = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
    found = {
        name: with_values(config, "cache_config", prefix_caching_hash_algo=name)
        for name in algorithms
    }
    assert len({digest(one) for one in found.values()}) == 4
    pickled = {name for name, one in found.items() if described(one).pickle_minors}
    assert pickled == {"sha256", "xxhash"}


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_p03_p04_keys_are_vllms_hashes_with_the_group_behind(name: str) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name

    hashed = get_hash_fn_by_name(name)((b"parent", (1, 2, 3), None))
    groups = KVGroups.single(BLOCK, 1024)
    (key,) = groups.keys(groups.all[0], [hashed], 0, 1)
    assert key == hashed + bytes(4)
    assert len(hashed) in (16, 32)


@pytest.mark.parametrize("wrong", [7, b"8 bytes.", bytes(33), "text", None])
def test_p04_other_hashes_are_refused_and_never_padded(wrong: Any) -> None:
    groups = KVGroups.single(BLOCK, 1024)
    with pytest.raises(MisuseError, match=type(wrong).__name__):
        groups.keys(groups.all[0], [wrong], 0, 1)


# ------------------------------------------------------------------ P13, P21: dtypes

KINDS = ("float16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head", "nvfp4")


def test_p13_p21_equal_effective_dtypes_share_and_no_others(models: Models) -> None:
    model = vllm_config(models["llama"], dtype="bfloat16")
    ranks = hands(cache_of(full()), kv_dtype="uint8")  # as if the tensors told nothing apart

    def name(kind: str) -> str:
        return digest(with_values(model, "cache_config", cache_dtype=kind), ranks=ranks)

    assert name("auto") == name("bfloat16")
    assert name("fp8") == name("fp8_e4m3")
    assert len({name(kind) for kind in ("auto", *KINDS)}) == 1 + len(KINDS)


def test_p13_the_model_dtype_and_the_stored_dtype_count(models: Models, config: Any) -> None:
    half = vllm_config(models["llama"], dtype="bfloat16")
    assert digest(half) != digest(config)
    assert digest(config, ranks=hands(cache_of(full()), kv_dtype="uint8")) != digest(config)
    assert described(half).kv_dtype == "bfloat16 as float32"


def test_p13_auto_is_what_the_checkpoint_declares(config: Any) -> None:
    """Worker processes settle it for themselves: vLLM's own object still says "auto"."""
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    compressed = copy.deepcopy(config)
    compressed.quant_config = SimpleNamespace(kv_cache_scheme=scheme)
    modelopt = with_model_values(
        config, quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    )
    assert effective_kv_dtype(config) == "float32"
    for declared in (compressed, modelopt):
        assert effective_kv_dtype(declared) == "fp8_e4m3"
        explicit = with_values(declared, "cache_config", cache_dtype="fp8")
        assert digest(explicit) == digest(declared) != digest(config)
        plain = with_values(declared, "cache_config", cache_dtype="float32")
        assert effective_kv_dtype(plain) == "float32"


def test_p13_layers_that_stay_plain_count_only_beside_quantised_ones(config: Any) -> None:
    def name(kind: str, skipped: list[str]) -> str:
        values = {"cache_dtype": kind, "kv_cache_dtype_skip_layers": skipped}
        return digest(with_values(config, "cache_config", **values))

    assert name("auto", ["0"]) == name("auto", [])
    assert name("fp8", ["0", "1"]) == name("fp8", ["1", "0"]) != name("fp8", [])


def test_p13_a_latent_cache_names_its_kind(config: Any) -> None:
    names = {kind: digest(config, cache_of(mla(cache_dtype_str=kind))) for kind in
             ("auto", "float32", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")}  # fmt: skip
    assert names["auto"] == names["float32"]
    assert names["fp8"] == names["fp8_e4m3"]
    assert len(set(names.values())) == 4


# ------------------------------------------------------------------ P15, P18: shapes and places


def test_p15_every_shape_of_ranks_is_another_namespace(config: Any) -> None:
    names = set()
    for tp in (1, 2, 4):
        for pp in (1, 2):
            sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
            shaped = with_values(config, "parallel_config", **sizes)
            cache = cache_of(full(8 // tp, shards=8))
            names.add(digest(shaped, cache, hands(cache, tp=tp, pp=pp)))
    assert len(names) == 6


def test_p15_replicas_and_shards_of_equal_sizes_differ(config: Any) -> None:
    shaped = with_values(config, "parallel_config", tensor_parallel_size=2)
    split, replicated = cache_of(full(1, shards=2)), cache_of(full(1, shards=1))
    names = {digest(shaped, cache, hands(cache, tp=2)) for cache in (split, replicated)}
    assert len(names) == 2


def test_p08_the_place_of_a_replica_is_no_content(config: Any) -> None:
    other = with_values(
        config, "parallel_config", data_parallel_rank=1, data_parallel_size=2, rank=3
    )
    assert digest(other) == digest(config)


@pytest.mark.parametrize(
    "cache",
    [
        cache_of(window()),
        cache_of(window(tokens=64)),
        cache_of(full(), layers=4),
        cache_of(full(), full()),
        cache_of(full(), layout="BLHNC"),
        cache_of(full(head_size=64)),
        cache_of(full(sliding_window=128)),
        cache_of(full(attention_chunk_size=128)),
        cache_of(full(non_causal=True)),
        cache_of(full(head_size=48, head_size_v=16)),
    ],
    ids=str,
)
def test_any_other_group_of_layers_is_another_namespace(config: Any, cache: Any) -> None:
    assert digest(config, cache, hands(cache)) != digest(config)


def test_padding_leaves_no_trace_in_a_record(config: Any) -> None:
    assert digest(config, cache_of(full(page_size_padded=1 << 20))) == digest(config)


def test_backends_of_every_stage_count(config: Any) -> None:
    cache = cache_of(full())
    amx = hands(cache, backends="CPU_ATTN:amx")
    assert digest(config, cache, amx) != digest(config)
    two = hands(cache, pp=2)
    mixed = {**two, (1, 0): amx[0, 0]}
    assert digest(config, cache, mixed) != digest(config, cache, two)


def test_equal_sizes_in_another_order_of_axes_are_another_namespace(config: Any) -> None:
    from dataclasses import replace

    cache = cache_of(full())
    ranks = hands(cache)
    ranks[0, 0].shards[0] = replace(ranks[0, 0].shards[0], layout="other")
    assert digest(config, cache, ranks) != digest(config)
