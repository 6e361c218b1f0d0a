"""The namespace of a live vLLM engine: everything that changes the bytes or the meaning of a block.

`identity_fields` says of every field of vLLM's configuration sections what it is. Here are the
effective values: what "auto" became, what the model was loaded as, what the workers found.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from typing import TYPE_CHECKING, Any

from ebbtide.connectors.vllm.cache_groups import representative, window_of
from ebbtide.connectors.vllm.identity_fields import CONTENT_ENVIRONMENT, content_of, plain
from ebbtide.connectors.vllm.settings import PICKLED, vllm_minor
from ebbtide.connectors.vllm.weights import WeightsIdentity, resolve_local
from ebbtide.tiers.namespace import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ebbtide.connectors.vllm.announce import Announcements
    from ebbtide.connectors.vllm.geometry import Geometry, Rank
    from ebbtide.connectors.vllm.metadata import Handshake

FORMAT = 1
# Names of the model's own configuration that say where it came from or how long it may answer
# here, and nothing about its answers. Some models write the latter into it while they are built.
ORIGIN_FIELDS = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_commit_hash",
    "max_model_len",
)
# Two names of one thing. On a GPU "fp8" is E4M3; which E4M3 is the platform's choice.
KV_DTYPE_NAMES = {"fp8": "fp8_e4m3", "half": "float16", "float": "float32"}
# Fields of a layer's cache spec that leave no trace in a record.
PHYSICAL_FIELDS = ("page_size_padded", "block_stride_alignment", "alignment")
# Loaders of the same files, and how fast and with how many threads a loader reads them.
SAFETENSORS_LOADERS = ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
# Loaders that read the model's own directory. What any other brings along, nobody here can tell.
LOCAL_LOADERS = (
    *SAFETENSORS_LOADERS,
    "auto",
    "bitsandbytes",
    "gguf",
    "hf",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer_sharded",
    "sharded_state",
)
LOADER_PACE = (
    "concurrency",
    "distributed",
    "enable_multithread_load",
    "memory_limit",
    "num_threads",
)
# Drafters without layers of attention: no block of theirs is anywhere.
DRAFTERS_WITHOUT_BLOCKS = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
ADAPTERS_BY_NAME = (
    "ebbtide: LoRA adapters are told apart by name and path only. Give a retrained adapter a new"
    " name or path, or reset the cache, or it is served blocks of the old one"
)


def describe(
    vllm_config: VllmConfig,
    cache_config: KVCacheConfig,
    geometry: Geometry,
    handshakes: Mapping[Rank, Handshake],
    *,
    weights: str,
    hash_root: bytes,
) -> Descriptor:
    """The descriptor of what this engine's blocks hold. `weights`: see `weights_of`."""
    parallel = vllm_config.parallel_config
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    pickled = algorithm in PICKLED
    stored = _union((one.kv_dtype for one in handshakes.values()), "+")
    backends = _union((one.backends for one in handshakes.values()), ",")
    return Descriptor(
        format=FORMAT,
        engine=f"vllm/{vllm_minor()}",
        model=_model(vllm_config),
        weights=weights,
        kv_dtype=f"{_kv_dtype(vllm_config)} as {stored}",
        block_size=geometry.groups.alignment,
        layers=_layers(vllm_config, cache_config, geometry),
        layout=_layout(cache_config, geometry, handshakes),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        shard_rule="heads" + "".join(f" {g}:{n}" for g, n in sorted(geometry.writers.items())),
        attention_isa=f"{platform.machine()}-{sys.byteorder} {_platform()} {backends}",
        hash_algorithm=algorithm,
        hash_root=hash_root.hex(),
        pickle_minors=f"python {sys.version_info[0]}.{sys.version_info[1]}, vllm {vllm_minor()}"
        if pickled
        else "",
    )


class AllWeights:
    """The identities of several models as one. The interface of `WeightsIdentity`."""

    def __init__(self, parts: Sequence[WeightsIdentity]) -> None:
        self._parts = parts

    @property
    def failed(self) -> str | None:
        """Why there will be no identity, or None."""
        return next((part.failed for part in self._parts if part.failed), None)

    def poll(self) -> str | None:
        """All identities in order, or None as long as one is unknown. Never waits."""
        known = [part.poll() for part in self._parts]
        return " + ".join(one for one in known if one) if all(known) else None

    def close(self) -> None:
        """End the hashing. Idempotent."""
        for part in self._parts:
            part.close()


