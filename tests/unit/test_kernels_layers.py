"""A layout layer by layer: the layers of a record are the record, and copies of each bring it."""

from __future__ import annotations

import pytest
import torch

from ebbtide.bench.paged_forms import FORMS, Shape, make_pages
from ebbtide.kernels.copy import gather_into, scatter_from
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layers import layers_of
from ebbtide.kernels.layout import PagedLayout

SHAPE = Shape(layers=3, blocks=6, tokens=4, heads=2, dim=16)
IDS, GAP = [4, 0, 3], 48


@pytest.mark.parametrize("name", FORMS)
def test_layers_one_after_the_other_bring_the_whole_record(name: str) -> None:
    """After each, its layer alone is there, and no other byte of any block has changed."""
    form = FORMS[name]
    source, target = (make_pages(form, SHAPE, torch.float16, seed=seed) for seed in (1, 2))
    whole, to = (
        PagedLayout.from_tensors(one.tensors, block_dim=form.block_dim) for one in (source, target)
    )
    stride = whole.record_bytes + GAP
    offsets = [stride * number for number in range(len(IDS))]
    arena = torch.zeros(stride * len(IDS), dtype=torch.uint8)
    gather_into(whole, IDS, arena, offsets)
    expected = [target.record(block) for block in range(SHAPE.blocks)]
    layers = layers_of(to)
    assert len(layers) == SHAPE.layers
    for layer in layers:
        scatter_from(layer.layout, IDS, arena, layer.offsets(offsets))
        part = slice(layer.record_offset, layer.record_offset + layer.layout.record_bytes)
        for block in IDS:
            expected[block][part] = source.record(block)[part]
        for block in range(SHAPE.blocks):
            assert torch.equal(target.record(block), expected[block]), (layer.record_offset, block)
    assert all(torch.equal(target.record(block), source.record(block)) for block in IDS)


@pytest.mark.parametrize("name", FORMS)
def test_addresses_of_layers_are_those_of_the_whole(name: str) -> None:
    """The segments of all layers, for copies by address: the same bytes, none twice."""
    form = FORMS[name]
    pages = make_pages(form, SHAPE, torch.float16)
    whole = PagedLayout.from_tensors(pages.tensors, block_dim=form.block_dim)

    def byte_pairs(layout: PagedLayout, start: int) -> dict[int, int]:
        table = FragmentTable.of(layout)
        rows = zip(table.base, table.length, table.record_offset, strict=True)
        return {
            int(offset) + start + byte: int(base) + byte
            for base, length, offset in rows
            for byte in range(int(length))
        }

    found: dict[int, int] = {}
    for layer in layers_of(whole):
        pairs = byte_pairs(layer.layout, layer.record_offset)
        assert not found.keys() & pairs.keys()
        found |= pairs
    assert found == byte_pairs(whole, 0)
