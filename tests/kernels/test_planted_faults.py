"""Faults put into the kernels on purpose: the checks that the other tests make must see each.

A fault is a change of one line of a module's source, which is then imported under another name.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kernels.checks import (
    INTERPRETED,
    SENTINEL,
    Case,
    check_attention,
    check_copies,
    guarded,
    make_problem,
)
from tests.kernels.memory_guard import MemoryFault

from ebbtide.bench.device_rig import HostQueue
from ebbtide.bench.paged_forms import Shape
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layout import PagedLayout

pytest.importorskip("triton", reason="NO TRITON: kernels are not tested (pip install triton)")

from ebbtide.kernels import (  # they need Triton
    paged_attention,
    staged_copy,
    triton_attention,
    triton_copy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    Plant = Callable[[ModuleType, str, str], ModuleType]

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a fault would end the device's context")

SHAPE = Shape(layers=2, blocks=7, tokens=4, heads=2, dim=16)
PREFILL = Case((5, 41), (5, 17))


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    """Returns a copy of a module in which one line reads differently."""
    planted: list[str] = []

    def import_changed(module: ModuleType, right: str, wrong: str) -> ModuleType:
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        assert source.count(right) == 1, f"{right!r} is not there once: the fault cannot be planted"
        name = f"planted_{len(planted)}_{module.__name__.rpartition('.')[2]}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(right, wrong), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        planted.append(name)
        sys.modules[name] = changed
        spec.loader.exec_module(changed)
        return changed

    yield import_changed
    for name in planted:
        del sys.modules[name]


def seen(check: Callable[[], object]) -> BaseException:
    """What a check raised; the interpreter wraps what a kernel raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of many kinds, judged by the caller
        check()
    error: BaseException = caught.value
    while not isinstance(error, AssertionError | RuntimeWarning) and error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, AssertionError | RuntimeWarning), repr(error)
    return error