def weights_of(vllm_config: VllmConfig, weights_revision: str | None) -> AllWeights:
    """The identity of the weights, perhaps still being hashed in the background.

    Of the model and of a drafter with files of its own. Whoever names a revision vouches for both.
    Raises ConfigError for a revision that is no usable name.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if weights_revision is not None:
        return AllWeights([WeightsIdentity.of_revision(weights_revision)])
    if _load_format(load) == "dummy":
        return AllWeights([WeightsIdentity.of_dummy(int(model.seed or 0))])
    places = [_directory(model, load)]
    draft = _draft_model(vllm_config)
    if draft is not None:
        theirs = getattr(vllm_config.speculative_config, "draft_load_config", None) or load
        place = _directory(draft, theirs)
        if place != places[0] or place is None:
            places.append(place)
    return AllWeights([WeightsIdentity(place) for place in places])


def effective_kv_dtype(vllm_config: VllmConfig) -> str:
    """What the cache holds, never "auto": the flag, else the checkpoint's word, else the model's.

    Several kinds share an element type (all fp8 and 4-bit kinds are stored as bytes), so the
    tensors alone do not tell. Worker processes settle "auto" for themselves; this is the same.
    """
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    model = vllm_config.model_config
    name = str(resolve_kv_cache_dtype_string(str(vllm_config.cache_config.cache_dtype), model))
    if name == "auto" and getattr(vllm_config.quant_config, "kv_cache_scheme", None) is not None:
        name = "fp8"
    if name == "auto":
        name = str(plain(model.dtype))
    return KV_DTYPE_NAMES.get(name, name)


def say_adapters_by_name(announce: Announcements, request: Request) -> None:
    """Once per engine, at the first request with an adapter. O(1)."""
    if request.lora_request is not None:
        announce.once(ADAPTERS_BY_NAME)


def _kv_dtype(vllm_config: VllmConfig) -> str:
    name = effective_kv_dtype(vllm_config)
    parts = [name]
    if name.startswith("fp8"):
        from vllm.platforms import current_platform

        parts.append(f"({plain(current_platform.fp8_dtype())})")
    skipped = vllm_config.cache_config.kv_cache_dtype_skip_layers
    if skipped and name != plain(vllm_config.model_config.dtype):
        parts.append(f"but in layers {','.join(sorted(skipped))}")
    return " ".join(parts)


def _model(vllm_config: VllmConfig) -> str:
    """Architecture, numbers and numerics; not where the model lies or how long it may answer."""
    from vllm import envs

    model, multimodal = vllm_config.model_config, vllm_config.model_config.multimodal_config
    parts: dict[str, Any] = {
        "config": _own_config(model),
        "settings": content_of("ModelConfig", model),
        "runner": [getattr(model, "runner_type", None), getattr(model, "convert_type", None)],
        "loading": _loading(vllm_config),
        "drafter": _drafter(vllm_config),
        "adapters": _adapters(vllm_config),
        "multimodal": content_of("MultiModalConfig", multimodal),
        "encoder_scales": _file_digest(getattr(multimodal, "mm_encoder_fp8_scale_path", None)),
        "attention": content_of("AttentionConfig", getattr(vllm_config, "attention_config", None)),
        "kernels": content_of("KernelConfig", getattr(vllm_config, "kernel_config", None)),
        "diffusion": content_of("DiffusionConfig", getattr(vllm_config, "diffusion_config", None)),
        "platform": content_of("VllmConfig", vllm_config),
        "environment": {name: plain(getattr(envs, name, None)) for name in CONTENT_ENVIRONMENT},
        "length": _rope_length(model),
    }
    architecture = "+".join(model.architectures or ["?"])
    return f"{architecture} {_digest(parts)}"


def _own_config(model: ModelConfig) -> Any:
    """The configuration that the model was published with, after the user's overrides."""
    config = _without_origin(plain(model.hf_config))
    if any("Llama4" in name for name in model.architectures or []):
        # The worker writes this into its copy: by the sampling defaults, else by length.
        sampling = {**model.try_get_generation_config(), **model.override_generation_config}
        by_length = model.max_model_len > 32768
        config["attn_temperature_tuning"] = sampling.get("attn_temperature_tuning", by_length)
    return config


def _directory(model: ModelConfig, load: LoadConfig) -> Path | None:
    """Where all that is loaded lies; None when some of it comes from elsewhere."""
    streamed = getattr(model, "model_weights", "") not in ("", model.model)
    if streamed or _load_format(load) not in LOCAL_LOADERS:
        return None
    return resolve_local(model.model, model.revision, load.download_dir)


def _load_format(load: LoadConfig) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _without_origin(config: Any) -> Any:
    if isinstance(config, dict):
        kept = {name: one for name, one in config.items() if name not in ORIGIN_FIELDS}
        return {name: _without_origin(one) for name, one in kept.items()}
    return [_without_origin(one) for one in config] if isinstance(config, list) else config


