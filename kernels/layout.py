"""Where the bytes of one KV block lie in an engine's paged device tensors.

A *record* is the flat form of one block: its bytes in all layers, keys and values, side by side in
the engine's own element order. `PagedLayout` translates between the two: it turns registered
tensors into *fragments*, each a run of bytes that every block has at the same distance from its
neighbour's. Copies need nothing else, so they are blind to dtype, head order and padding.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ebbtide.errors import MisuseError
from ebbtide.kernels.layout_checks import (
    check_apart,
    check_bounds,
    check_no_overlap,
    check_plain,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_RUNS_PER_BLOCK = 64
"""Most separate runs one tensor may have in one block; more are refused, copies would crawl."""

_KV = 2


class Fragment(NamedTuple):
    """One contiguous run of every block: block `b` has it at `base + b * block_stride`.

    All numbers are bytes; `base` counts from the start of the storage of tensor number `tensor`.
    The run lies at `record_offset` in the record.
    """

    tensor: int
    base: int
    block_stride: int
    length: int
    record_offset: int


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """`count` fragments of one storage at equal distances, in the storage and in the record.

    Fragment `f` of block `b` starts at `base + b * block_stride + f * spacing` in the storage and
    at `record_offset + f * length` in the record. One strided copy serves the whole row.
    `alignment` divides where its fragments begin, their length, and the storage's.
    """

    tensor: int
    base: int
    block_stride: int
    spacing: int
    count: int
    length: int
    record_offset: int
    alignment: int


@dataclass(frozen=True)
class PagedLayout:
    """The fragments of a set of paged tensors. Build it with `from_tensors`.

    `tensors` are kept alive. `num_blocks` is how many blocks every tensor has, `record_bytes` the
    length of a record. Cost: fragments are a few per tensor, however many blocks there are.
    """

    tensors: tuple[torch.Tensor, ...]
    fragments: tuple[Fragment, ...]
    num_blocks: int
    record_bytes: int
    block_forms: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    block_dim: int | None  # as it was given

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[torch.Tensor], *, block_dim: int | None = None
    ) -> PagedLayout:
        """Describe `tensors`, one per layer, in record order.

        Usual shapes are [2, num_blocks, block_size, kv_heads, head_dim] and [num_blocks, 2, ...],
        any dtype; the block dimension is then found by itself. Any other shape is described too
        when `block_dim` names its block dimension, as are views with padding between blocks,
        permuted head order and several layers in one storage.

        Raises MisuseError for: no tensor, or one without memory; different dtypes, devices or block
        counts; elements that are not neighbours in memory; blocks or tensors that share memory;
        more than `MAX_RUNS_PER_BLOCK` runs; a view that reaches past its storage; a block dimension
        that cannot be told.
        """
        if not tensors:
            raise MisuseError("A layout needs at least one tensor")
        for index, tensor in enumerate(tensors):
            check_plain(index, tensor)
        first = tensors[0]
        num_blocks = int(first.shape[_block_dim(first, block_dim)])
        fragments: list[Fragment] = []
        forms: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        offset = 0
        for index, tensor in enumerate(tensors):
            dim = _block_dim(tensor, block_dim)
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise MisuseError(
                    "The tensors of one layout must agree in dtype and device",
                    tensor=index,
                    found=(tensor.dtype, tensor.device),
                    expected=(first.dtype, first.device),
                )
            if tensor.shape[dim] != num_blocks:
                raise MisuseError(
                    "The tensors of one layout must have the same number of blocks",
                    tensor=index,
                    found=tensor.shape[dim],
                    expected=num_blocks,
                )
            runs, form = _runs_of(index, tensor, dim, offset)
            offset += sum(run.length for run in runs)
            fragments.extend(runs)
            forms.append(form)
        merged = _merged(fragments, tensors)
        layout = cls(tuple(tensors), merged, num_blocks, offset, tuple(forms), block_dim)
        check_bounds(layout.fragments, tensors, num_blocks)
        check_apart(layout.fragments, tensors, num_blocks)
        return layout

    @property
    def dtype(self) -> torch.dtype:
        """The element type of every tensor."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of every tensor."""
        return self.tensors[0].device

    @cached_property
    def storages(self) -> tuple[torch.Tensor, ...]:
        """Per tensor its whole storage as a 1-D uint8 tensor that shares the memory."""
        return tuple(
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in self.tensors
        )

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The fragments as int64 [5, fragments]: the fields of `Fragment` in their order."""
        return np.array(self.fragments, dtype=np.int64).T

    @cached_property
    def rows(self) -> tuple[FragmentRow, ...]:
        """The fragments, neighbours at equal distances joined into one row each."""
        rows: list[FragmentRow] = []
        for fragment in self.fragments:
            joined = _extended(rows[-1], fragment, self.tensors) if rows else None
            if joined is None:
                rows.append(_row_of(fragment, self.storages[fragment.tensor].numel()))
            else:
                rows[-1] = joined
        return tuple(rows)

    @cached_property
    def _views(self) -> dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]]:
        return {}

    @cached_property
    def groups(self) -> tuple[tuple[FragmentRow, ...], ...]:
        """Neighbouring rows of one form: in the record they lie at equal distances."""
        same_form = itertools.groupby(self.rows, key=lambda row: (row.count, row.length))
        return tuple(tuple(rows) for _, rows in same_form)

    def blocks_of(self, number: int, element: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Per row of a group all blocks, [num_blocks, count, length]: views with elements of
        another type, whose length divides the rows' alignments. Made once.
        """
        views = self._views.get((number, element))
        if views is None:
            size = element.itemsize
            views = self._views[number, element] = tuple(
                torch.as_strided(
                    self.storages[row.tensor].view(element),
                    (self.num_blocks, row.count, row.length // size),
                    (row.block_stride // size, row.spacing // size, 1),
                    row.base // size,
                )
                for row in self.groups[number]
            )
        return views

    def describe(self) -> dict[str, object]:
        """What decides the meaning of a record's bytes, as JSON-able values.

        Equal descriptions mean interchangeable records. Pool size, padding and where K and V lie
        apart in memory are left out, because they leave no trace in a record.
        """
        return {
            "schema": 1,
            "dtype": str(self.dtype).removeprefix("torch."),
            "record_bytes": self.record_bytes,
            "tensors": [
                {"block_shape": list(shape), "order": list(order)}
                for shape, order in self.block_forms
            ],
        }

    def check_block_ids(self, block_ids: Sequence[int]) -> None:
        """Raise MisuseError for an id that is no block of this layout. O(n)."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise MisuseError(
                "A block id lies outside the registered tensors",
                lowest=min(block_ids),
                highest=max(block_ids),
                num_blocks=self.num_blocks,
            )


def _block_dim(tensor: torch.Tensor, block_dim: int | None) -> int:
    if block_dim is not None:
        if not 0 <= block_dim < tensor.dim() or tensor.shape[block_dim] < 1:
            raise MisuseError(
                "The tensor has no such block dimension",
                block_dim=block_dim,
                shape=tuple(tensor.shape),
            )
        return block_dim
    halves = [dim for dim in (0, 1) if tensor.dim() == 5 and tensor.shape[dim] == _KV]
    if len(halves) != 1 or tensor.numel() == 0:
        raise MisuseError(
            "The block dimension cannot be told from the shape",
            next_step="Pass block_dim",
            shape=tuple(tensor.shape),
        )
    return 1 - halves[0]


def _runs_of(
    index: int, tensor: torch.Tensor, block_dim: int, record_offset: int
) -> tuple[list[Fragment], tuple[tuple[int, ...], tuple[int, ...]]]:
    """The fragments of one tensor, and (shape of a block, its dimensions in memory order)."""
    shape = tuple(int(n) for dim, n in enumerate(tensor.shape) if dim != block_dim)
    strides = tuple(int(n) for dim, n in enumerate(tensor.stride()) if dim != block_dim)
    check_no_overlap(index, tensor)
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    run = 1
    inner = len(order)
    while inner and strides[order[inner - 1]] == run:
        inner -= 1
        run *= shape[order[inner]]
    outer = order[:inner]
    count = 1
    for dim in outer:
        count *= shape[dim]
    if count > MAX_RUNS_PER_BLOCK:
        raise MisuseError(
            "The elements of a block are not neighbours in memory",
            next_step="Register the tensors the engine allocated, not a slice of their elements",
            tensor=index,
            runs=count,
            allowed=MAX_RUNS_PER_BLOCK,
        )
    item = tensor.element_size()
    runs: list[Fragment] = []
    for position in itertools.product(*(range(shape[dim]) for dim in outer)):
        start = sum(step * strides[dim] for step, dim in zip(position, outer, strict=True))
        runs.append(
            Fragment(
                index,
                (int(tensor.storage_offset()) + start) * item,
                int(tensor.stride(block_dim)) * item,
                run * item,
                record_offset + len(runs) * run * item,
            )
        )
    return runs, (shape, tuple(order))


def _same_storage(tensors: Sequence[torch.Tensor], one: int, other: int) -> bool:
    if one == other:
        return True
    return tensors[one].untyped_storage().data_ptr() == tensors[other].untyped_storage().data_ptr()


def _merged(fragments: Sequence[Fragment], tensors: Sequence[torch.Tensor]) -> tuple[Fragment, ...]:
    """Join fragments that follow each other without a gap, in memory and in the record."""
    merged: list[Fragment] = []
    for fragment in fragments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and _same_storage(tensors, last.tensor, fragment.tensor)
            and last.block_stride == fragment.block_stride
            and last.base + last.length == fragment.base
            and last.length + fragment.length <= last.block_stride
        ):
            merged[-1] = Fragment(
                last.tensor,
                last.base,
                last.block_stride,
                last.length + fragment.length,
                last.record_offset,
            )
        else:
            merged.append(fragment)
    return tuple(merged)


def _row_of(fragment: Fragment, storage_bytes: int) -> FragmentRow:
    alignment = math.gcd(fragment.base, fragment.block_stride, fragment.length, storage_bytes)
    return FragmentRow(
        fragment.tensor,
        fragment.base,
        fragment.block_stride,
        0,
        1,
        fragment.length,
        fragment.record_offset,
        alignment,
    )


def _extended(
    row: FragmentRow, fragment: Fragment, tensors: Sequence[torch.Tensor]
) -> FragmentRow | None:
    """`row` with `fragment` at its end, or None when it does not continue the row."""
    distance = fragment.base - row.base
    spacing = row.spacing if row.count > 1 else distance
    if (
        not _same_storage(tensors, row.tensor, fragment.tensor)
        or row.block_stride != fragment.block_stride
        or row.length != fragment.length
        or spacing <= 0
        or distance != row.count * spacing
    ):
        return None
    return FragmentRow(
        row.tensor,
        row.base,
        row.block_stride,
        spacing,
        row.count + 1,
        row.length,
        row.record_offset,
        math.gcd(row.alignment, spacing),
    )
