"""The namespace of a live vLLM engine: everything that changes the bytes or the meaning of a block.

`CONTENT` and `INSTANCE` say of every field of vLLM's configuration sections what it is; a test
fails on a field that is in neither, so that a new vLLM cannot slip one past us.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from typing import TYPE_CHECKING, Any

from ebbtide.connectors.vllm.cache_groups import representative, window_of
from ebbtide.connectors.vllm.settings import PICKLED, vllm_minor
from ebbtide.connectors.vllm.weights import WeightsIdentity, resolve_local
from ebbtide.tiers.namespace import Descriptor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ebbtide.connectors.vllm.geometry import Geometry, Rank
    from ebbtide.connectors.vllm.metadata import Handshake

FORMAT = 1
# Names of the model's own configuration that say where it came from, and nothing about its answers.
ORIGIN_FIELDS = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
# Rotary embeddings that depend on the longest context that the engine was started with.
ROPE_BY_LENGTH = ("dynamic", "longrope")


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
    first = handshakes[min(handshakes)]
    return Descriptor(
        format=FORMAT,
        engine=f"vllm/{vllm_minor()}",
        model=_model(vllm_config),
        weights=weights,
        kv_dtype=first.kv_dtype,
        block_size=geometry.groups.alignment,
        layers=_layers(cache_config, geometry),
        layout=_layout(cache_config, geometry, handshakes),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        shard_rule="heads" + "".join(f" {g}:{n}" for g, n in sorted(geometry.writers.items())),
        attention_isa=f"{platform.machine()}-{sys.byteorder} {first.backends}",
        hash_algorithm=algorithm,
        hash_root=hash_root.hex(),
        pickle_minors=f"python {sys.version_info[0]}.{sys.version_info[1]}, vllm {vllm_minor()}"
        if pickled
        else "",
    )


def weights_of(vllm_config: VllmConfig, weights_revision: str | None) -> WeightsIdentity:
    """The identity of the weights, perhaps still being hashed in the background."""
    model, load = vllm_config.model_config, vllm_config.load_config
    dummy = str(getattr(load.load_format, "value", load.load_format)) == "dummy"
    return WeightsIdentity.choose(
        resolve_local(model.model, model.revision, load.download_dir),
        weights_revision=weights_revision,
        dummy_seed=int(model.seed or 0) if dummy else None,
    )


def _model(vllm_config: VllmConfig) -> str:
    """Architecture, numbers and numerics; not where the model lies or how long it may answer."""
    model = vllm_config.model_config
    parts: dict[str, Any] = {
        "config": _plain(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "drafter": _drafter(vllm_config),
    }
    if _rope_by_length(model):
        parts["max_model_len"] = model.max_model_len
    architecture = "+".join(model.architectures or ["?"])
    return f"{architecture} {_digest(parts)}"


def _drafter(vllm_config: VllmConfig) -> Any:
    """A draft model's layers have blocks of their own in the same groups."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return None
    draft = speculative.draft_model_config
    return [str(speculative.method), draft.model, str(draft.revision), _plain(draft.hf_config)]


def _rope_by_length(model: ModelConfig) -> bool:
    text = getattr(model, "hf_text_config", model.hf_config)
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(text, name, None)
        if isinstance(rope, dict) and any(kind in json.dumps(rope) for kind in ROPE_BY_LENGTH):
            return True
    return False


def _plain(config: Any) -> Any:
    fields = config.to_dict()
    return {name: value for name, value in fields.items() if name not in ORIGIN_FIELDS}


def _layers(config: KVCacheConfig, geometry: Geometry) -> tuple[str, ...]:
    """One line a group: kind, block size, window, heads, and which layers."""
    lines = []
    for group in geometry.groups.all:
        theirs = config.kv_cache_groups[group.number]
        kind = representative(theirs.kv_cache_spec)
        lines.append(
            f"{group.number} {type(kind).__name__} block={group.block_size}"
            f" window={window_of(theirs.kv_cache_spec)} heads={getattr(kind, 'num_kv_heads', 0)}"
            f"x{getattr(kind, 'head_size', 0)}+{getattr(kind, 'head_size_v', 0)}"
            f" {getattr(kind, 'dtype', '')} quant={getattr(kind, 'kv_quant_mode', '')}"
            f" layers={_digest(sorted(theirs.layer_names))}"
        )
    return tuple(lines)


def _layout(config: KVCacheConfig, geometry: Geometry, handshakes: Mapping[Rank, Handshake]) -> str:
    """Physical order, the hash chain's step, and the shards of every rank, in record order."""
    shards = [
        [list(rank), number, shard.record_bytes, shard.layout]
        for rank, handshake in sorted(handshakes.items())
        for number, shard in sorted(handshake.shards.items())
    ]
    name = str(config.kv_cache_layout)
    return f"{name} hash={geometry.groups.hash_block_size} {_digest(shards)}"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
