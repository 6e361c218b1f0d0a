"""Which engines share blocks: by model, numerics and weights. No engine is started."""

from __future__ import annotations

import copy
import logging
import shutil
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.fabricated import digest, vllm_config, with_model_values, with_values

from ebbtide.connectors.vllm.identity import say_adapters_by_name, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.models import Models

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def config(models: Models) -> Any:
    return vllm_config(models["llama"])


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
