"""What a layout says of tensors, and which tensors it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from ebbtide.errors import MisuseError
from ebbtide.kernels.layout import Fragment, PagedLayout


def test_keys_and_values_of_each_layer_are_fragments_in_record_order() -> None:
    layers = [torch.zeros(2, 7, 4, 3, 8) for _ in range(2)]
    layout = PagedLayout.from_tensors(layers)
    run = 4 * 3 * 8 * 4
    assert layout.fragments == (
        Fragment(0, 0, run, run, 0),
        Fragment(0, 7 * run, run, run, run),
        Fragment(1, 0, run, run, 2 * run),
        Fragment(1, 7 * run, run, run, 3 * run),
    )
    assert (layout.num_blocks, layout.record_bytes) == (7, 4 * run)


def test_blocks_outermost_have_one_fragment_a_layer() -> None:
    layout = PagedLayout.from_tensors([torch.zeros(7, 2, 4, 3, 8, dtype=torch.bfloat16)])
    assert layout.fragments == (Fragment(0, 0, 2 * 192, 2 * 192, 0),)
    assert layout.num_blocks == 7


def test_layers_of_one_allocation_become_one_row() -> None:
    layers = list(torch.zeros(5, 2, 7, 4, 3, 8))
    layout = PagedLayout.from_tensors(layers)
    assert len(layout.fragments) == 10
    (row,) = layout.rows
    assert (row.count, row.length, row.spacing) == (10, 384, 7 * 384)


def test_layers_side_by_side_in_each_block_become_one_fragment() -> None:
    pages = torch.zeros(7, 5, 2, 4, 3, 8)  # all layers of a block are neighbours
    layout = PagedLayout.from_tensors([pages[:, layer] for layer in range(5)], block_dim=0)
    assert layout.fragments == (Fragment(0, 0, 5 * 768, 5 * 768, 0),)


def test_head_order_in_memory_is_kept_and_described() -> None:
    by_head = torch.zeros(2, 7, 3, 4, 8).permute(0, 1, 3, 2, 4)  # [2, blocks, tokens, heads, dim]
    by_token = torch.zeros(2, 7, 4, 3, 8)
    assert len(PagedLayout.from_tensors([by_head]).fragments) == 2
    described = [PagedLayout.from_tensors([one]).describe() for one in (by_head, by_token)]
    assert described[0] != described[1]


def test_description_is_json_and_blind_to_what_a_record_does_not_show() -> None:
    description = PagedLayout.from_tensors([torch.zeros(2, 7, 4, 3, 8)]).describe()
    assert json.loads(json.dumps(description)) == description
    larger_pool = PagedLayout.from_tensors([torch.zeros(2, 9, 4, 3, 8)])
    blocks_first = PagedLayout.from_tensors([torch.zeros(7, 2, 4, 3, 8)])
    padded = PagedLayout.from_tensors([torch.zeros(2, 7, 5, 3, 8)[:, :, :4]])
    for same in (larger_pool, blocks_first, padded):
        assert same.describe() == description
    for other in (
        torch.zeros(2, 7, 4, 3, 8, dtype=torch.int32),
        torch.zeros(2, 7, 3, 4, 8),
        torch.zeros(2, 7, 4, 3, 16),
    ):
        assert PagedLayout.from_tensors([other]).describe() != description


def test_tensors_must_agree() -> None:
    one = torch.zeros(2, 7, 4, 3, 8)
    for others in (
        [],
        [one, one.to(torch.bfloat16)],
        [one, torch.zeros(2, 8, 4, 3, 8)],
        [one, one.to("meta")],
    ):
        with pytest.raises(MisuseError):
            PagedLayout.from_tensors(others)


def test_ambiguous_block_dimension_must_be_named() -> None:
    twins = torch.zeros(2, 2, 4, 3, 8)
    with pytest.raises(MisuseError, match="block_dim"):
        PagedLayout.from_tensors([twins])
    with pytest.raises(MisuseError, match="block_dim"):
        PagedLayout.from_tensors([torch.zeros(7, 4, 96)])
    assert len(PagedLayout.from_tensors([twins], block_dim=1).fragments) == 2
    assert len(PagedLayout.from_tensors([twins], block_dim=0).fragments) == 1
    for wrong in (5, -1):
        with pytest.raises(MisuseError, match="no such block dimension"):
            PagedLayout.from_tensors([twins], block_dim=wrong)


def test_scattered_elements_are_refused() -> None:
    with pytest.raises(MisuseError, match="not neighbours"):
        PagedLayout.from_tensors([torch.zeros(2, 7, 4, 3, 16)[..., ::2]])


def test_shared_elements_are_refused() -> None:
    overlapping = torch.zeros(1000).as_strided((5, 2, 4, 3, 8), (96, 96, 24, 8, 1))
    for view in (overlapping, torch.zeros(2, 1, 4, 3, 8).expand(2, 7, 4, 3, 8)):
        with pytest.raises(MisuseError, match="share memory"):
            PagedLayout.from_tensors([view])


def test_a_view_past_its_storage_is_refused() -> None:
    tensor = torch.zeros(2, 7, 4, 3, 8)
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() - 4)
    with pytest.raises(MisuseError, match="past the end"):
        PagedLayout.from_tensors([tensor])


def test_block_ids_are_checked() -> None:
    layout = PagedLayout.from_tensors([torch.zeros(2, 7, 4, 3, 8)])
    layout.check_block_ids([])
    layout.check_block_ids([0, 6])
    for wrong in ([7], [-1], [1, 2, 70]):
        with pytest.raises(MisuseError, match="outside"):
            layout.check_block_ids(wrong)


def test_tensors_that_share_bytes_are_refused() -> None:
    pages = torch.zeros(7, 160, dtype=torch.uint8)
    for one, other in (
        (pages[:, :96], pages[:, :96]),  # the same layer twice
        (pages[:, :96], pages[:, 95:]),  # one byte
        (pages[:, 64:], pages.view(-1).as_strided((6, 80), (160, 1), 150)),  # of the block before
        (pages[:, 64:], pages.view(-1).as_strided((7, 80), (160, 1), 20)),  # begins before it
        (pages[:, :96], pages.view(-1).as_strided((7, 16), (32, 1), 900)),  # unlike strides
    ):
        num_blocks = min(len(one), len(other))
        with pytest.raises(MisuseError, match="share memory"):
            PagedLayout.from_tensors([one[:num_blocks], other[:num_blocks]], block_dim=0)


def test_tensors_that_interleave_without_a_shared_byte_are_described() -> None:
    pages = torch.zeros(7, 160, dtype=torch.uint8)
    other_stride = pages.view(-1).as_strided((3, 8), (320, 1), 112)
    for one, other in (
        (pages[:, :96], pages[:, 96:]),
        (pages[:3, :96], other_stride),
        (pages[:1], pages[1:2]),
    ):
        layout = PagedLayout.from_tensors([one, other], block_dim=0)
        assert layout.record_bytes == one.shape[1] + other.shape[1]


def test_a_tensor_without_plain_memory_is_refused() -> None:
    sparse = torch.zeros(7, 32).to_sparse()
    for tensor in (sparse, torch.zeros(7, 32, device="meta")):
        with pytest.raises(MisuseError, match="must be strided"):
            PagedLayout.from_tensors([tensor], block_dim=0)
