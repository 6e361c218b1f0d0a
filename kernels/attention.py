"""Attention over paged KV, in plain torch: the reference that faster kernels are held against.

KV of one layer lies in a tensor of shape [2, num_blocks, block_size, kv_heads, head_dim], keys
first. A sequence's token `i` lies in block `block_table[i // block_size]`, row `i % block_size`;
its *slot* is `block_table[i // block_size] * block_size + i % block_size`. A view with these
dimensions serves as well, so a [num_blocks, 2, ...] tensor is passed as `tensor.transpose(0, 1)`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ebbtide.errors import MisuseError

QUERY_ROWS = 256
"""Queries per dense product: fewer compute less of the masked corner, more run faster."""


def write_kv(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write `key` and `value`, both [tokens, kv_heads, head_dim], to the slots of `slot_mapping`.

    `slot_mapping` is int64 [tokens] without repetitions. Cost: one pass over the new bytes.
    """
    _, blocks, block_size, heads, dim = kv_cache.shape
    if kv_cache[0].is_contiguous():
        for pages, rows in zip(kv_cache, (key, value), strict=True):
            pages.view(blocks * block_size, heads, dim).index_copy_(0, slot_mapping, rows)
        return
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    row = slot_mapping - block * block_size
    for pages, rows in zip(kv_cache, (key, value), strict=True):
        pages.index_put_((block, row), rows)


def causal_mask(
    query_len: int, context_len: int, like: torch.Tensor, window_tokens: int | None = None
) -> torch.Tensor:
    """Additive mask [query_len, context_len]: 0 where query row `i` may look, else -inf.

    Row `i` is the token at position `context_len - query_len + i`; with a window it sees itself and
    the `window_tokens - 1` tokens before it. Dtype and device are those of `like`. Build it once
    per step and pass it to every layer.
    """
    blind = torch.full(
        (query_len, context_len), float("-inf"), dtype=like.dtype, device=like.device
    )
    prefix_len = context_len - query_len
    mask = blind.triu(prefix_len + 1)
    if window_tokens is not None:
        mask += blind.tril(prefix_len - window_tokens)
    return mask


def gather_pages(
    kv_cache: torch.Tensor, block_table: torch.Tensor, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence's first tokens, each [context_len, kv_heads, head_dim].

    `block_table` is int64 [blocks] and may be longer than needed. Cost: one copy of those bytes.
    """
    _, _, block_size, heads, dim = kv_cache.shape
    used = block_table[: -(-context_len // block_size)]
    key, value = (
        pages.index_select(0, used).view(-1, heads, dim)[:context_len] for pages in kv_cache
    )
    return key, value


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence over all of it.

    `query` is [query_len, heads, head_dim] for the positions from `context_len - query_len` on;
    their own KV must have been written. `heads` is a multiple of `kv_heads`; neighbouring query
    heads share one. `scale` defaults to head_dim ** -0.5. `mask` is what `causal_mask` returns for
    the same lengths; without it, it is built here when it is needed. Returns [query_len, heads,
    head_dim] in the query's dtype. Decoding is the case `query_len == 1`; on a CPU one call per
    sequence beats padding them into a batch.

    Raises MisuseError when lengths or heads do not fit. Cost: gathers the KV (2 * context_len
    rows), then about query_len * context_len products less the masked corner.
    """
    query_len, heads, _ = query.shape
    if not 1 <= query_len <= context_len or context_len > len(block_table) * kv_cache.shape[2]:
        raise MisuseError(
            "Query, context and block table do not fit each other",
            query_len=query_len,
            context_len=context_len,
            blocks=len(block_table),
        )
    if heads % kv_cache.shape[3]:
        raise MisuseError(
            "Query heads must be a multiple of KV heads", heads=heads, kv_heads=kv_cache.shape[3]
        )
    pages = gather_pages(kv_cache, block_table, context_len)
    key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in pages)
    prefix_len = context_len - query_len
    if query_len > 1 and prefix_len and mask is None:
        mask = causal_mask(query_len, context_len, query)
    if mask is None:
        return _dense(query, key, value, None, causal=query_len > 1, scale=scale)
    assert mask is not None
    if query_len <= QUERY_ROWS:
        return _dense(query, key, value, mask, causal=False, scale=scale)
    out = torch.empty_like(query)
    for start in range(0, query_len, QUERY_ROWS):
        rows = slice(start, min(start + QUERY_ROWS, query_len))
        seen = prefix_len + rows.stop
        out[rows] = _dense(
            query[rows],
            key[:, :, :seen],
            value[:, :, :seen],
            mask[rows, :seen],
            causal=False,
            scale=scale,
        )
    return out


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """[query_len, heads, head_dim] of attention over [1, kv_heads, keys, head_dim]."""
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
