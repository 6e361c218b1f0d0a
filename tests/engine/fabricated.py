"""Engines that are only described: real configuration objects of vLLM, and made-up ranks."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from ebbtide.connectors.vllm.cache_groups import replicas_of
from ebbtide.connectors.vllm.geometry import Geometry
from ebbtide.connectors.vllm.identity import describe
from ebbtide.connectors.vllm.metadata import Handshake, Shard
from ebbtide.tiers.namespace import Descriptor, namespace_digest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from ebbtide.connectors.vllm.geometry import Rank

BLOCK = 32  # tokens
LAYER_BYTES = 1024  # of one KV head and block
ROOT = bytes(range(32))
FLAGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "prefix_caching_hash_algo": "sha256_cbor",
    "max_model_len": 2304,
}


def vllm_config(model: Path, **flags: Any) -> VllmConfig:
    """What `vllm serve` with these flags would configure. No engine is started."""
    return EngineArgs(model=str(model), **{**FLAGS, **flags}).create_engine_config()


def full(heads: int = 4, *, shards: int | None = None, **fields: Any) -> FullAttentionSpec:
    """`heads`: KV heads of one rank. `shards`: distinct ones over all ranks, as vLLM counts."""
    values: dict[str, Any] = {"head_size": 32, "dtype": torch.float32, "max_tp_shards": shards}
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, **{**values, **fields})


def window(heads: int = 4, tokens: int = 128, *, shards: int | None = None) -> SlidingWindowSpec:
    """A sliding window of `tokens`."""
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=heads,
        head_size=32,
        dtype=torch.float32,
        max_tp_shards=shards,
        sliding_window=tokens,
    )


def mla(**fields: Any) -> MLAAttentionSpec:
    """One latent per token, the same on every tensor-parallel rank."""
    values: dict[str, Any] = {"dtype": torch.float32, "cache_dtype_str": "auto"}
    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, max_tp_shards=1, **{**values, **fields}
    )


def cache_of(*specs: KVCacheSpec, layers: int = 2, layout: str = "LBHNC") -> KVCacheConfig:
    """One group per spec, each with `layers` layers."""
    groups = [
        KVCacheGroupSpec([f"model.layers.{number * layers + i}.attn" for i in range(layers)], spec)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(
        num_blocks=16,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        kv_cache_layout=layout,
        hash_block_size=BLOCK,
    )


def hands(
    cache: KVCacheConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    without: Iterable[tuple[int, int]] = (),
    backends: str = "CPU_ATTN:vec",
    kv_dtype: str = "float32",
) -> dict[Rank, Handshake]:
    """What the ranks of such an engine would say. `without`: (stage, group) that has no layers."""
    absent = set(without)
    ranks = {}
    for stage in range(pp):
        for tp_rank in range(tp):
            shards = {}
            for number, group in enumerate(cache.kv_cache_groups):
                if (stage, number) not in absent:
                    spec: Any = group.kv_cache_spec
                    size = spec.num_kv_heads * len(group.layer_names) * LAYER_BYTES
                    form = f"{kv_dtype} {size}"
                    shards[number] = Shard(size, form, replicas_of(spec, tp))
            ranks[stage, tp_rank] = Handshake(shards, backends, kv_dtype)
    return ranks


def described(
    config: VllmConfig,
    cache: KVCacheConfig | None = None,
    ranks: dict[Rank, Handshake] | None = None,
    *,
    weights: str = "sha256/0",
    root: bytes = ROOT,
) -> Descriptor:
    """The descriptor of an engine with this configuration; one full group and rank by default."""
    cache = cache or cache_of(full())
    ranks = ranks or hands(cache)
    geometry = Geometry.of(cache, ranks)
    return describe(config, cache, geometry, ranks, weights=weights, hash_root=root)


def digest(*args: Any, **kwargs: Any) -> str:
    """Of the namespace that `described` describes."""
    return namespace_digest(described(*args, **kwargs).pairs()).hex()


def without_seed() -> dict[str, str]:
    """The environment of a process that is given no root for its hash chain."""
    return {name: one for name, one in os.environ.items() if name != "PYTHONHASHSEED"}


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