def _loading(vllm_config: VllmConfig) -> Any:
    """Which of the files are read, and as what; not how fast."""
    load = vllm_config.load_config
    kind = _load_format(load)
    kind = "safetensors" if kind in SAFETENSORS_LOADERS else {"hf": "auto"}.get(kind, kind)
    extra = plain(load.model_loader_extra_config or {})
    if isinstance(extra, dict):
        extra = {name: one for name, one in extra.items() if name not in LOADER_PACE}
    as_torchao = getattr(load, "safetensors_load_strategy", None) == "torchao"
    return [kind, extra, as_torchao, content_of("LoadConfig", load)]


def _drafter(vllm_config: VllmConfig) -> Any:
    """A draft model's layers have blocks of their own in the same groups."""
    draft = _draft_model(vllm_config)
    if draft is None:
        return None
    speculative = content_of("SpeculativeConfig", vllm_config.speculative_config)
    return [speculative, _own_config(draft), content_of("ModelConfig", draft)]


def _draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in DRAFTERS_WITHOUT_BLOCKS:
        return None
    return speculative.draft_model_config


def _adapters(vllm_config: VllmConfig) -> Any:
    """Only what departs from vLLM's defaults: requests without an adapter share with everybody."""
    settings = content_of("LoRAConfig", vllm_config.lora_config) or {}
    usual = (None, False, "auto", plain(vllm_config.model_config.dtype))
    return {name: value for name, value in settings.items() if value not in usual} or None


def _rope_length(model: ModelConfig) -> int | bool | None:
    """What of the longest context gets into rotated keys; None for most models."""
    text = getattr(model, "hf_text_config", model.hf_config)
    for name in ("rope_parameters", "rope_scaling"):
        for rope in _tables(plain(getattr(text, name, None))):
            kind = rope.get("rope_type", rope.get("type"))
            if kind == "dynamic":
                return int(model.max_model_len)
            if kind == "longrope":  # one of two sets of factors
                trained = rope.get("original_max_position_embeddings") or getattr(
                    text, "original_max_position_embeddings", 0
                )
                return bool(model.max_model_len > (trained or 0))
    return None


def _tables(rope: Any) -> list[dict[str, Any]]:
    """A rope configuration and, where layers differ, those inside it."""
    if not isinstance(rope, dict):
        return []
    return [rope, *(one for one in rope.values() if isinstance(one, dict))]


def _layers(vllm_config: VllmConfig, config: KVCacheConfig, geometry: Geometry) -> tuple[str, ...]:
    """One line a group: kind, block size, window, heads, and which layers."""
    lines = []
    model_dtype = str(plain(vllm_config.model_config.dtype))
    for group in geometry.groups.all:
        theirs = config.kv_cache_groups[group.number]
        kind = representative(theirs.kv_cache_spec)
        each = getattr(theirs.kv_cache_spec, "kv_cache_specs", None) or {"": kind}
        lines.append(
            f"{group.number} {type(kind).__name__} block={group.block_size}"
            f" window={window_of(theirs.kv_cache_spec)} heads={getattr(kind, 'num_kv_heads', 0)}"
            f"x{getattr(kind, 'head_size', 0)}+{getattr(kind, 'head_size_v', 0)}"
            f" {plain(getattr(kind, 'dtype', ''))}"
            f" quant={plain(getattr(kind, 'kv_quant_mode', ''))}"
            f" spec={_digest({name: _spec(one, model_dtype) for name, one in each.items()})}"
            f" layers={_digest(sorted(theirs.layer_names))}"
        )
    return tuple(lines)


def _spec(spec: Any, model_dtype: str) -> Any:
    """Every field of a layer's cache spec. "auto" there: this layer is not quantised."""
    named = {name: one for name, one in plain(spec).items() if name not in PHYSICAL_FIELDS}
    stored_as = named.get("cache_dtype_str")
    if stored_as is not None:
        name = model_dtype if stored_as == "auto" else stored_as
        named["cache_dtype_str"] = KV_DTYPE_NAMES.get(name, name)
    return [type(spec).__name__, named]


def _layout(config: KVCacheConfig, geometry: Geometry, handshakes: Mapping[Rank, Handshake]) -> str:
    """Physical order, the hash chain's step, and the shards of every rank, in record order."""
    shards = [
        [list(rank), number, shard.record_bytes, shard.layout, shard.replicas]
        for rank, handshake in sorted(handshakes.items())
        for number, shard in sorted(handshake.shards.items())
    ]
    name = str(config.kv_cache_layout)
    return f"{name} hash={geometry.groups.hash_block_size} {_digest(shards)}"


def _platform() -> str:
    """CUDA and ROCm have backends of the same names and other fp8 numbers."""
    from vllm.platforms import current_platform

    return str(plain(current_platform._enum)).lower()


def _union(words: Iterable[str], separator: str) -> str:
    return separator.join(sorted({one for word in words for one in word.split(separator)}))


def _file_digest(path: str | None) -> str | None:
    """By content, like the weights; a file that cannot be read goes by its name."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return path


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
