"""The table of fragments: every form of paged memory, as addresses that lead to the right bytes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from ebbtide.bench.paged_forms import FORMS, Pages, Shape, make_pages
from ebbtide.errors import MisuseError
from ebbtide.kernels.fragments import Copies, FragmentTable, joined
from ebbtide.kernels.layout import PagedLayout

SHAPE = Shape(layers=3, blocks=7, tokens=4, heads=3, dim=8)
BLOCKS = (5, 0, 6)


def table_of(name: str, dtype: torch.dtype = torch.float16) -> tuple[Pages, FragmentTable]:
    pages = make_pages(FORMS[name], SHAPE, dtype)
    layout = PagedLayout.from_tensors(pages.tensors, block_dim=pages.form.block_dim)
    return pages, FragmentTable.of(layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", FORMS)
def test_the_bytes_at_its_addresses_are_the_record(name: str, dtype: torch.dtype) -> None:
    pages, table = table_of(name, dtype)
    records = np.zeros((len(BLOCKS), table.record_bytes), dtype=np.uint8)
    starts = records.ctypes.data + np.arange(len(BLOCKS)) * table.record_bytes
    copies = table.copies(BLOCKS, starts)
    assert copies.total_bytes == records.nbytes
    for source, target, length in zip(*(column.tolist() for column in copies), strict=True):
        ctypes.memmove(target, source, length)
    for block, record in zip(BLOCKS, records, strict=True):
        assert torch.equal(torch.from_numpy(record), pages.record(block))


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("kv_first_nhd", 2 * 3),
        ("blocks_first_hnd", 3),
        ("packed_lbnhc", 3),
        ("packed_lhbnc", 3 * 3),  # a run per head
        ("packed_blnhc", 1),  # all layers of a block side by side
        ("packed_blhnc", 1),
        ("packed_bhlnc", 3 * 3),  # side by side, but not in record order
        ("mla", 3),
        ("padded", 3),
        ("hybrid", 3),
    ],
)
def test_a_form_has_as_few_fragments_as_its_runs(name: str, fragments: int) -> None:
    _, table = table_of(name)
    assert len(table) == fragments
    assert len(table.copies([4], np.array([0]))[0]) == fragments


def test_neighbouring_blocks_become_one_copy() -> None:
    _, table = table_of("packed_blnhc")
    size = table.record_bytes
    starts = np.arange(4) * size
    assert table.copies([2, 3, 4, 6], starts).lengths.tolist() == [3 * size, size]
    with_gap = starts + np.array([0, 0, 8, 8])  # the slots are no neighbours
    assert table.copies([2, 3, 4, 6], with_gap).lengths.tolist() == [2 * size, size, size]
    assert table.copies([3, 2], starts[:2]).lengths.tolist() == [size, size]


def test_copies_join_only_where_both_sides_go_on() -> None:
    columns = [np.array(column) for column in ([0, 4, 8, 20], [100, 104, 200, 212], [4, 4, 8, 4])]
    assert [column.tolist() for column in joined(Copies(*columns))] == [
        [0, 8, 20],
        [100, 200, 212],
        [8, 8, 4],
    ]


@pytest.mark.parametrize(
    ("dim", "dtype", "alignment"),
    [(8, torch.float32, 16), (5, torch.float32, 4), (3, torch.float16, 2), (3, torch.int8, 1)],
)
def test_alignment_is_what_all_numbers_share(dim: int, dtype: torch.dtype, alignment: int) -> None:
    tensor = torch.zeros(2, 5, 1, 1, dim, dtype=dtype)
    assert FragmentTable.of(PagedLayout.from_tensors([tensor])).alignment == alignment
    later = torch.zeros(5 * 32 + 8, dtype=torch.uint8)[8:].view(5, 32)
    assert FragmentTable.of(PagedLayout.from_tensors([later], block_dim=0)).alignment == 8


def test_addresses_past_32_bits_stay_whole() -> None:
    """5 GB of address space, of which nothing is touched."""
    tensor = torch.empty(5, 1 << 30, dtype=torch.uint8)
    table = FragmentTable.of(PagedLayout.from_tensors([tensor], block_dim=0))
    blocks = table.copies([4, 0], np.array([0, 1 << 40])).blocks
    assert (blocks - tensor.data_ptr()).tolist() == [4 << 30, 0]


def test_a_tensor_that_moved_is_noticed() -> None:
    pages, table = table_of("mla")
    table.check_current()
    kept = pages.tensors[1].untyped_storage()
    kept.resize_(64 * kept.nbytes())
    with pytest.raises(MisuseError, match="has moved"):
        table.check_current()
