"""Copies by the copy engines: exact in every form of paged memory, and in the right order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ebbtide.bench.paged_forms import FORMS, Shape, make_pages
from ebbtide.errors import MisuseError
from ebbtide.kernels.arena_records import ArenaRecords
from ebbtide.kernels.copy_engine import EngineCopies
from ebbtide.kernels.driver import Order
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layout import PagedLayout
from ebbtide.kernels.registration import Registration
from ebbtide.kernels.streams import Stream

if TYPE_CHECKING:
    from tests.kernels.conftest import StandIn

    from ebbtide.bench.paged_forms import Pages

SHAPE = Shape(layers=2, blocks=9, tokens=4, heads=2, dim=8)
GUARD = 0xA5


def table_of(pages: Pages) -> FragmentTable:
    layout = PagedLayout.from_tensors(pages.tensors, block_dim=pages.form.block_dim)
    return FragmentTable.of(layout)


@pytest.mark.parametrize("name", FORMS)
def test_down_and_up_again_is_exact_in_every_form(name: str, stand_in: StandIn) -> None:
    driver = stand_in.driver()
    pages, target = (make_pages(FORMS[name], SHAPE, torch.bfloat16, seed=seed) for seed in (1, 2))
    table, stream = table_of(pages), Stream(driver)
    size = table.record_bytes + 16
    ids, offsets = [7, 2, 3, 0], [3 * size, 0, size, 5 * size]
    arena = torch.full((6 * size,), GUARD, dtype=torch.uint8)
    EngineCopies(driver, table).gather(ArenaRecords(ids, arena, offsets), stream=stream.handle)
    assert (arena == GUARD).all()
    assert stand_in.last_order == Order.STREAM
    stream.synchronize()
    assert stand_in.bytes == len(ids) * table.record_bytes  # each byte once
    left = arena.clone()
    for block, offset in zip(ids, offsets, strict=True):
        assert torch.equal(arena[offset:][: table.record_bytes], pages.record(block))
        left[offset:][: table.record_bytes] = GUARD
    assert (left == GUARD).all()

    expected = [target.record(block) for block in range(SHAPE.blocks)]
    for block, offset in zip(ids, offsets, strict=True):
        expected[block] = arena[offset:][: table.record_bytes].clone()
    EngineCopies(driver, table_of(target)).scatter(
        ArenaRecords(ids, arena, offsets), stream=stream.handle
    )
    stream.synchronize()
    assert stand_in.last_order == Order.ANY
    for block, record in enumerate(expected):
        assert torch.equal(target.record(block), record)
    stream.close()


def test_neighbours_go_as_one_copy(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    pages = make_pages(FORMS["packed_blhnc"], SHAPE, torch.float16)
    table, stream = table_of(pages), Stream(driver)
    arena = torch.zeros(9 * table.record_bytes, dtype=torch.uint8)
    ids = [3, 4, 5, 8]
    offsets = [slot * table.record_bytes for slot in (0, 1, 2, 3)]
    EngineCopies(driver, table).gather(ArenaRecords(ids, arena, offsets), stream=stream.handle)
    assert stand_in.copies == 2
    stream.close()


def test_records_over_the_edge_of_a_piece_arrive(stand_in: StandIn) -> None:
    """Blocks and slots that are neighbours join to one copy, which a registered edge cuts."""
    driver = stand_in.driver()
    shape = Shape(layers=2, blocks=9, tokens=16, heads=2, dim=32)
    pages = make_pages(FORMS["packed_blnhc"], shape, torch.float16)
    table, stream = table_of(pages), Stream(driver)
    size = table.record_bytes
    assert size == 8192
    raw = torch.zeros(9 * size + 4096, dtype=torch.uint8)
    arena = raw[-raw.data_ptr() % 4096 :][: 9 * size]
    registration = Registration(driver, arena.data_ptr(), arena.numel(), piece_bytes=3 * 4096)
    copies = EngineCopies(driver, table)
    offsets = [slot * size for slot in range(6)]
    copies.gather(ArenaRecords(range(6), arena, offsets, registration), stream=stream.handle)
    stream.synchronize()
    for block in range(6):
        assert torch.equal(arena[block * size :][:size], pages.record(block))
    registration.close()
    stream.close()


def test_what_does_not_fit_is_refused_before_anything_moves(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    table = table_of(make_pages(FORMS["mla"], SHAPE, torch.float16))
    arena = torch.zeros(4 * table.record_bytes, dtype=torch.uint8)
    copies = EngineCopies(driver, table)
    with pytest.raises(MisuseError, match="outside the registered"):
        copies.gather(ArenaRecords([0, 9], arena, [0, table.record_bytes]), stream=0x1001)
    with pytest.raises(MisuseError, match="twice"):
        copies.scatter(ArenaRecords([1, 1], arena, [0, table.record_bytes]), stream=0x1001)
    with pytest.raises(MisuseError, match="stream of their own"):
        copies.gather(ArenaRecords([0], arena, [0]), stream=0)
    assert stand_in.copies == 0
