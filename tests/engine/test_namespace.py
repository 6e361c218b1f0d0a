"""Which engines share blocks: by what they would call their blocks. Only one test starts one."""

from __future__ import annotations

import copy
import logging
import platform
import shutil
import subprocess
import sys
import time
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
    root_of,
    vllm_config,
    window,
)

from ebbtide.connectors.offload.groups import KVGroups
from ebbtide.connectors.vllm.identity import (
    effective_kv_dtype,
    say_adapters_by_name,
    weights_of,
)
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.conftest import Tiers
    from tests.engine.models import Models

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def config(models: Models) -> Any:
    return vllm_config(models["llama"])


def with_values(config: Any, place: str, **values: Any) -> Any:
    """A copy with other values in one section, past vLLM's own checks."""
    other = copy.deepcopy(config)
    for name, value in values.items():
        object.__setattr__(getattr(other, place), name, value)
    return other


def with_model_values(config: Any, **values: Any) -> Any:
    """A copy whose model was published with other numbers."""
    other = copy.deepcopy(config)
    for name, value in values.items():
        setattr(other.model_config.hf_config, name, value)
    return other


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
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
for name in ("sha256_cbor", "xxhash_cbor"):
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(name))
    print(kv_cache_utils.NONE_HASH.hex())
"""


def roots_elsewhere(seed: str | None) -> list[bytes]:
    """The roots of a strong and of a weak hash chain in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ROOTS],
        env=root_of(seed),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [bytes.fromhex(line) for line in done.stdout.split()[-2:]]


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


