"""Copies between paged device blocks and flat host records, in plain torch.

The reference of every faster copy, and what runs where there is nothing faster. On a device that is
host memory the compiled `host_copy` goes first, where it was built. Bytes are moved as bytes: no
dtype is ever looked at, so NaN payloads and any 8-bit format survive.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ebbtide.errors import MisuseError
from ebbtide.kernels.arena_records import check_records
from ebbtide.kernels.host_copy import copy_on_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ebbtide.kernels.layout import PagedLayout

STAGING_BYTES_MAX = 64 << 20
"""Device memory one call may take for staging when the blocks are not in host memory."""

ELEMENTS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
"""Element types by width. They only carry bits: nothing is computed with them."""
_WIDEST = ELEMENTS[0].itemsize
_BY_LENGTH = {dtype.itemsize: dtype for dtype in ELEMENTS}


class _Run(NamedTuple):
    """Blocks whose records begin at `offset` and lie `record_stride` apart.

    `step` above 0: the blocks ascend by it.
    """

    block_ids: NDArray[np.int64]
    step: int
    offset: int
    record_stride: int


def gather(
    layout: PagedLayout, block_ids: Sequence[int], destinations: Sequence[torch.Tensor]
) -> None:
    """Copy each block of `block_ids` into the record at the same position of `destinations`.

    Destinations are 1-D contiguous uint8 host tensors of exactly `layout.record_bytes`, usually
    views of one arena; only their own bytes are written. Raises MisuseError before the first byte
    is moved when an argument does not fit.

    On CPU the copy is done on return, and the interpreter lock is free meanwhile. On a GPU it runs
    on the current stream; with pinned destinations it may still run on return, so the caller waits
    for the stream (or an event on it) before reading.

    Cost: one strided or indexed copy per row of fragments and run of equidistant records.
    """
    _check(layout, block_ids, destinations)
    _each_stretch(layout, block_ids, destinations, to_blocks=False)


def scatter(layout: PagedLayout, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
    """Copy each record of `sources` into the block at the same position of `block_ids`.

    The inverse of `gather`, with the same rules for arguments, errors, streams and cost; padding
    between blocks is never touched. A block may be named once only.
    """
    _check(layout, block_ids, sources)
    if len(set(block_ids)) != len(block_ids):
        raise MisuseError("A block would be written twice", blocks=len(block_ids))
    _each_stretch(layout, block_ids, sources, to_blocks=True)


def gather_into(
    layout: PagedLayout, block_ids: Sequence[int], arena: torch.Tensor, offsets: Sequence[int]
) -> None:
    """`gather` into records by their offsets in `arena`, a contiguous 1-D uint8 host tensor.

    No tensor is made per record: with thousands of small ones that is most of the time.
    """
    check_records(layout, block_ids, arena, offsets, to_blocks=False)
    places = _numbers(offsets) + int(arena.storage_offset())
    _copy(layout, _numbers(block_ids), _whole(arena), places, to_blocks=False)


def scatter_from(
    layout: PagedLayout, block_ids: Sequence[int], arena: torch.Tensor, offsets: Sequence[int]
) -> None:
    """`scatter` from records by their offsets in `arena`; the inverse of `gather_into`."""
    check_records(layout, block_ids, arena, offsets, to_blocks=True)
    places = _numbers(offsets) + int(arena.storage_offset())
    _copy(layout, _numbers(block_ids), _whole(arena), places, to_blocks=True)


def _check(layout: PagedLayout, block_ids: Sequence[int], records: Sequence[torch.Tensor]) -> None:
    if len(block_ids) != len(records):
        raise MisuseError(
            "Blocks and records must pair up", blocks=len(block_ids), records=len(records)
        )
    layout.check_block_ids(block_ids)
    for position, record in enumerate(records):
        if (
            record.dtype != torch.uint8
            or record.shape != (layout.record_bytes,)
            or not record.is_contiguous()
            or record.device.type != "cpu"
        ):
            raise MisuseError(
                "A record must be a contiguous 1-D uint8 host tensor of the record's length",
                position=position,
                dtype=record.dtype,
                shape=tuple(record.shape),
                device=record.device,
                record_bytes=layout.record_bytes,
            )


def _each_stretch(
    layout: PagedLayout,
    block_ids: Sequence[int],
    records: Sequence[torch.Tensor],
    *,
    to_blocks: bool,
) -> None:
    for part, flat in _stretches(records):
        offsets = np.array([int(one.storage_offset()) for one in records[part]], dtype=np.int64)
        _copy(layout, _numbers(block_ids[part]), flat, offsets, to_blocks=to_blocks)


def _copy(
    layout: PagedLayout,
    block_ids: NDArray[np.int64],
    flat: torch.Tensor,
    offsets: NDArray[np.int64],
    *,
    to_blocks: bool,
) -> None:
    if layout.device.type == "cpu":
        if copy_on_host(layout, block_ids, flat, offsets, to_blocks=to_blocks):
            return
        _move(layout, block_ids, flat, offsets, to_blocks=to_blocks)
        return
    size = layout.record_bytes
    for part in _batches(size, len(block_ids)):
        staging = _staging(layout, len(block_ids[part]))
        places = np.arange(len(staging), dtype=np.int64) * size
        records = [flat[offset : offset + size] for offset in offsets[part].tolist()]
        if to_blocks:
            for target, record in zip(staging, records, strict=True):
                target.copy_(record, non_blocking=record.is_pinned())
        _move(layout, block_ids[part], staging.view(-1), places, to_blocks=to_blocks)
        if not to_blocks:
            for source, record in zip(staging, records, strict=True):
                record.copy_(source, non_blocking=record.is_pinned())


def _numbers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def _move(
    layout: PagedLayout,
    block_ids: NDArray[np.int64],
    flat: torch.Tensor,
    offsets: NDArray[np.int64],
    *,
    to_blocks: bool,
) -> None:
    """Records lie at `offsets` in `flat`, a whole storage as 1-D uint8 tensor."""
    wide: dict[torch.dtype, torch.Tensor] = {}
    for run in _runs(layout.record_bytes, block_ids, offsets):
        count = len(run.block_ids)
        places = math.gcd(run.offset, run.record_stride, flat.numel())
        index = None if run.step else torch.from_numpy(run.block_ids).to(layout.device)
        for number, rows in enumerate(layout.groups):
            first = rows[0]
            alignments = (row.alignment for row in rows)
            element = _element(math.gcd(places, first.record_offset, *alignments))
            size = element.itemsize
            length = first.length // size
            if element not in wide:
                wide[element] = flat.view(element)
            # One view for all rows of the group: each of them costs as much as a small copy.
            records = wide[element].as_strided(
                (len(rows), count, first.count, length),
                (first.count * length, run.record_stride // size, length, 1),
                (run.offset + first.record_offset) // size,
            )
            pairs = zip(layout.blocks_of(number, element), records.unbind(0), strict=True)
            _move_rows(run, index, pairs, to_blocks=to_blocks)


def _move_rows(
    run: _Run,
    index: torch.Tensor | None,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    to_blocks: bool,
) -> None:
    """Rows of all blocks and of the run's records; `index` None: the blocks ascend evenly."""
    if index is None:
        start = int(run.block_ids[0])
        chosen = slice(start, int(run.block_ids[-1]) + 1, run.step)
        for blocks, records in pairs:
            if to_blocks:
                blocks[chosen].copy_(records)
            else:
                records.copy_(blocks[chosen])
    elif to_blocks:
        for blocks, records in pairs:
            blocks.index_copy_(0, index, records)
    else:
        for blocks, records in pairs:
            torch.index_select(blocks, 0, index, out=records)


