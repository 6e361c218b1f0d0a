"""The copy kernel, interpreted under a memory guard (on a GPU: as it is), and the staged copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kernels.checks import (
    DEVICE,
    INTERPRETED,
    check_copies,
    guarded,
)
from tests.kernels.memory_guard import MemoryFault

from ebbtide.bench.device_rig import HostQueue
from ebbtide.bench.paged_forms import FORMS, Shape, make_pages
from ebbtide.errors import MisuseError
from ebbtide.kernels.arena_records import ArenaRecords
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layers import layers_of
from ebbtide.kernels.layout import PagedLayout
from ebbtide.kernels.registration import Registration

pytest.importorskip("triton", reason="NO TRITON: kernels are not tested (pip install triton)")

from ebbtide.kernels import staged_copy  # it needs Triton

if TYPE_CHECKING:
    from tests.kernels.conftest import StandIn

SHAPE = Shape(layers=2, blocks=7, tokens=4, heads=2, dim=16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_is_exact_in_every_form_and_dtype(name: str, dtype: torch.dtype) -> None:
    check_copies(staged_copy, name, SHAPE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 6, 12])
def test_the_kernel_is_exact_in_every_alignment(dtype: torch.dtype, dim: int) -> None:
    check_copies(staged_copy, "blocks_first_nhd", SHAPE._replace(dim=dim, heads=1), dtype)


def test_long_fragments_take_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a tile, and not a multiple of it."""
    monkeypatch.setattr(
        staged_copy.Tile,
        "of",
        lambda table: original(table, tile_bytes=256),
    )
    check_copies(staged_copy, "mla", SHAPE._replace(dim=36), torch.float16)


original = staged_copy.Tile.of


@pytest.mark.skipif(not INTERPRETED, reason="the fault would end the device's context")
def test_a_wild_block_id_is_caught_by_the_guard() -> None:
    pages = make_pages(FORMS["mla"], SHAPE, torch.float16)
    table = FragmentTable.of(PagedLayout.from_tensors(pages.tensors, block_dim=0))
    copies = staged_copy.StagedCopies(HostQueue(), table, staging_bytes=4 * table.record_bytes)
    with (
        pytest.raises(Exception, match="load of 8 bytes") as caught,
        guarded(pages.tensors, [copies.staging]),
    ):
        copies.launch([SHAPE.blocks], to_blocks=False)
    assert isinstance(caught.value, MemoryFault) or isinstance(caught.value.__cause__, MemoryFault)


@pytest.mark.skipif(not INTERPRETED, reason="the queue of this test copies in host memory")
@pytest.mark.parametrize("name", ["kv_first_nhd", "padded"])
def test_records_in_an_arena_come_and_go_in_batches(name: str, stand_in: StandIn) -> None:
    """Five records through staging for two, over an arena that is registered in pieces."""
    form = FORMS[name]
    pages, target = (make_pages(form, SHAPE, torch.float16, seed=seed) for seed in (1, 2))
    tables = [
        FragmentTable.of(PagedLayout.from_tensors(one.tensors, block_dim=form.block_dim))
        for one in (pages, target)
    ]
    size = tables[0].record_bytes
    raw = torch.zeros(5 * 4096, dtype=torch.uint8)
    arena = raw[-raw.data_ptr() % 4096 :][: 4 * 4096]
    registration = Registration(
        stand_in.driver(), arena.data_ptr(), arena.numel(), piece_bytes=4096
    )
    ids, offsets = [6, 1, 0, 3, 2], [3000, 0, size, 3000 + size, 12000]
    down, up = (
        staged_copy.StagedCopies(HostQueue(), table, staging_bytes=2 * size + 1) for table in tables
    )
    down.gather(ArenaRecords(ids, arena, offsets, registration), stream=5)
    for block, offset in zip(ids, offsets, strict=True):
        assert torch.equal(arena[offset : offset + size], pages.record(block))
    assert arena.count_nonzero() <= 5 * size
    up.scatter(ArenaRecords(ids, arena, offsets, registration), stream=5)
    for block in ids:
        assert torch.equal(target.record(block), pages.record(block))
    assert not torch.equal(target.record(4), pages.record(4))
    registration.close()


@pytest.mark.skipif(not INTERPRETED, reason="the queue of this test copies in host memory")
@pytest.mark.parametrize("name", ["kv_first_nhd", "packed_blhnc", "hybrid"])
def test_layers_go_through_one_staging_buffer(name: str) -> None:
    """Each layer's method takes the whole's buffer, which holds more of its shorter records."""
    form = FORMS[name]
    pages, target = (make_pages(form, SHAPE, torch.float16, seed=seed) for seed in (1, 2))
    down, up = (
        PagedLayout.from_tensors(one.tensors, block_dim=form.block_dim) for one in (pages, target)
    )
    size = down.record_bytes
    ids, offsets = [6, 1, 0], [0, 2 * size, size]
    arena = torch.zeros(3 * size, dtype=torch.uint8)
    whole = staged_copy.StagedCopies(HostQueue(), FragmentTable.of(down), staging_bytes=size)
    whole.gather(ArenaRecords(ids, arena, offsets), stream=5)
    for layer in layers_of(up):
        table = FragmentTable.of(layer.layout)
        copies = staged_copy.StagedCopies(HostQueue(), table, staging=whole.staging)
        assert copies.staging is whole.staging
        copies.scatter(ArenaRecords(ids, arena, layer.offsets(offsets)), stream=5)
    for block in range(SHAPE.blocks):
        assert torch.equal(target.record(block), pages.record(block)) is (block in ids)


def test_staging_that_is_too_small_is_not_shared() -> None:
    pages = make_pages(FORMS["mla"], SHAPE, torch.float16, device=DEVICE)
    table = FragmentTable.of(PagedLayout.from_tensors(pages.tensors, block_dim=0))
    small = torch.zeros(table.record_bytes - 1, dtype=torch.uint8, device=DEVICE)
    assert staged_copy.StagedCopies(HostQueue(), table, staging=small).staging is not small


def test_what_does_not_fit_is_refused() -> None:
    pages = make_pages(FORMS["mla"], SHAPE, torch.float16)
    table = FragmentTable.of(PagedLayout.from_tensors(pages.tensors, block_dim=0))
    copies = staged_copy.StagedCopies(HostQueue(), table)
    arena = torch.zeros(4 * table.record_bytes, dtype=torch.uint8)
    with pytest.raises(MisuseError, match="outside the registered"):
        copies.gather(ArenaRecords([7], arena, [0]), stream=5)
    with pytest.raises(MisuseError, match="outside the arena"):
        copies.scatter(ArenaRecords([0], arena, [3 * table.record_bytes + 1]), stream=5)
