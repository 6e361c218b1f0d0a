"""vLLM's KV-cache groups as ours: which take part, and which cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Exact types: a subclass may keep other blocks, or blocks that depend on more than the tokens
# before them (in `RSWASpec`, on which of them were prompt), and a new one is not known here.
FULL_KINDS = (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec)
STORED_KINDS = (*FULL_KINDS, SlidingWindowSpec)


def taking_part(config: KVCacheConfig) -> tuple[int, ...]:
    """The numbers of the groups whose blocks a hash-addressed store may hold.

    Groups that vLLM leaves out of prefix caching are left out here too. Raises ConfigError for a
    group that must be restored and cannot be: a prefix without it is worth nothing.
    """
    numbers: tuple[int, ...] = tuple(config.prefix_cacheable_group_ids)
    for number in numbers:
        spec = config.kv_cache_groups[number].kv_cache_spec
        odd = [kind for kind in _each_layer(spec) if type(kind) not in STORED_KINDS]
        if odd:
            raise ConfigError(
                f"KV-cache group {number} holds {type(odd[0]).__name__}, which ebbtide cannot"
                " store",
                next_step="Models with recurrent (Mamba), chunked-local or reference-window layers"
                " are not supported: run this model without ebbtide.",
                layers=len(config.kv_cache_groups[number].layer_names),
            )
    if not numbers:
        raise ConfigError(
            "No KV-cache group of this model takes part in prefix caching",
            next_step="Run this model without ebbtide.",
            groups=len(config.kv_cache_groups),
        )
    return numbers


def _each_layer(spec: Any) -> list[Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def representative(spec: Any) -> Any:
    """The spec of one layer, for a group whose layers differ in nothing that matters here."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def window_of(spec: Any) -> int | None:
    """Tokens of the sliding window; None for full attention."""
    kind = representative(spec)
    return int(kind.sliding_window) if type(kind) is SlidingWindowSpec else None


def replicas_of(spec: Any, tp_size: int) -> int:
    """How many neighbouring TP ranks hold the same bytes (vLLM 0.32, `kv_tp_replicas`)."""
    shards = getattr(representative(spec), "max_tp_shards", None)
    return 1 if shards is None else max(1, tp_size // int(shards))
