"""Triton kernels for attention over paged KV: a tile of queries against a sequence's pages.

Importing this module needs Triton. `paged_attention` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton
def _product(a, b, EXACT: tl.constexpr, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Matrix product in float32. UPCAST: the interpreter holds bfloat16 as bit patterns and
    computes with those, so it is given float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]  # Triton
def attend_pages(  # type: ignore[no-untyped-def]  # the compiler reads tl types alone
    query,
    key,
    value,
    block_tables,
    query_starts,
    context_lens,
    out,
    part_sum,
    part_max,
    part_weight,
    scale_log2,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_row_stride,
    key_head_stride,
    value_block_stride,
    value_row_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    heads,
    splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (sequences, KV heads, query tiles * splits).

    The rows of a tile are `TOKENS` tokens times the `GROUP` query heads that share one KV head, so
    that each key and value is read once for all of them. `SPLIT`: a program covers one of `splits`
    parts of the context, and leaves a sum, a maximum and a weight for `merge_splits`.

    Only `context_lens[sequence]` rows of the pages are ever read, and only table entries of pages
    that have such rows.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    first = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first
    context_len = tl.load(context_lens + sequence)
    if tile * TOKENS >= query_len:
        return

    row = tl.arange(0, ROWS)
    token = tile * TOKENS + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < TOKENS * GROUP) & (token < query_len)
    position = context_len - query_len + token
    dim = tl.arange(0, DIM)
    place = (first + token).to(tl.int64)
    queries = query + place[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(queries + dim[None, :], mask=real[:, None], other=0.0)

    start = 0
    end = tl.minimum(context_len, context_len - query_len + (tile + 1) * TOKENS)
    if SPLIT:
        part = tl.cdiv(tl.cdiv(context_len, splits), KEYS) * KEYS
        start = split * part
        end = tl.minimum(start + part, end)

    high = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    lane = tl.arange(0, KEYS)
    table = block_tables + sequence.to(tl.int64) * table_stride
    # The table is read one tile ahead: keys and values then wait for no load of their own tile.
    ahead = tl.load(table + (start + lane) // PAGE, mask=start + lane < end, other=0)
    for done in range(start, end, KEYS):
        index = done + lane
        seen = index < end
        block = ahead.to(tl.int64)
        ahead = tl.load(table + (index + KEYS) // PAGE, mask=index + KEYS < end, other=0)
        keys = key + block * key_block_stride + index % PAGE * key_row_stride
        keys += kv_head * key_head_stride
        k = tl.load(keys[None, :] + dim[:, None], mask=seen[None, :], other=0.0)
        scores = _product(q, k, EXACT, UPCAST) * scale_log2
        looks = seen[None, :] & (index[None, :] <= position[:, None])
        scores = tl.where(looks, scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        p = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(high - pivot)
        weight = weight * shrink + tl.sum(p, 1)
        values = value + block * value_block_stride + index % PAGE * value_row_stride
        values += kv_head * value_head_stride
        v = tl.load(values[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        if not EXACT:
            p = p.to(q.dtype)
        total = total * shrink[:, None] + _product(p, v, EXACT, UPCAST)
        high = higher

    if SPLIT:
        slot = (place * heads + head) * splits + split
        tl.store(part_sum + slot[:, None] * DIM + dim[None, :], total, mask=real[:, None])
        tl.store(part_max + slot, high, mask=real)
        tl.store(part_weight + slot, weight, mask=real)
    else:
        outs = out + place[:, None] * out_token_stride + head[:, None] * out_head_stride
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(outs + dim[None, :], result, mask=real[:, None])


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]  # Triton
def merge_splits(  # type: ignore[no-untyped-def]  # the compiler reads tl types alone
    part_sum,
    part_max,
    part_weight,
    out,
    out_token_stride,
    out_head_stride,
    heads,
    splits,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid (tokens, heads): the parts of one row put together. `SPLITS`: a power of two above."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = (token * heads + head) * splits + tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    real = tl.arange(0, SPLITS) < splits
    high = tl.load(part_max + slot, mask=real, other=float("-inf"))
    weight = tl.load(part_weight + slot, mask=real, other=0.0)
    share = tl.exp2(high - tl.max(high, 0))
    parts = tl.load(part_sum + slot[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
    result = tl.sum(parts * share[:, None], 0) / tl.sum(weight * share, 0)
    outs = out + token * out_token_stride + head * out_head_stride
    tl.store(outs + dim, result.to(out.dtype.element_ty))