def test_p01_processes_share_exactly_when_their_roots_agree(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seven, unset = roots_elsewhere("7"), roots_elsewhere(None)
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


# ------------------------------------------------------------------ P08, P16: model and weights


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def identity_of(config: Any, revision: str | None = None) -> tuple[str | None, str | None]:
    """The weights' identity and why there is none."""
    weights = weights_of(config, revision)
    deadline = time.monotonic() + PATIENCE_S
    while weights.poll() is None and weights.failed is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    weights.close()
    return weights.poll(), weights.failed


def namespace_at(place: Path) -> str:
    config = vllm_config(place)
    weights, failed = identity_of(config)
    assert failed is None
    assert weights is not None
    return digest(config, weights=weights)


def flip_a_weight(place: Path) -> None:
    with open(place / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def change_the_config(place: Path) -> None:
    path = place / "config.json"
    text = path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    assert text != path.read_text()
    path.write_text(text)


@pytest.mark.parametrize("change", [flip_a_weight, change_the_config])
def test_p16_new_content_behind_an_old_path_is_another_namespace(
    models: Models, tmp_path: Path, remembered: None, change: Callable[[Path], None]
) -> None:
    place = tmp_path / "model"
    shutil.copytree(models["llama"], place)
    before = namespace_at(place)
    assert before == namespace_at(models["llama"])  # a copy elsewhere is the same model
    (tmp_path / "link").symlink_to(place)
    assert namespace_at(tmp_path / "link") == before
    change(place)
    assert namespace_at(place) != before


@pytest.mark.parametrize(
    ("place", "values"),
    [
        ("model_config", {"model": "organisation/not-here"}),
        ("model_config", {"model_weights": "s3://bucket/model"}),
        ("load_config", {"load_format": "tensorizer"}),
        ("load_config", {"load_format": "ipc_cache"}),
        ("load_config", {"load_format": "of-a-plugin"}),
    ],
)
def test_p16_weights_from_elsewhere_are_vouched_for_or_not_persisted(
    config: Any, remembered: None, place: str, values: dict[str, Any]
) -> None:
    known, failed = identity_of(with_values(config, place, **values))
    assert known is None
    assert "weights_revision" in str(failed)
    assert identity_of(with_values(config, place, **values), "r1") == ("revision/r1", None)


def test_dummy_weights_are_called_by_their_seed(config: Any) -> None:
    dummy = with_values(config, "load_config", load_format="dummy")
    assert identity_of(dummy)[0] == "dummy/0"
    assert identity_of(with_values(dummy, "model_config", seed=3))[0] == "dummy/3"
    assert digest(dummy) != digest(config)


@pytest.fixture
def drafted(models: Models) -> Any:
    speculative = {"method": "draft_model", "num_speculative_tokens": 2}
    return vllm_config(
        models["llama"], speculative_config={**speculative, "model": str(models["other_llama"])}
    )


def test_a_drafter_counts_by_content_and_not_by_place(
    models: Models, config: Any, drafted: Any, tmp_path: Path, remembered: None
) -> None:
    assert digest(drafted) != digest(config)
    alone, _ = identity_of(config)
    both, _ = identity_of(drafted)
    assert both is not None
    assert both.startswith(f"{alone} + sha256/")
    place = tmp_path / "draft"
    shutil.copytree(models["other_llama"], place)
    moved = copy.deepcopy(drafted)
    moved.speculative_config.draft_model_config.model = str(place)
    assert (digest(moved), identity_of(moved)[0]) == (digest(drafted), both)
    flip_a_weight(place)
    assert identity_of(moved)[0] != both
    shutil.rmtree(place)
    assert identity_of(moved) == (None, identity_of(moved)[1])
    assert identity_of(moved, "r1")[0] == "revision/r1"


def test_a_drafter_without_layers_changes_nothing(config: Any, remembered: None) -> None:
    guessing = copy.deepcopy(config)
    guessing.speculative_config = SimpleNamespace(
        method="ngram", draft_model_config=config.model_config
    )
    assert digest(guessing) == digest(config)
    assert identity_of(guessing) == identity_of(config)


def test_p08_loaders_of_the_same_files_share(config: Any) -> None:
    def name(kind: str, **extra: Any) -> str:
        values = {"load_format": kind, "model_loader_extra_config": extra}
        return digest(with_values(config, "load_config", **values))

    assert name("auto") == name("hf") == name("auto", num_threads=4)
    assert name("safetensors") == name("fastsafetensors") == name("runai_streamer", concurrency=9)
    assert len({name("auto"), name("safetensors"), name("pt"), name("auto", pattern="p")}) == 4


def test_p08_the_longest_context_counts_only_where_keys_depend_on_it(config: Any) -> None:
    def names(rope: dict[str, Any], *lengths: int, architecture: str = "Any") -> int:
        model = with_model_values(config, rope_parameters=rope, architectures=[architecture])
        return len({digest(with_values(model, "model_config", max_model_len=n)) for n in lengths})

    assert names({"rope_type": "default"}, 1024, 2048) == 1
    assert names({"rope_type": "yarn", "factor": 4.0}, 1024, 2048) == 1
    assert names({"rope_type": "dynamic", "factor": 2.0}, 1024, 2048) == 2
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert names(longrope, 1024, 4096) == 1
    assert names(longrope, 8192, 9000) == 1
    assert names({"full_attention": longrope}, 4096, 8192) == 2


def test_p08_where_a_model_came_from_is_no_content(config: Any) -> None:
    named = with_model_values(config, _name_or_path="/elsewhere", max_model_len=17)
    named.model_config.hf_config.transformers_version = "0"
    assert digest(named) == digest(config)


@pytest.mark.parametrize(
    "flags",
    [
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"hf_overrides": {"num_hidden_layers": 2}},
        {"model_impl": "transformers"},
    ],
    ids=str,
)
def test_overrides_count_by_what_they_change(
    models: Models, config: Any, flags: dict[str, Any]
) -> None:
    assert digest(vllm_config(models["llama"], **flags)) != digest(config)


def test_p11_what_images_become_is_content(config: Any, tmp_path: Path) -> None:
    """Which image it is stands in vLLM's hash; how it is taken apart is the namespace's."""
    from vllm.config import MultiModalConfig

    def name(**values: Any) -> str:
        other = copy.deepcopy(config)
        other.model_config.multimodal_config = MultiModalConfig(**values)
        return digest(other)

    scales = tmp_path / "scales.json"
    path = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales)}
    found = [name(), name(mm_processor_kwargs={"num_crops": 4})]
    for text in ("{}", "{1}"):
        scales.write_text(text)
        found.append(name(**path))
    assert len(set(found)) == 4
    assert name(mm_processor_cache_gb=1) == found[0]


def test_environment_that_changes_stored_bytes_is_content(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(config)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert digest(config) != before


# ------------------------------------------------------------------ P09: adapters


def test_p09_an_engine_that_may_load_adapters_shares_with_one_that_may_not(config: Any) -> None:
    from vllm.config import LoRAConfig

    ready = copy.deepcopy(config)
    ready.lora_config = LoRAConfig(max_lora_rank=8, max_loras=2)
    ready.lora_config.lora_dtype = config.model_config.dtype
    assert digest(ready) == digest(config)
    ready.lora_config.target_modules = ["q_proj"]
    assert digest(ready) != digest(config)


def test_p09_isolation_by_name_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from ebbtide.connectors.vllm.announce import Announcements

    announce = Announcements(SimpleNamespace())  # type: ignore[arg-type]
    adapter = SimpleNamespace(lora_name="a", lora_path="/adapters/a")
    with caplog.at_level(logging.WARNING, "ebbtide"):
        say_adapters_by_name(announce, SimpleNamespace(lora_request=None))
        assert not caplog.records
        for _ in range(3):
            say_adapters_by_name(announce, SimpleNamespace(lora_request=adapter))
    (record,) = caplog.records
    assert "name and path only" in record.getMessage()
