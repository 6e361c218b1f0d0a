"""Paged attention against a plain dense computation in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ebbtide.errors import MisuseError
from ebbtide.kernels import attention
from ebbtide.kernels.attention import causal_mask, gather_pages, paged_attention, write_kv

BLOCK, BLOCKS = 4, 24


def paged(
    context: int, kv_heads: int, dim: int, *, blocks_first: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache of NaN with `context` tokens written at scattered blocks; also key, value, table."""
    draw = torch.Generator().manual_seed(context)
    if blocks_first:
        cache = torch.full((BLOCKS, 2, BLOCK, kv_heads, dim), math.nan).transpose(0, 1)
    else:
        cache = torch.full((2, BLOCKS, BLOCK, kv_heads, dim), math.nan)
    key, value = (torch.randn(context, kv_heads, dim, generator=draw) for _ in range(2))
    table = torch.randperm(BLOCKS, generator=draw)
    where = torch.arange(context)
    write_kv(cache, table[where // BLOCK] * BLOCK + where % BLOCK, key, value)
    return cache, key, value, table


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, one query and one head at a time."""
    query, key, value = query.double(), key.double(), value.double()
    length, heads, dim = query.shape
    context, kv_heads, _ = key.shape
    out = torch.empty_like(query)
    for row in range(length):
        seen = context - length + row + 1
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = key[:seen, shared] @ query[row, head] / math.sqrt(dim)
            out[row, head] = torch.softmax(scores, 0) @ value[:seen, shared]
    return out


@pytest.mark.parametrize("blocks_first", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("length", "context"), [(1, 1), (1, 4), (1, 75), (5, 5), (16, 16), (7, 30), (33, 90)]
)
def test_agrees_with_dense(
    length: int, context: int, heads: int, kv_heads: int, blocks_first: bool
) -> None:
    cache, key, value, table = paged(context, kv_heads, 8, blocks_first=blocks_first)
    query = torch.randn(length, heads, 8, generator=torch.Generator().manual_seed(1))
    out = paged_attention(query, cache, table, context)
    assert out.dtype == query.dtype
    torch.testing.assert_close(out.double(), dense(query, key, value), atol=2e-6, rtol=0)


def test_rows_in_pieces_and_a_shared_mask_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, key, value, table = paged(90, 2, 8)
    query = torch.randn(33, 4, 8, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(attention, "QUERY_ROWS", 10)
    for mask in (None, causal_mask(33, 90, query)):
        out = paged_attention(query, cache, table, 90, mask=mask)
        torch.testing.assert_close(out.double(), dense(query, key, value), atol=2e-6, rtol=0)


def test_scale_is_used() -> None:
    cache, key, value, table = paged(20, 2, 8)
    query = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(1))
    out = paged_attention(query, cache, table, 20, scale=0.7)
    expected = dense(query * 0.7 * math.sqrt(8), key, value)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


def test_views_of_a_joint_projection_serve_as_arguments() -> None:
    """Query, key and value as the model has them: column slices of one product."""
    joint = torch.randn(9, 8, 8, generator=torch.Generator().manual_seed(1))
    query, key, value = torch.split(joint, [4, 2, 2], dim=1)
    cache = torch.zeros(2, BLOCKS, BLOCK, 2, 8)
    table = torch.tensor([5, 3, 9])
    where = torch.arange(9)
    write_kv(cache, table[where // BLOCK] * BLOCK + where % BLOCK, key, value)
    got = gather_pages(cache, table, 9)
    assert torch.equal(got[0], key)
    assert torch.equal(got[1], value)
    out = paged_attention(query, cache, table, 9)
    torch.testing.assert_close(out.double(), dense(query, key, value), atol=2e-6, rtol=0)


def test_only_the_named_slots_are_written() -> None:
    cache = torch.zeros(2, 3, BLOCK, 1, 2)
    write_kv(cache, torch.tensor([5, 10]), torch.ones(2, 1, 2), torch.full((2, 1, 2), 2.0))
    flat = cache.view(2, 12, 2)
    assert torch.equal(flat[0, [5, 10]], torch.ones(2, 2))
    assert torch.equal(flat[1, [5, 10]], torch.full((2, 2), 2.0))
    flat[:, [5, 10]] = 0
    assert not cache.any()


@pytest.mark.parametrize(
    ("length", "context", "heads"), [(5, 4, 2), (0, 4, 2), (1, BLOCKS * BLOCK + 1, 2), (1, 4, 3)]
)
def test_what_does_not_fit_is_refused(length: int, context: int, heads: int) -> None:
    cache = torch.zeros(2, BLOCKS, BLOCK, 2, 8)
    with pytest.raises(MisuseError):
        paged_attention(torch.zeros(length, heads, 8), cache, torch.arange(BLOCKS), context)
