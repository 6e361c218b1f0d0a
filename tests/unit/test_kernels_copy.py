"""Copies between blocks and records are exact to the bit and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.bench.paged_forms import FORMS, Shape, make_pages
from ebbtide.errors import MisuseError
from ebbtide.kernels.copy import gather, gather_into, scatter, scatter_from
from ebbtide.kernels.layout import PagedLayout

pytestmark = pytest.mark.usefixtures("all_copies")

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
GUARD = 0xA5


def random_bytes(count: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw)


def pages(
    form: str, dtype: torch.dtype, blocks: int, size: int, heads: int, dim: int, seed: int
) -> list[torch.Tensor]:
    """Two layers of KV of arbitrary bits (NaN among them), in one of several memory forms."""
    count = 2 * 2 * blocks * size * heads * dim
    bits = random_bytes(count * dtype.itemsize, seed).view(dtype)
    if form == "one allocation":
        return list(bits.view(2, 2, blocks, size, heads, dim))
    if form == "blocks first":
        return [half.view(blocks, 2, size, heads, dim).clone() for half in bits.chunk(2)]
    if form == "heads first":
        halves = [half.view(2, blocks, heads, size, dim).clone() for half in bits.chunk(2)]
        return [half.permute(0, 1, 3, 2, 4) for half in halves]
    return [half.view(2, blocks, size, heads, dim).clone() for half in bits.chunk(2)]


def expected_record(tensors: list[torch.Tensor], form: str, block: int) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        part = tensor[block] if form == "blocks first" else tensor[:, block]
        if form == "heads first":
            part = part.permute(0, 2, 1, 3)
        parts.append(part.contiguous().view(-1).view(torch.uint8))
    return torch.cat(parts)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(["one allocation", "blocks first", "heads first", "layers apart"]),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(3, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_round_trip_is_exact(
    form: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    seed: int,
    data: st.DataObject,
) -> None:
    blocks, size, heads, dim = shape
    tensors = pages(form, dtype, blocks, size, heads, dim, seed)
    layout = PagedLayout.from_tensors(tensors, block_dim=0 if form == "blocks first" else 1)
    ids = data.draw(st.lists(st.integers(0, blocks - 1), unique=True))
    slots = data.draw(st.permutations(range(blocks + 1)))[: len(ids)]
    gap = data.draw(st.integers(0, 3))
    stride = layout.record_bytes + gap
    arena = torch.full(((blocks + 1) * stride,), GUARD, dtype=torch.uint8)
    records = [arena[slot * stride :][: layout.record_bytes] for slot in slots]

    gather(layout, ids, records)
    for block, record in zip(ids, records, strict=True):
        assert torch.equal(record, expected_record(tensors, form, block))
    for slot in range(blocks + 1):
        used = layout.record_bytes if slot in slots else 0
        assert (arena[slot * stride + used : (slot + 1) * stride] == GUARD).all()

    target = pages(form, dtype, blocks, size, heads, dim, seed + 1)
    untouched = [expected_record(target, form, block) for block in range(blocks)]
    scatter(
        PagedLayout.from_tensors(target, block_dim=0 if form == "blocks first" else 1),
        ids,
        records,
    )
    for block in range(blocks):
        source = records[ids.index(block)] if block in ids else untouched[block]
        assert torch.equal(expected_record(target, form, block), source)


def test_nan_payloads_survive() -> None:
    for dtype, bits in ((torch.float32, 0x7FA0BEEF), (torch.bfloat16, 0x7FA1)):
        whole = torch.int32 if dtype == torch.float32 else torch.int16
        tensor = torch.full((2, 3, 4, 1, 8), bits, dtype=whole).view(dtype)
        layout = PagedLayout.from_tensors([tensor])
        record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
        gather(layout, [1], [record])
        assert (record.view(whole) == bits).all()
        tensor.zero_()
        scatter(layout, [2], [record])
        assert (tensor[:, 2].contiguous().view(whole) == bits).all()
        assert not tensor[:, :2].any()


def test_p20_padded_pages_never_walk_off_the_buffer() -> None:
    """P20: pages of 576 bytes every 640, the last one at the very end, guard bytes all around."""
    blocks, page, stride, offset = 6, 576, 640, 128
    buffer = random_bytes(offset + (blocks - 1) * stride + page, seed=1)
    before = buffer.clone()
    view = buffer.as_strided((blocks, page), (stride, 1), offset)
    layout = PagedLayout.from_tensors([view], block_dim=0)
    assert layout.record_bytes == page  # padding is no payload

    arena = torch.full((blocks * page + 64,), GUARD, dtype=torch.uint8)
    records = [arena[32 + i * page : 32 + (i + 1) * page] for i in range(blocks)]
    gather(layout, list(range(blocks)), records)
    assert torch.equal(torch.stack(records), view)
    assert (arena[:32] == GUARD).all()
    assert (arena[-32:] == GUARD).all()

    view.zero_()
    scatter(layout, list(range(blocks)), records)
    assert torch.equal(buffer, before)  # payload back, guards and padding as they were

    with pytest.raises(RuntimeError, match="out of bounds"):
        buffer.as_strided((blocks + 1, page), (stride, 1), offset)
    buffer.untyped_storage().resize_(len(before) - 1)
    with pytest.raises(MisuseError, match="past the end"):
        PagedLayout.from_tensors([view], block_dim=0)


def test_arguments_that_do_not_fit_are_refused_before_a_byte_moves() -> None:
    layout = PagedLayout.from_tensors([torch.ones(2, 7, 4, 3, 8)])
    length = layout.record_bytes
    good = torch.zeros(length, dtype=torch.uint8)
    for wrong in (
        torch.zeros(length - 1, dtype=torch.uint8),
        torch.zeros(length, dtype=torch.int8),
        torch.zeros(2 * length, dtype=torch.uint8)[::2],
        torch.zeros((1, length), dtype=torch.uint8),
    ):
        for copy in (gather, scatter):
            with pytest.raises(MisuseError, match="1-D uint8"):
                copy(layout, [1, 2], [good, wrong])
    for copy in (gather, scatter):
        with pytest.raises(MisuseError, match="pair up"):
            copy(layout, [1, 2], [good])
        with pytest.raises(MisuseError, match="outside"):
            copy(layout, [7], [good])
    with pytest.raises(MisuseError, match="twice"):
        scatter(layout, [1, 1], [good, good.clone()])
    assert not good.any()


def test_a_block_may_be_read_into_many_records() -> None:
    tensor = torch.randn(2, 5, 4, 3, 8)
    layout = PagedLayout.from_tensors([tensor])
    arena = torch.zeros(3 * layout.record_bytes, dtype=torch.uint8)
    records = list(arena.view(3, -1))
    gather(layout, [2, 2, 2], records)
    for record in records:
        assert torch.equal(record, expected_record([tensor], "layers apart", 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("slots", [(3, 4, 5, 6, 7), (8, 1, 6, 0, 2), (1, 3, 5, 7, 9)])
def test_records_by_offset_in_every_form(
    name: str, dtype: torch.dtype, slots: tuple[int, ...]
) -> None:
    """Neighbouring, scattered and evenly spaced slots, blocks in no order; other bytes stay."""
    shape = Shape(layers=2, blocks=9, tokens=4, heads=3, dim=5)
    form = FORMS[name]
    pages, target = (make_pages(form, shape, dtype, seed=seed) for seed in (1, 2))
    layout = PagedLayout.from_tensors(pages.tensors, block_dim=form.block_dim)
    ids, stride = [7, 2, 8, 0, 3], layout.record_bytes + 12
    arena = torch.full((10 * stride + 16,), GUARD, dtype=torch.uint8)[8:]
    offsets = [slot * stride for slot in slots]
    gather_into(layout, ids, arena, offsets)
    left = arena.clone()
    for block, offset in zip(ids, offsets, strict=True):
        assert torch.equal(arena[offset:][: layout.record_bytes], pages.record(block))
        left[offset:][: layout.record_bytes] = GUARD
    assert (left == GUARD).all()

    expected = [target.record(block) for block in range(shape.blocks)]
    for block, offset in zip(ids, offsets, strict=True):
        expected[block] = arena[offset:][: layout.record_bytes].clone()
    padding = [_padding(buffer) for buffer in target.buffers]
    scatter_from(
        PagedLayout.from_tensors(target.tensors, block_dim=form.block_dim), ids, arena, offsets
    )
    for block, record in enumerate(expected):
        assert torch.equal(target.record(block), record)
    for buffer, before in zip(target.buffers, padding, strict=True):
        assert torch.equal(_padding(buffer), before)


def _padding(buffer: torch.Tensor) -> torch.Tensor:
    """The bytes of an allocation that belong to no block."""
    whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()).clone()
    mine = torch.zeros_like(whole).view(buffer.dtype).as_strided(buffer.shape, buffer.stride())
    mine.view(torch.uint8).fill_(1)
    used = torch.empty(0, dtype=torch.uint8).set_(mine.untyped_storage())
    return whole[used == 0]


def test_offsets_that_do_not_fit_are_refused_before_a_byte_moves() -> None:
    layout = PagedLayout.from_tensors([torch.ones(2, 7, 4, 3, 8)])
    size = layout.record_bytes
    arena = torch.zeros(4 * size, dtype=torch.uint8)
    for copy in (gather_into, scatter_from):
        for ids, offsets, message in (
            ([1], [0, size], "pair up"),
            ([1, 7], [0, size], "outside the registered"),
            ([1, 2], [0, 3 * size + 1], "outside the arena"),
            ([1, 2], [-1, size], "outside the arena"),
        ):
            with pytest.raises(MisuseError, match=message):
                copy(layout, ids, arena, offsets)
        for wrong in (arena.to(torch.int8), arena.view(4, -1), arena[::2]):
            with pytest.raises(MisuseError, match="1-D uint8"):
                copy(layout, [1], wrong, [0])
        copy(layout, [], arena, [])
    with pytest.raises(MisuseError, match="share bytes"):
        gather_into(layout, [1, 2], arena, [0, size - 1])
    with pytest.raises(MisuseError, match="twice"):
        scatter_from(layout, [1, 1], arena, [0, size])
    assert not arena.any()


def test_layers_whose_blocks_differ_in_length() -> None:
    """The second begins in the record where the first, which is not aligned as it is, ends."""
    layers = [random_bytes(7 * size, seed=size).view(7, size) for size in (24, 32, 6, 16)]
    layout = PagedLayout.from_tensors(layers, block_dim=0)
    arena = torch.full((80 * 5,), GUARD, dtype=torch.uint8)
    ids, offsets = [6, 1, 4], [160, 80, 0]
    gather_into(layout, ids, arena, offsets)
    for block, offset in zip(ids, offsets, strict=True):
        expected = torch.cat([layer[block] for layer in layers])
        assert torch.equal(arena[offset : offset + 78], expected)
    assert int((arena == GUARD).sum()) >= 80 * 5 - 3 * 78
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    scatter_from(layout, ids, arena, offsets)
    for layer, right in zip(layers, before, strict=True):
        assert torch.equal(layer[ids], right[ids])
        assert not layer[[0, 2, 3, 5]].any()
