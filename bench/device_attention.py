"""Stages of `ebbtide bench device`: attention over pages, exact and fast."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from ebbtide.kernels.attention import paged_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.bench.device_rig import DeviceRig
    from ebbtide.kernels.paged_attention import Batch

ERROR_MAX = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
PAGE = 16


class Problem(NamedTuple):
    """One layer's cache and a batch that looks at it."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    batch: Batch
    contexts: list[int]
    queries: list[int]

    def reference(self) -> torch.Tensor:
        """By torch on the host, in float64."""
        cache, parts = self.kv_cache.cpu().double(), []
        rows = torch.split(self.query.cpu().double(), self.queries)
        tables = self.batch.block_tables.cpu().long()
        for query, table, length in zip(rows, tables, self.contexts, strict=True):
            parts.append(paged_attention(query, cache, table, length))
        return torch.cat(parts)


def make_problem(
    rig: DeviceRig,
    dtype: torch.dtype,
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
) -> Problem:
    """Random keys and values at scattered pages."""
    from ebbtide.kernels.paged_attention import Batch

    counts = [-(-length // PAGE) for length in contexts]
    blocks = sum(counts) + 7
    draw = torch.Generator(device=rig.device).manual_seed(5)
    shape = (2, blocks, PAGE, kv_heads, dim)
    cache = torch.randn(shape, generator=draw, device=rig.device).to(dtype)
    order = torch.randperm(blocks, generator=draw, device=rig.device).to(torch.int32)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=rig.device)
    start = 0
    for number, count in enumerate(counts):
        tables[number, :count] = order[start : start + count]
        start += count
    query = torch.randn((sum(queries), heads, dim), generator=draw, device=rig.device).to(dtype)
    numbers = [0, *itertools.accumulate(queries)]
    batch = Batch(
        tables,
        torch.tensor(numbers, dtype=torch.int32, device=rig.device),
        torch.tensor(contexts, dtype=torch.int32, device=rig.device),
        max(queries),
    )
    return Problem(query, cache, batch, list(contexts), list(queries))


def correctness(rig: DeviceRig) -> None:
    """Every dtype, decoding and prefill behind a prefix, split and whole."""
    from ebbtide.kernels.paged_attention import attend

    scale = rig.pick(1, 8)
    heads = rig.pick((4, 2, 16), (32, 8, 128))
    for dtype, bound in ERROR_MAX.items():
        for contexts, queries in (((37 * scale, 5), (1, 1)), ((41 * scale, 9), (17 * scale, 9))):
            problem = make_problem(
                rig, dtype, contexts, queries, heads=heads[0], kv_heads=heads[1], dim=heads[2]
            )
            expected = problem.reference()
            for splits in (1, 3) if max(queries) == 1 else (1,):
                out = attend(problem.query, problem.kv_cache, problem.batch, splits=splits)
                error = float((out.cpu().double() - expected).norm() / expected.norm())
                rig.row(
                    "attention.exact",
                    ok=error < bound,
                    dtype=str(dtype).removeprefix("torch."),
                    contexts=contexts,
                    queries=queries,
                    splits=splits,
                    error=error,
                )


def decode(rig: DeviceRig) -> None:
    """Bytes of KV by time, as a share of plain copies, against dense attention of torch."""
    from ebbtide.kernels.paged_attention import Tiling, attend

    shapes = ((1, 32768), (8, 8192), (32, 4096), (64, 4096), (128, 2048))
    heads, kv_heads, dim = rig.pick((4, 2, 16), (32, 8, 128))
    for sequences, context in rig.pick(((2, 64),), shapes):
        problem = make_problem(
            rig,
            torch.bfloat16,
            [context] * sequences,
            [1] * sequences,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
        )
        kv_bytes = sequences * context * kv_heads * dim * 4
        programs = sequences * kv_heads
        best: tuple[float, int, Tiling] | None = None
        usual = Tiling.of(torch.bfloat16, dim, heads // kv_heads, decode=True)
        for splits in sorted(
            {max(1, min(64, of // programs)) for of in rig.pick((8,), (264, 528, 1056))}
        ):
            for keys, warps, stages in rig.pick(
                ((64, 4, 3),), ((32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 3))
            ):
                tiling = usual._replace(keys=keys, warps=warps, stages=stages)
                took_ms = rig.milliseconds(
                    lambda one=tiling, parts=splits, of=problem: attend(  # type: ignore[misc]  # bound now
                        of.query, of.kv_cache, of.batch, splits=parts, tiling=one
                    )
                )
                if best is None or took_ms < best[0]:
                    best = (took_ms, splits, tiling)
            if rig.left_s < 0.25 * rig.budget_s:
                break
        assert best is not None
        usual_ms = rig.milliseconds(
            lambda of=problem: attend(of.query, of.kv_cache, of.batch)  # type: ignore[misc]  # bound now
        )
        dense_ms = _dense_ms(rig, problem)
        speed = kv_bytes / best[0] / 1e6
        rig.row(
            "attention.decode",
            sequences=sequences,
            context=context,
            best_ms=best[0],
            splits=best[1],
            keys=best[2].keys,
            warps=best[2].warps,
            stages=best[2].stages,
            usual_ms=usual_ms,
            gb_s=speed,
            of_copy=speed / rig.figures.get("device", speed),
            dense_ms=dense_ms,
        )


def _dense_ms(rig: DeviceRig, problem: Problem) -> float:
    """torch's attention over the same tokens without pages: nothing to look up."""
    tables = problem.batch.block_tables.long()
    heads = problem.query.shape[1]
    count, context = len(problem.contexts), problem.contexts[0]
    dim = problem.query.shape[2]
    key, value = (
        pages[tables].reshape(count, context, -1, dim).transpose(1, 2).contiguous()
        for pages in problem.kv_cache
    )
    query = problem.query.view(count, 1, heads, dim).transpose(1, 2)
    return rig.milliseconds(
        lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    )


def prefill(rig: DeviceRig) -> None:
    """Operations by time, without and behind a cached prefix."""
    from ebbtide.kernels.paged_attention import attend

    heads, kv_heads, dim = rig.pick((4, 2, 16), (32, 8, 128))
    shapes = ((1, 2048, 0), (1, 2048, 30720), (4, 512, 7680))
    for sequences, new, prefix in rig.pick(((1, 16, 32),), shapes):
        problem = make_problem(
            rig,
            torch.bfloat16,
            [new + prefix] * sequences,
            [new] * sequences,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
        )
        took_ms = rig.milliseconds(
            lambda of=problem: attend(of.query, of.kv_cache, of.batch)  # type: ignore[misc]  # bound now
        )
        pairs = sequences * (new * prefix + new * (new + 1) // 2)
        rig.row(
            "attention.prefill",
            sequences=sequences,
            new=new,
            prefix=prefix,
            took_ms=took_ms,
            tflop_s=4 * heads * dim * pairs / took_ms / 1e9,
        )
