"""Attention over paged KV for a whole batch in one launch, by Triton.

Decoding and prefill behind a cached prefix, grouped-query heads, float16, bfloat16 and float32; the
sums are float32 throughout. What it computes is `attention.paged_attention`, the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ebbtide.errors import MisuseError
from ebbtide.kernels.triton_attention import attend_pages, merge_splits

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIM_MIN, DIM_MAX = 16, 256
PROGRAMS = 264  # two for every compute unit of a large GPU
SPLIT_KEYS_MIN = 256  # a shorter part costs more to merge than it saves
SPLITS_MAX = 64
LOG2_E = 1.4426950408889634

INTERPRETED = not isinstance(attend_pages, triton.JITFunction)


class Batch(NamedTuple):
    """Who looks at what; all int32 on the device of the KV.

    `block_tables` [sequences, blocks]: entries beyond a sequence's context are never read.
    `query_starts` [sequences + 1]: which rows of the query are whose. `context_lens` [sequences]:
    all tokens, the queries' own among them, at least as many as those. `query_len_max`: of any.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    query_len_max: int


class Tiling(NamedTuple):
    """How the work is cut. `tokens` * group rows of queries against `keys` keys at a time."""

    tokens: int
    rows: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, dim: int, group: int, *, decode: bool) -> Tiling:
        """What the compiler makes no spills of on any architecture since sm_80."""
        wide = dtype == torch.float32 or dim > 128
        tokens = 1 if decode else max(1, (32 if wide else 64) // group)
        rows = max(16, triton.next_power_of_2(tokens * group))
        keys = 32 if wide else 64
        if decode:
            return cls(tokens, rows, keys, 4, 2 if wide else 3)
        return cls(tokens, rows, keys, 8, 2)


def serves(dtype: torch.dtype, dim: int) -> bool:
    """Whether there is a kernel for elements and heads of this kind."""
    return dtype in DTYPES and DIM_MIN <= dim <= DIM_MAX and dim & (dim - 1) == 0


def supports(query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether `attend` can: one dtype of three, head sizes that are powers of two, 16 to 256."""
    return (
        query.dtype == kv_cache.dtype
        and serves(query.dtype, query.shape[-1])
        and kv_cache.stride(-1) == 1
        and query.stride(-1) == 1
    )


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: Batch,
    *,
    scale: float | None = None,
    splits: int | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's newest tokens over all of it.

    `query` [tokens, heads, head_dim], `kv_cache` [2, num_blocks, block_size, kv_heads, head_dim],
    keys first; any view of these dimensions whose last one is contiguous. The queries' own KV must
    have been written. Returns [tokens, heads, head_dim] in the query's dtype, on torch's current
    stream, without a wait. `scale` defaults to head_dim ** -0.5, `splits` and `tiling` to
    what suits the shapes.

    Raises MisuseError for shapes that do not fit each other. Ids and lengths are not checked: they
    are on the device. Cost: one launch and, when the context is split, another.
    """
    tokens, heads, dim = query.shape
    _, _, page, kv_heads, _ = kv_cache.shape
    if not supports(query, kv_cache) or heads % kv_heads or kv_cache.shape[-1] != dim:
        raise MisuseError(
            "Query and KV cache do not fit this kernel",
            next_step="Use ebbtide.kernels.attention",
            query=(tuple(query.shape), query.dtype),
            kv_cache=(tuple(kv_cache.shape), kv_cache.dtype),
        )
    sequences = len(batch.context_lens)
    decode = batch.query_len_max == 1
    group = heads // kv_heads
    tiling = tiling or Tiling.of(query.dtype, dim, group, decode=decode)
    if splits is None:
        splits = _splits(batch, sequences * kv_heads, page) if decode else 1
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    part_sum = part_max = part_weight = out
    if splits > 1:
        rows = tokens * heads * splits
        whole = torch.empty(rows * (dim + 2), dtype=torch.float32, device=query.device)
        part_sum, part_max = whole[: rows * dim], whole[rows * dim : rows * (dim + 1)]
        part_weight = whole[rows * (dim + 1) :]
    key, value = kv_cache[0], kv_cache[1]
    grid = (sequences, kv_heads, triton.cdiv(batch.query_len_max, tiling.tokens) * splits)
    attend_pages[grid](
        query,
        key,
        value,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        out,
        part_sum,
        part_max,
        part_weight,
        (dim**-0.5 if scale is None else scale) * LOG2_E,
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        *out.stride()[:2],
        batch.block_tables.stride(0),
        heads,
        splits,
        GROUP=group,
        DIM=dim,
        PAGE=page,
        TOKENS=tiling.tokens,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        SPLIT=splits > 1,
        EXACT=query.dtype == torch.float32,
        UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if splits > 1:
        merge_splits[tokens, heads](
            part_sum,
            part_max,
            part_weight,
            out,
            *out.stride()[:2],
            heads,
            splits,
            SPLITS=triton.next_power_of_2(splits),
            DIM=dim,
        )
    return out


def _splits(batch: Batch, programs: int, page: int) -> int:
    """Parts of a context when few sequences would leave compute units idle.

    From the width of the table, since lengths are on the device: at most one part too many.
    """
    longest = batch.block_tables.shape[1] * page
    return max(1, min(PROGRAMS // programs, longest // SPLIT_KEYS_MIN, SPLITS_MAX))
