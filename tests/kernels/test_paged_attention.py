"""Attention over pages by Triton, interpreted under a memory guard, against float64."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import INTERPRETED, Case, check_attention, make_problem

from ebbtide.bench.paged_forms import FORMS
from ebbtide.errors import MisuseError

pytest.importorskip("triton", reason="NO TRITON: kernels are not tested (pip install triton)")

from ebbtide.kernels import paged_attention  # it needs Triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DECODE = Case((1, 8, 37), (1, 1, 1))
PREFILL = Case((5, 41), (5, 17))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_agrees_with_float64(case: Case, dtype: torch.dtype, device: str) -> None:
    check_attention(paged_attention, case, dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [name for name in FORMS if name != "mla"])
def test_reads_every_form(form: str, dtype: torch.dtype, device: str) -> None:
    """All but latent vectors, which are keys and values at once: that attention is not here."""
    check_attention(paged_attention, PREFILL._replace(form=form), dtype, device=device)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_query_heads_share_a_kv_head(heads: int, kv_heads: int, device: str) -> None:
    case = Case((9, 20), (9, 3), heads=heads, kv_heads=kv_heads)
    check_attention(paged_attention, case, torch.float32, device=device)


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_parts_of_a_context_are_put_together(splits: int, device: str) -> None:
    """More parts than the shorter context has tiles: some are empty."""
    case = Case((3, 150), (1, 1), splits=splits)
    check_attention(paged_attention, case, torch.float16, device=device)


def test_pages_need_not_be_powers_of_two(device: str) -> None:
    check_attention(paged_attention, PREFILL._replace(page=6), torch.float32, device=device)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts")
@pytest.mark.parametrize("splits", [1, 2])
def test_decoding_reads_each_key_and_value_once(splits: int) -> None:
    """The group of query heads shares what is read: no byte twice, none beyond the context."""
    case = Case((5, 83), (1, 1), heads=8, kv_heads=2, splits=splits)
    traffic = check_attention(paged_attention, case, torch.float16)
    kv = sum(case.contexts) * 2 * case.kv_heads * case.dim * 2
    query = 2 * case.heads * case.dim * 2 * splits
    merge = 0 if splits == 1 else 2 * case.heads * splits * (case.dim + 2) * 4
    tables = case.kv_heads * sum(case.contexts) * 4
    numbers = 2 * case.kv_heads * splits * 3 * 4
    assert traffic.load_bytes == kv + query + merge + tables + numbers


def test_few_sequences_are_split_and_many_are_not() -> None:
    def splits(sequences: int, blocks: int) -> int:
        tables = torch.zeros(sequences, blocks, dtype=torch.int32)
        starts = torch.zeros(sequences + 1, dtype=torch.int32)
        batch = paged_attention.Batch(tables, starts, starts[1:], 1)
        return paged_attention._splits(batch, sequences * 8, 16)

    assert splits(1, 2048) == 33
    assert splits(1, 32) == 2
    assert splits(1, 1) == 1
    assert splits(64, 2048) == 1


def test_what_does_not_fit_is_refused() -> None:
    problem = make_problem(DECODE, torch.float16)
    batch = paged_attention.Batch(problem.tables, problem.starts, problem.contexts, 1)
    for query, cache in (
        (problem.query[:, :3], problem.kv_cache),  # heads
        (problem.query.float(), problem.kv_cache),
        (problem.query.double(), problem.kv_cache.double()),
        (problem.query[..., :12], problem.kv_cache[..., :12]),
        (problem.query[..., :8], problem.kv_cache[..., :8]),
        (problem.query, problem.kv_cache.transpose(3, 4)),
    ):
        with pytest.raises(MisuseError, match="do not fit"):
            paged_attention.attend(query, cache, batch)
