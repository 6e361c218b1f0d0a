"""The checks of Triton kernels, as functions: tests run them, and tests of planted faults too."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from tests.kernels.memory_guard import Traffic, memory_guard

from ebbtide.bench.device_rig import HostQueue
from ebbtide.bench.paged_forms import FORMS, Form, Shape, make_pages
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SENTINEL = 0xA5
# Norm of the error by norm of the result, against float64.
ERROR_MAX = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def guarded(
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    forbidden: Sequence[torch.Tensor] = (),
) -> contextlib.AbstractContextManager[Traffic]:
    """The guard in the interpreter, nothing on a device."""
    if INTERPRETED:
        return memory_guard(reads, writes, forbidden)
    return contextlib.nullcontext(Traffic())


def check_copies(
    staged_copy: ModuleType,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    *,
    table_of: Callable[[PagedLayout], FragmentTable] = FragmentTable.of,
) -> None:
    """Blocks to staging and other blocks from it: exact, each byte once, and nothing else moves."""
    form = FORMS[name]
    pages, target = (make_pages(form, shape, dtype, device=DEVICE, seed=seed) for seed in (1, 2))
    layouts = [
        PagedLayout.from_tensors(one.tensors, block_dim=form.block_dim) for one in (pages, target)
    ]
    size = layouts[0].record_bytes
    ids, to = [shape.blocks - 1, 0, 3], [1, 4, shape.blocks - 1]
    down, up = (
        staged_copy.StagedCopies(HostQueue(), table_of(layout), staging_bytes=4 * size)
        for layout in layouts
    )
    down.staging.fill_(SENTINEL)
    with guarded(pages.tensors, [down.staging[: 3 * size]]) as traffic:
        down.launch(ids, to_blocks=False, programs=2)
    if INTERPRETED:
        assert traffic.store_bytes == 3 * size
    for block, record in zip(ids, down.staging.view(4, size), strict=False):
        assert torch.equal(record.cpu(), pages.record(block)), (name, block)
    assert (down.staging[3 * size :] == SENTINEL).all()

    expected = [target.record(block) for block in range(shape.blocks)]
    for block, record in zip(to, down.staging.view(4, size), strict=False):
        expected[block] = record.cpu()
    up.staging.copy_(down.staging)
    with guarded([up.staging], target.tensors) as traffic:
        up.launch(to, to_blocks=True, programs=3)
    if INTERPRETED:
        assert traffic.store_bytes == 3 * size
    for block, record in enumerate(expected):
        assert torch.equal(target.record(block), record), (name, block)


class Case(NamedTuple):
    """Shapes of one attention test. The longest context comes last: nothing lies behind it."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 8
    splits: int | None = None
    form: str = "kv_first_nhd"


class Problem(NamedTuple):
    """Inputs of one attention call, and what it should return."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    expected: torch.Tensor
    unowned: list[torch.Tensor]  # rows of the cache that belong to no sequence


def keys_and_values(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """A layer as attention takes it: [2, blocks, tokens, heads, dim], a view."""
    if form.view == "BHTC":  # keys and values side by side in the last dimension
        return tensor.view(*tensor.shape[:3], 2, -1).permute(3, 0, 2, 1, 4)
    if form.view == "BTHC":
        return tensor.view(*tensor.shape[:3], 2, -1).permute(3, 0, 1, 2, 4)
    return tensor if form.view[0] == "K" else tensor.transpose(0, 1)


def make_problem(case: Case, dtype: torch.dtype, *, seed: int = 3) -> Problem:
    """A cache that is NaN wherever no sequence has a token; unused table entries are wild.

    No sequence has block 0, where a masked look-up of the table leads.
    """
    draw = torch.Generator().manual_seed(seed)
    pages_of = [-(-length // case.page) for length in case.contexts]
    blocks = sum(pages_of) + 2
    shape = Shape(1, blocks, case.page, case.kv_heads, case.dim)
    form = FORMS[case.form]
    (tensor,) = make_pages(form, shape, dtype).tensors
    kv_cache = keys_and_values(tensor, form)
    kv_cache.fill_(float("nan"))
    order = (1 + torch.randperm(blocks - 1, generator=draw)).tolist()
    tables = torch.full((len(case.contexts), max(pages_of)), 1 << 28, dtype=torch.int32)
    expected, unowned = [], []
    query = torch.randn(sum(case.queries), case.heads, case.dim, generator=draw).to(dtype)
    starts = [0, *itertools.accumulate(case.queries)]
    for number, (length, count) in enumerate(zip(case.contexts, pages_of, strict=True)):
        own, order = order[:count], order[count:]
        tables[number, :count] = torch.tensor(own, dtype=torch.int32)
        rows = torch.randn(2, length, case.kv_heads, case.dim, generator=draw).to(dtype)
        rows[0] *= 3.0  # keys and values that are easily told apart
        for token in range(length):
            kv_cache[:, own[token // case.page], token % case.page] = rows[:, token]
        if length % case.page:
            unowned.append(kv_cache[:, own[-1], length % case.page :])
        mine = query[starts[number] : starts[number + 1]]
        expected.append(dense_attention(mine, rows[0], rows[1]))
    return Problem(
        query,
        kv_cache,
        tables,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(case.contexts, dtype=torch.int32),
        torch.cat(expected),
        [*unowned, *(kv_cache[:, block] for block in [0, *order])],
    )


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows over all of them, in float64."""
    length, heads, dim = query.shape
    context, kv_heads, _ = key.shape
    key, value = (one.double().repeat_interleave(heads // kv_heads, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * dim**-0.5
    hidden = torch.ones(length, context, dtype=torch.bool).triu(context - length + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def check_attention(
    paged_attention: ModuleType,
    case: Case,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    tables: torch.Tensor | None = None,
) -> Traffic:
    """One batch against float64. `tables`: given to the kernel in place of the right ones."""
    problem = make_problem(case, dtype)
    given = problem.tables if tables is None else tables
    batch = paged_attention.Batch(
        given.to(device),
        problem.starts.to(device),
        problem.contexts.to(device),
        max(case.queries),
    )
    with guarded(forbidden=problem.unowned) as traffic:
        out = paged_attention.attend(
            problem.query.to(device), problem.kv_cache.to(device), batch, splits=case.splits
        )
    assert out.dtype == dtype
    error = (out.cpu().double() - problem.expected).norm() / problem.expected.norm()
    assert error < ERROR_MAX[dtype], float(error)
    return traffic
