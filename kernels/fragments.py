"""The fragments of a layout as addresses: what copy engines and kernels work on.

A layout says where a block lies relative to its tensors. Here the same stands as four integers per
fragment - address of block 0, distance of the next block, length, place in the record - and as
lists of single copies for chosen blocks. Whoever copies needs nothing else, whatever the engine's
layout is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ebbtide.kernels.layout import PagedLayout

    Int64s = NDArray[np.int64]

ALIGNMENT_MAX = 16
"""The widest access of a GPU thread; more alignment than that is worth nothing."""


class Copies(NamedTuple):
    """Single copies, int64 [copies] each: addresses in the blocks, in the records, and lengths."""

    blocks: Int64s
    records: Int64s
    lengths: Int64s

    @property
    def total_bytes(self) -> int:
        """What all of them move."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class FragmentTable:
    """Four int64 [fragments] arrays, all in bytes; fragments in record order.

    Block `b` has fragment `f` at address `base[f] + b * block_stride[f]`; in a record it begins at
    `record_offset[f]`. `alignment` (1 to 16) divides all of them and `record_bytes`.

    Addresses hold as long as the tensors' storages stay where they are: `check_current`.
    """

    layout: PagedLayout
    starts: list[int]  # of the tensors' storages
    base: Int64s
    block_stride: Int64s
    length: Int64s
    record_offset: Int64s
    alignment: int

    @classmethod
    def of(cls, layout: PagedLayout) -> FragmentTable:
        """The table of `layout`. Raises MisuseError for tensors without an address."""
        starts = _starts(layout)
        tensors, bases, stride, length, offset = map(np.ascontiguousarray, layout.columns)
        base = np.array(starts, dtype=np.int64)[tensors] + bases
        common = math.gcd(
            ALIGNMENT_MAX,
            layout.record_bytes,
            *(int(np.gcd.reduce(column)) for column in (base, stride, length, offset)),
        )
        return cls(layout, starts, base, stride, length, offset, common)

    def __len__(self) -> int:
        return len(self.base)

    @property
    def record_bytes(self) -> int:
        """Length of a record."""
        return self.layout.record_bytes

    def check_current(self) -> None:
        """Raise MisuseError when a storage has moved since the table was made. O(tensors)."""
        starts = _starts(self.layout)
        if starts != self.starts:
            moved = [a != b for a, b in zip(starts, self.starts, strict=True)]
            raise MisuseError(
                "A registered tensor has moved",
                next_step="Register the tensors again after they are allocated anew",
                tensor=moved.index(True),
            )

    def copies(self, block_ids: Sequence[int] | Int64s, records: Int64s) -> Copies:
        """One copy per block and fragment, block by block; neighbours on both sides are joined.

        `records`: int64 [blocks], where each block's record begins. Ids and addresses must have
        been checked. Cost: O(blocks * fragments) in numpy.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        blocks = self.base[None, :] + ids[:, None] * self.block_stride[None, :]
        places = records[:, None] + self.record_offset[None, :]
        lengths = np.broadcast_to(self.length, blocks.shape)
        return joined(Copies(blocks.ravel(), places.ravel(), lengths.ravel()))


def joined(copies: Copies) -> Copies:
    """Copies that continue their predecessor on both sides made one with it. O(copies)."""
    blocks, records, lengths = copies
    if len(blocks) < 2:
        return Copies(*(np.ascontiguousarray(column) for column in copies))
    continues = (blocks[:-1] + lengths[:-1] == blocks[1:]) & (
        records[:-1] + lengths[:-1] == records[1:]
    )
    if not continues.any():
        return Copies(*(np.ascontiguousarray(column) for column in copies))
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    return Copies(blocks[first], records[first], np.add.reduceat(lengths, first))


def _starts(layout: PagedLayout) -> list[int]:
    starts = [tensor.untyped_storage().data_ptr() for tensor in layout.tensors]
    if 0 in starts:
        raise MisuseError("A registered tensor has no memory", tensor=starts.index(0))
    return starts