def _element(common: int) -> torch.dtype:
    """The widest element whose length divides `common`: indexed copies go element by element."""
    return _BY_LENGTH[math.gcd(common, _WIDEST)]


def _runs(
    record_bytes: int, block_ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> Iterator[_Run]:
    """Split the pairs into runs of equidistant records, in the order of their offsets."""
    order = np.argsort(offsets, kind="stable")
    ids, places = block_ids[order], offsets[order]
    distances = np.diff(places)
    # Where the distance changes, a run ends; so does it where records would overlap.
    ends = np.flatnonzero(distances[1:] != distances[:-1]) + 2
    start = 0
    while start < len(ids):
        stride = int(distances[start]) if start < len(distances) else 0
        if stride < record_bytes:
            end, stride = start + 1, record_bytes
        else:
            later = np.searchsorted(ends, start + 2)
            end = int(ends[later]) if later < len(ends) else len(ids)
        chosen = np.ascontiguousarray(ids[start:end])
        yield _Run(chosen, _step(chosen), int(places[start]), stride)
        start = end


def _step(ids: NDArray[np.int64]) -> int:
    """The even distance of ascending ids, 1 for a lone one, 0 when there is none."""
    if len(ids) == 1:
        return 1
    steps = np.diff(ids)
    return int(steps[0]) if steps[0] > 0 and (steps == steps[0]).all() else 0


def _stretches(records: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Neighbours in the list that share a storage, with that storage as 1-D uint8 tensor."""
    start = 0
    while start < len(records):
        storage = records[start].untyped_storage()
        end = start + 1
        while (
            end < len(records) and records[end].untyped_storage().data_ptr() == storage.data_ptr()
        ):
            end += 1
        yield slice(start, end), _whole(records[start])
        start = end


def _whole(record: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as 1-D uint8 tensor that shares the memory."""
    storage = record.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=record.device).set_(storage)


def _batches(record_bytes: int, count: int) -> Iterator[slice]:
    size = max(1, STAGING_BYTES_MAX // record_bytes)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _staging(layout: PagedLayout, count: int) -> torch.Tensor:
    """Device memory for `count` records. The caching allocator keeps it valid on this stream."""
    return torch.empty((count, layout.record_bytes), dtype=torch.uint8, device=layout.device)
