"""The kinds of KV groups: layers that share one block table, and what a token of them can see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class FullAttention:
    """A token sees all tokens before it. `block_size` in tokens."""

    block_size: int
    kind = "full_attention"
    window_tokens = None


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A token sees itself and the `window_tokens - 1` tokens before it."""

    block_size: int
    window_tokens: int
    kind = "sliding_window"


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """A token sees the tokens of its own chunk of `chunk_tokens` that come before it."""

    block_size: int
    chunk_tokens: int
    kind = "chunked_local_attention"
    window_tokens = None


GroupSpec = FullAttention | SlidingWindow | ChunkedLocal

_KINDS: Mapping[str, type[GroupSpec]] = {
    spec.kind: spec for spec in (FullAttention, SlidingWindow, ChunkedLocal)
}
_NOT_YET = ("mamba", "cross_attention", "encoder_only_attention", "circular_buffer")


def group_spec(kind: str, block_size: int, span_tokens: int | None = None) -> GroupSpec:
    """The group of that kind, by the name that vLLM 0.32 gives it in KV events.

    `span_tokens` is the window or the chunk. Raises ConfigError for a kind that is unknown or not
    built yet, and for sizes that make no sense.
    """
    if kind in _NOT_YET:
        raise ConfigError(
            f"KV groups of kind {kind!r} are not built yet",
            next_step="Run this model without prefix caching",
            built=sorted(_KINDS),
        )
    if kind not in _KINDS:
        raise unknown_name("kind of KV group", kind, sorted(_KINDS))
    if kind == FullAttention.kind:
        if span_tokens is not None:
            raise ConfigError("full attention has no window", span_tokens=span_tokens)
        spec: GroupSpec = FullAttention(block_size)
    elif kind == SlidingWindow.kind:
        spec = SlidingWindow(block_size, span_tokens or 0)
    else:
        spec = ChunkedLocal(block_size, span_tokens or 0)
    check_spec(spec)
    return spec


def check_spec(spec: GroupSpec) -> None:
    """Raise ConfigError for a spec that no table can have."""
    span = spec.window_tokens if isinstance(spec, SlidingWindow) else 1
    span = spec.chunk_tokens if isinstance(spec, ChunkedLocal) else span
    for size in (spec.block_size, span):
        if type(size) is not int or size < 1:
            raise ConfigError("sizes of a KV group are whole tokens, at least 1", spec=spec)
