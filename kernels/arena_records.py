"""Records by their offsets in an arena, as copies are given them, and the checks before."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.kernels.registration import Registration


class ArenaRecords(NamedTuple):
    """Blocks and records, pairwise: the record of `block_ids[i]` begins at `offsets[i]` in `arena`.

    `arena`: a contiguous 1-D uint8 host tensor. `registration`: of that memory, where copies have
    to keep within its pieces.
    """

    block_ids: Sequence[int]
    arena: torch.Tensor
    offsets: Sequence[int]
    registration: Registration | None = None

    def check(self, layout: PagedLayout, *, to_blocks: bool) -> None:
        """As `check_records`."""
        check_records(layout, self.block_ids, self.arena, self.offsets, to_blocks=to_blocks)

    def addresses(self) -> NDArray[np.int64]:
        """Where each record begins, int64 [records]."""
        return np.asarray(self.offsets, dtype=np.int64) + self.arena.data_ptr()


def check_records(
    layout: PagedLayout,
    block_ids: Sequence[int],
    arena: torch.Tensor,
    offsets: Sequence[int],
    *,
    to_blocks: bool,
) -> None:
    """Whether records at `offsets` in `arena` can be copied from or to the blocks.

    Raises MisuseError when blocks and offsets do not pair up, a block does not exist or would be
    written twice, a record reaches past the arena, or two that are written share bytes. O(n log n).
    """
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        raise MisuseError(
            "An arena must be a contiguous 1-D uint8 tensor",
            dtype=arena.dtype,
            shape=tuple(arena.shape),
        )
    if len(block_ids) != len(offsets):
        raise MisuseError(
            "Blocks and records must pair up", blocks=len(block_ids), records=len(offsets)
        )
    layout.check_block_ids(block_ids)
    places = np.asarray(offsets, dtype=np.int64)
    if not len(places):
        return
    ordered = np.sort(places)
    if ordered[0] < 0 or ordered[-1] + layout.record_bytes > arena.numel():
        raise MisuseError(
            "A record lies outside the arena",
            lowest=int(ordered[0]),
            highest=int(ordered[-1]),
            record_bytes=layout.record_bytes,
            arena_bytes=arena.numel(),
        )
    if to_blocks:
        if len(np.unique(np.asarray(block_ids))) != len(block_ids):
            raise MisuseError("A block would be written twice", blocks=len(block_ids))
    elif (np.diff(ordered) < layout.record_bytes).any():
        raise MisuseError(
            "Two records would share bytes", records=len(offsets), record_bytes=layout.record_bytes
        )
