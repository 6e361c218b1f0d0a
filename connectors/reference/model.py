"""A decoder of the Llama architecture over paged KV, with seeded random weights.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. It exists to be a true consumer of
restored blocks: small, quick for what it is, and deaf to nothing in its context. The weights are
scaled so that attention is sharp and its output carries weight in the residual: a wrong block
anywhere in the prefix changes the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from ebbtide.connectors.reference.tokenizer import VOCAB_SIZE
from ebbtide.errors import ConfigError
from ebbtide.kernels.attention import causal_mask, paged_attention, write_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.kernels.paged_attention import Batch as PagedBatch

    WaitForLayer = Callable[[int, int], None]

SCORE_GAIN = 1.7
"""Standard deviation of queries and of keys; attention scores have about its square."""
ATTENTION_GAIN = 1.0
"""Weight of attention's output in the residual stream, against 1 for the first token embedding."""
FEED_FORWARD_GAIN = 0.7
"""The same for the feed-forward part."""
HEAD_GAIN = 0.5
"""Standard deviation of the logits: so small that float32 rounding moves them by less than 1e-5."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. Raises ConfigError when the parts do not fit.

    The default has 25 million weights, 16 KiB of KV a token in float32 (256 KiB a block of 16), and
    prefills about 2,000 tokens in a second on two CPU cores. With `window_tokens` a token sees that
    many tokens, its own included: in all layers, or in every other one, from the first on.
    """

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    ffn_size: int = 1536
    max_position: int = 16384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_head: bool = False
    dtype: torch.dtype = torch.float32
    window_tokens: int | None = None
    all_layers_windowed: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_heads must be a multiple of num_kv_heads",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
            )
        if self.head_dim % 2:
            raise ConfigError("head_dim must be even", head_dim=self.head_dim)
        no_window = self.window_tokens is not None and self.window_tokens < 1
        if self.num_layers % len(self.windows) or no_window:
            raise ConfigError(
                "a window has tokens, and as many layers as there are without one",
                window_tokens=self.window_tokens,
                num_layers=self.num_layers,
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per KV group its window; None: the group's layers see everything."""
        if self.window_tokens is None or self.all_layers_windowed:
            return (self.window_tokens,)
        return None, self.window_tokens

    def layer_name(self, layer: int) -> str:
        """What a layer does and which one it is, for the name of its content."""
        window = self.windows[self.group_of_layer(layer)]
        kind = "full_attention" if window is None else f"sliding_window_{window}"
        return f"{kind}.{layer}"

    def group_of_layer(self, layer: int) -> int:
        """The KV group that a layer belongs to."""
        return (layer + 1) % len(self.windows)

    @property
    def qkv_size(self) -> int:
        """Columns of the joint projection to queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """One sequence's part of a batch: rows `start` to `start + length` are its newest tokens.

    `context_len` counts all its tokens up to the last of those rows. `block_tables` has one int64
    [blocks] per KV group.
    """

    start: int
    length: int
    context_len: int
    block_tables: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, flattened: int64 tensors [tokens], slots per KV group, and who owns
    which rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mappings: tuple[torch.Tensor, ...]
    sequences: tuple[SequenceRange, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights [out, in] of one layer; norms are ones and hence left out."""

    qkv: torch.Tensor
    attention_out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """The decoder. Weights depend on `config` and `seed` alone.

    `by_kernel`: one Triton launch attends for all sequences of a batch; else torch, one sequence
    after the other. Not given: by kernel where there are a GPU, Triton and heads that it can do.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        device: str = "cpu",
        by_kernel: bool | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.by_kernel = _kernel_serves(config, self.device) if by_kernel is None else by_kernel
        draw = torch.Generator().manual_seed(seed)

        def weight(out_size: int, in_size: int, gain: float) -> torch.Tensor:
            scale = gain * in_size**-0.5
            drawn = torch.randn((out_size, in_size), generator=draw).mul_(scale)
            return drawn.to(device=self.device, dtype=config.dtype)

        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._embedding = weight(config.vocab_size, config.hidden_size, config.hidden_size**0.5)
        self._layers: list[_Layer] = []
        for _ in range(config.num_layers):
            query_key = weight((heads + kv_heads) * dim, config.hidden_size, SCORE_GAIN)
            value = weight(kv_heads * dim, config.hidden_size, 1.0)
            self._layers.append(
                _Layer(
                    qkv=torch.cat((query_key, value)),
                    attention_out=weight(config.hidden_size, heads * dim, ATTENTION_GAIN),
                    gate_up=weight(2 * config.ffn_size, config.hidden_size, 1.0),
                    down=weight(config.hidden_size, config.ffn_size, FEED_FORWARD_GAIN),
                )
            )
        if config.tied_head:
            self._head = self._embedding * (HEAD_GAIN * config.hidden_size**-0.5)
        else:
            self._head = weight(config.vocab_size, config.hidden_size, HEAD_GAIN)
        self._angles = _rotary_angles(config).to(self.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_caches: Sequence[torch.Tensor],
        wait_for_layer: WaitForLayer | None = None,
    ) -> torch.Tensor:
        """Logits [sequences, vocab] float32 for the last token of every sequence of `batch`.

        `kv_caches` holds [2, num_blocks, block_size, kv_heads, head_dim] tensors, one for a layer
        of each KV group; the KV of the batch's tokens is written there, and everything before them
        is read from there. `wait_for_layer` is called with KV group and place in `kv_caches` before
        a layer touches its blocks: until it returns, they may still be on their way.
        """
        groups = len(self.config.windows)
        hidden = self._embedding.index_select(0, batch.token_ids)
        angles = self._angles.index_select(0, batch.positions).unsqueeze(1)
        seen = [
            self._paged(batch, group)
            if self.by_kernel and window is None
            else [_sight(part, group, window, hidden, kv_caches) for part in batch.sequences]
            for group, window in enumerate(self.config.windows)
        ]
        for number, layer in enumerate(self._layers):
            group = self.config.group_of_layer(number)
            slots, kv_cache = batch.slot_mappings[group], kv_caches[number // groups]
            if wait_for_layer is not None:
                wait_for_layer(group, number // groups)
            mixed = self._attend(layer, hidden, angles, slots, seen[group], kv_cache)
            hidden.addmm_(mixed, layer.attention_out.t())
            gate, up = functional.linear(self._norm(hidden), layer.gate_up).chunk(2, dim=-1)
            hidden.addmm_(functional.silu(gate).mul_(up), layer.down.t())
        last = torch.tensor(
            [part.start + part.length - 1 for part in batch.sequences], device=self.device
        )
        rows = hidden.index_select(0, last)
        return functional.linear(self._norm(rows), self._head).float()

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        angles: torch.Tensor,
        slot_mapping: torch.Tensor,
        seen: PagedBatch | list[_Sight],
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Attention's output before its projection, [tokens, heads * head_dim]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = functional.linear(self._norm(hidden), layer.qkv)
        split = qkv.view(len(hidden), heads + 2 * kv_heads, self.config.head_dim)
        _rotate(split[:, : heads + kv_heads], angles)
        query, key, value = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
        write_kv(kv_cache, slot_mapping, key, value)
        if not isinstance(seen, list):
            from ebbtide.kernels.paged_attention import attend

            return attend(query, kv_cache, seen).flatten(1)
        mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows, block_table, context_len, mask in seen:
            mixed[rows] = paged_attention(
                query[rows], kv_cache, block_table, context_len, mask=mask
            )
        return mixed.flatten(1)

    def _paged(self, batch: Batch, group: int) -> PagedBatch:
        """The same batch as the kernel wants it: tables side by side, unused entries zero."""
        from ebbtide.kernels.paged_attention import Batch as PagedBatch

        parts = batch.sequences
        tables = torch.nn.utils.rnn.pad_sequence(
            [part.block_tables[group].to(torch.int32) for part in parts], batch_first=True
        )
        numbers = torch.tensor(
            [(part.start, part.context_len) for part in parts] + [(len(batch.token_ids), 0)],
            dtype=torch.int32,
        ).to(self.device)
        longest = max(part.length for part in parts)
        return PagedBatch(tables, numbers[:, 0].contiguous(), numbers[:-1, 1].contiguous(), longest)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], eps=self.config.norm_eps)


class _Sight(NamedTuple):
    """What the tokens of one sequence see in one group: rows, blocks from the first in sight on."""

    rows: slice
    block_table: torch.Tensor
    context_len: int
    mask: torch.Tensor | None


def _sight(
    part: SequenceRange,
    group: int,
    window_tokens: int | None,
    like: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
) -> _Sight:
    first, context_len = 0, part.context_len
    if window_tokens is not None:
        block_size = kv_caches[0].shape[2]
        first = max(0, context_len - part.length - window_tokens + 1) // block_size
        context_len -= first * block_size
    mask = None
    if 1 < part.length < context_len or (window_tokens is not None and context_len > window_tokens):
        mask = causal_mask(part.length, context_len, like, window_tokens)
    rows = slice(part.start, part.start + part.length)
    return _Sight(rows, part.block_tables[group][first:], context_len, mask)


def _kernel_serves(config: ModelConfig, device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from ebbtide.kernels.paged_attention import serves

    return serves(config.dtype, config.head_dim)


def _rotary_angles(config: ModelConfig) -> torch.Tensor:
    """Unit complex numbers [max_position, head_dim / 2], complex64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.max_position, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _rotate(rows: torch.Tensor, angles: torch.Tensor) -> None:
    """Turn neighbouring pairs of [tokens, heads, head_dim] by `angles`, in place and in float32."""
    wide = rows.float()
    pairs = wide.view(*wide.shape[:-1], -1, 2)
    torch.view_as_complex(pairs).mul_(angles)
    if wide is not rows:
        rows.copy_(wide)
