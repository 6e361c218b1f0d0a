"""vLLM's KV-cache groups as ours: which take part, and which cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def taking_part(config: KVCacheConfig) -> tuple[int, ...]:
    """The numbers of the groups whose blocks a hash-addressed store may hold.

    Groups that vLLM leaves out of prefix caching are left out here too. Raises ConfigError for a
    group that must be restored and cannot be: a prefix without it is worth nothing.
    """
    numbers: tuple[int, ...] = tuple(config.prefix_cacheable_group_ids)
    for number in numbers:
        kind = representative(config.kv_cache_groups[number].kv_cache_spec)
        # Exact types of the window kinds: their subclasses keep other blocks than their window's.
        full = isinstance(kind, FullAttentionSpec)
        if not full and type(kind) is not SlidingWindowSpec:
            raise ConfigError(
                f"KV-cache group {number} holds {type(kind).__name__}, which ebbtide cannot store",
                next_step="Models with recurrent (Mamba) or chunked-local layers are not supported:"
                " run this model without ebbtide.",
                layers=len(config.kv_cache_groups[number].layer_names),
            )
    if not numbers:
        raise ConfigError(
            "No KV-cache group of this model takes part in prefix caching",
            next_step="Run this model without ebbtide.",
            groups=len(config.kv_cache_groups),
        )
    return numbers


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
