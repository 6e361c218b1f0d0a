"""What a layout refuses: tensors whose blocks cannot be described by whole runs of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.kernels.layout import Fragment


def check_plain(index: int, tensor: torch.Tensor) -> None:
    """Raise MisuseError unless `tensor` has bytes at an address: strided, on a real device."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise MisuseError(
            "A paged tensor must be strided and on a real device",
            tensor=index,
            layout=tensor.layout,
            device=tensor.device,
        )


def check_no_overlap(index: int, tensor: torch.Tensor) -> None:
    """Raise MisuseError when elements of one view share memory.

    Dimensions must nest: a view whose dimensions interleave without sharing is refused as well.
    """
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            raise MisuseError(
                "Elements of the view share memory",
                tensor=index,
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
            )
        reach += (size - 1) * stride


def check_bounds(
    fragments: Sequence[Fragment], tensors: Sequence[torch.Tensor], num_blocks: int
) -> None:
    """Raise MisuseError when the last block reaches past its storage."""
    for fragment in fragments:
        size = tensors[fragment.tensor].untyped_storage().nbytes()
        end = fragment.base + (num_blocks - 1) * fragment.block_stride + fragment.length
        if end > size:
            raise MisuseError(
                "The last block reaches past the end of its storage",
                next_step="Register a view whose blocks all lie inside the allocation",
                tensor=fragment.tensor,
                end=end,
                storage_bytes=size,
            )


def check_apart(
    fragments: Sequence[Fragment], tensors: Sequence[torch.Tensor], num_blocks: int
) -> None:
    """Raise MisuseError when two fragments share a byte in any two blocks.

    A record would hold such bytes twice, and a scatter would write them twice. Cost: fragments
    squared over 2 per storage in numpy; pairs of unlike block strides that interleave cost
    O(blocks log blocks) each.
    """
    storages: dict[int, list[Fragment]] = {}
    for fragment in fragments:
        place = tensors[fragment.tensor].untyped_storage().data_ptr()
        storages.setdefault(place, []).append(fragment)
    for alike in storages.values():
        shared = _shared_pair(alike, num_blocks)
        if shared is not None:
            raise MisuseError(
                "Two tensors of one layout share memory",
                next_step="Register every cache once",
                tensors=(shared[0].tensor, shared[1].tensor),
                offsets=(shared[0].base, shared[1].base),
            )


def _shared_pair(
    fragments: Sequence[Fragment], num_blocks: int
) -> tuple[Fragment, Fragment] | None:
    rows = np.array([(f.base, f.block_stride, f.length) for f in fragments], dtype=np.int64)
    base, stride, length = rows.T
    end = base + (num_blocks - 1) * stride + length
    for number in range(len(fragments) - 1):
        rest = slice(number + 1, None)
        meets = (base[rest] < end[number]) & (base[number] < end[rest])
        same = stride[rest] == stride[number]
        # Equal strides: some multiple of the stride brings one onto the other, or none does.
        step = max(1, int(stride[number]))
        ahead = (base[rest] - base[number]) % step
        collides = (ahead < length[number]) | (step - ahead < length[rest])
        if num_blocks == 1:
            collides[:] = True  # they meet, and there is no second block to step over
        for other in np.flatnonzero(meets & (collides | ~same)) + number + 1:
            pair = fragments[number], fragments[int(other)]
            if stride[other] == stride[number] or _interleave(*pair, num_blocks):
                return pair
    return None


def _interleave(one: Fragment, other: Fragment, num_blocks: int) -> bool:
    """Whether runs at unlike strides touch: all of them sorted, each against the next."""
    blocks = np.arange(num_blocks, dtype=np.int64)
    starts = np.concatenate([f.base + blocks * f.block_stride for f in (one, other)])
    ends = starts + np.repeat([one.length, other.length], num_blocks)
    order = np.argsort(starts, kind="stable")
    return bool((ends[order][:-1] > starts[order][1:]).any())