def test_unchanged_modules_pass_every_check(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planting itself breaks nothing."""
    kernels = plant(triton_attention, "import triton\n", "import triton\n")
    monkeypatch.setattr(paged_attention, "attend_pages", kernels.attend_pages)
    check_attention(plant(paged_attention, "LOG2_E =", "LOG2_E ="), PREFILL, torch.float16)
    copy = plant(triton_copy, "import triton\n", "import triton\n")
    monkeypatch.setattr(staged_copy, "copy_fragments", copy.copy_fragments)
    check_copies(staged_copy, "padded", SHAPE, torch.float16)


def test_keys_and_values_swapped(plant: Plant) -> None:
    swapped = plant(
        paged_attention,
        "key, value = kv_cache[0], kv_cache[1]",
        "key, value = kv_cache[1], kv_cache[0]",
    )
    for dtype in (torch.float32, torch.bfloat16):
        seen(partial(check_attention, swapped, PREFILL, dtype))


def test_keys_and_values_swapped_in_a_copy() -> None:
    def swapped(layout: PagedLayout) -> FragmentTable:
        table = FragmentTable.of(layout)
        table.record_offset[0::2], table.record_offset[1::2] = (
            table.record_offset[1::2].copy(),
            table.record_offset[0::2].copy(),
        )
        return table

    seen(lambda: check_copies(staged_copy, "kv_first_nhd", SHAPE, torch.float16, table_of=swapped))


@pytest.mark.parametrize("what", ["k", "v"])
def test_rows_behind_the_context_are_read(
    what: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = "seen[None, :]" if what == "k" else "seen[:, None]"
    changed = plant(triton_attention, f"mask={mask}, other=0.0", f"mask={mask} | True, other=0.0")
    monkeypatch.setattr(paged_attention, "attend_pages", changed.attend_pages)
    seen(lambda: check_attention(paged_attention, PREFILL, torch.float16))


def test_table_entries_behind_the_context_are_read(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = plant(
        triton_attention, "mask=index + KEYS < end, other=0", "mask=index >= 0, other=0"
    )
    monkeypatch.setattr(paged_attention, "attend_pages", changed.attend_pages)
    error = seen(lambda: check_attention(paged_attention, PREFILL, torch.float16))
    assert isinstance(error, MemoryFault)


def test_a_copy_reads_behind_the_end_of_a_fragment(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = plant(
        triton_copy,
        "mask = place[None, :] < words[:, None]",
        "mask = place[None, :] <= words[:, None]",
    )
    monkeypatch.setattr(staged_copy, "copy_fragments", changed.copy_fragments)
    shape = SHAPE._replace(dim=24)  # not a power of two: a fragment does not fill its tile
    seen(lambda: check_copies(staged_copy, "mla", shape, torch.float16))


def far_pages(blocks: int = 3) -> torch.Tensor:
    """Blocks 2.4 GB apart, of which only the last is ever touched."""
    tensor = torch.empty((blocks - 1) * (12 << 27) * 2 + 256, dtype=torch.uint8)
    return tensor.as_strided((blocks, 256), ((12 << 27) * 2, 1))


def check_far_copy() -> None:
    pages = far_pages()
    pages[2].copy_(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    table = FragmentTable.of(PagedLayout.from_tensors([pages], block_dim=0))
    copies = staged_copy.StagedCopies(HostQueue(), table, staging_bytes=256)
    copies.staging.fill_(SENTINEL)
    with guarded([pages], [copies.staging]):
        copies.launch([2], to_blocks=False)
    assert torch.equal(copies.staging, pages[2])


def check_far_attention() -> None:
    case = Case((8,), (1,), splits=1)
    problem = make_problem(case, torch.float16)
    step = 12 << 27  # elements between blocks
    size = case.page * case.kv_heads * case.dim
    whole = torch.empty(step * 2 + 2 * size, dtype=torch.float16)
    dims = (3, 2, case.page, case.kv_heads, case.dim)
    strides = (step, size, case.kv_heads * case.dim, case.dim, 1)
    far = whole.as_strided(dims, strides).transpose(0, 1)
    far[:, 2] = problem.kv_cache[:, int(problem.tables[0, 0])]
    tables = torch.tensor([[2]], dtype=torch.int32)
    batch = paged_attention.Batch(tables, problem.starts, problem.contexts, 1)
    with guarded():
        out = paged_attention.attend(problem.query, far, batch, splits=1)
    assert (out.double() - problem.expected).abs().max() < 1e-2


def test_addresses_of_32_bits_in_a_copy(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    check_far_copy()
    changed = plant(
        triton_copy, "start + block * stride", "start + block.to(tl.int32) * stride.to(tl.int32)"
    )
    monkeypatch.setattr(staged_copy, "copy_fragments", changed.copy_fragments)
    seen(check_far_copy)


def test_addresses_of_32_bits_in_attention(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    check_far_attention()
    changed = plant(triton_attention, "block = ahead.to(tl.int64)", "block = ahead")
    monkeypatch.setattr(paged_attention, "attend_pages", changed.attend_pages)
    seen(check_far_attention)


@pytest.mark.parametrize("name", ["padded", "hybrid", "packed_blnhc"])
def test_padding_between_blocks_ignored(name: str) -> None:
    def unpadded(layout: PagedLayout) -> FragmentTable:
        table = FragmentTable.of(layout)
        table.block_stride[:] = table.length if name != "packed_blnhc" else table.length // 2
        return table

    seen(lambda: check_copies(staged_copy, name, SHAPE, torch.float16, table_of=unpadded))


def test_a_block_table_of_a_step_before() -> None:
    """A block was given to another sequence in between: the old table leads to that one's rows."""
    right = make_problem(PREFILL, torch.float16).tables
    stale = right.clone()
    stale[1, 2] = right[0, 0]
    for dtype in (torch.float32, torch.float16):
        seen(partial(check_attention, paged_attention, PREFILL, dtype, tables=stale))
    check_attention(paged_attention, PREFILL, torch.float16, tables=right)


def test_fragments_of_a_tensor_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that was made before the cache was allocated anew."""
    tables: list[FragmentTable] = []

    def stale(layout: PagedLayout) -> FragmentTable:
        tables.append(FragmentTable.of(layout))
        return tables[0]

    seen(lambda: check_copies(staged_copy, "mla", SHAPE, torch.float16, table_of=stale))
