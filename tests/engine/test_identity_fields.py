"""Every field of vLLM's configuration is content or instance, and is treated as what it is."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.connectors.vllm.identity_fields import SECTIONS, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.models import Models

# Where a section hangs; None: it has no object in a plain engine's configuration.
PLACES = {
    "VllmConfig": "",
    "ModelConfig": "model_config",
    "CacheConfig": "cache_config",
    "ParallelConfig": "parallel_config",
    "LoadConfig": "load_config",
    "LoRAConfig": "lora_config",
    "AttentionConfig": "attention_config",
    "KernelConfig": "kernel_config",
    "MultiModalConfig": "model_config.multimodal_config",
    "KVTransferConfig": "kv_transfer_config",
    "DiffusionConfig": "diffusion_config",
    "QuantizationConfigArgs": "model_config.quantization_config",
    "SpeculativeConfig": None,  # needs a draft model: see test_namespace
}
# The other value has to be of the kind that the code looks into.
OTHER: dict[str, Any] = {
    "load_format": "pt",
    "model_loader_extra_config": {"pattern": "part-*"},
    "hf_overrides": {"rope_theta": 1.0},
    "max_model_len": 1024,
    "lora_dtype": "bfloat16",
    "kv_cache_dtype_skip_layers": ["1"],
    "hf_config": None,
    "seed": 7,
}


def class_of(section: str) -> Any:
    import vllm.config
    from vllm.config import diffusion, quantization

    for module in (vllm.config, quantization, diffusion):
        if hasattr(module, section):
            return getattr(module, section)
    raise AssertionError(section)


@pytest.mark.parametrize("section", SECTIONS)
def test_p08_every_field_is_in_exactly_one_list(section: str) -> None:
    theirs = sorted(field.name for field in dataclasses.fields(class_of(section)))
    fields = SECTIONS[section]
    assert sorted([*fields.content, *fields.elsewhere, *fields.instance]) == theirs


def test_p08_every_section_of_vllm_is_in_the_table_or_instance() -> None:
    """Sections that hold content are those that the table goes into."""
    nested = {place for place in PLACES.values() if place and "." not in place}
    sections = {
        name for name, part in SECTIONS["VllmConfig"].elsewhere.items() if part == "sections"
    }
    assert sections == nested | {"speculative_config"}


@pytest.fixture(scope="module")
def config(models: Models) -> Any:
    from tests.engine.fabricated import vllm_config
    from vllm.config import KVTransferConfig, LoRAConfig, MultiModalConfig
    from vllm.config.diffusion import DiffusionConfig
    from vllm.config.quantization import QuantizationConfigArgs

    made = vllm_config(models["llama"])
    made.lora_config = LoRAConfig(max_lora_rank=8)
    made.kv_transfer_config = KVTransferConfig(kv_role="kv_both", kv_connector="EbbtideConnector")
    made.model_config.multimodal_config = MultiModalConfig()
    made.model_config.quantization_config = QuantizationConfigArgs()
    made.diffusion_config = DiffusionConfig(canvas_length=32)
    return made


def cases(kind: str) -> Iterator[Any]:
    for section, place in PLACES.items():
        if place is not None:
            for name in getattr(SECTIONS[section], kind):
                # A whole section, such as `scheduler_config`, may go without being looked at.
                yield pytest.param(section, name, id=f"{section}.{name}")


def changed(config: Any, section: str, name: str) -> Any:
    """A copy with another value in one field, past every check of vLLM's own."""
    other = copy.deepcopy(config)
    target = other
    for step in filter(None, str(PLACES[section]).split(".")):
        target = getattr(target, step)
    before = getattr(target, name)
    value = OTHER.get(name, other_than(before))
    assert plain(value) != plain(before)
    object.__setattr__(target, name, value)
    return other


def other_than(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)) and not hasattr(value, "name"):
        return value + 1
    if isinstance(value, str):
        return f"{value}-other"
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, (list, tuple)):
        return [*value, "other"]
    return Path("other")


@pytest.mark.parametrize(("section", "name"), cases("content"))
def test_a_content_field_is_another_namespace(config: Any, section: str, name: str) -> None:
    from tests.engine.fabricated import digest

    assert digest(changed(config, section, name)) != digest(config)


@pytest.mark.parametrize(("section", "name"), cases("instance"))
def test_p08_an_instance_field_is_the_same_namespace(config: Any, section: str, name: str) -> None:
    from tests.engine.fabricated import digest

    assert digest(changed(config, section, name)) == digest(config)


def test_the_same_configuration_twice_is_one_namespace(models: Models, config: Any) -> None:
    from tests.engine.fabricated import digest, vllm_config

    assert digest(copy.deepcopy(config)) == digest(config)
    assert digest(vllm_config(models["llama"])) == digest(vllm_config(models["llama"]))


def test_plain_values_tell_nothing_of_a_process() -> None:
    class Thing:
        pass

    assert plain(Thing()) == plain(Thing())
    assert " at 0x" not in str(plain([Thing(), lambda: None, {1: {Thing()}}]))
    assert plain({"b", "a", "c"}) == ["a", "b", "c"]
    assert plain({1: (1, None)}) == {"1": [1, None]}
