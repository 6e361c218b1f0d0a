"""Copies between paged device blocks and flat host records, in plain torch.

The reference of every faster copy, and what runs where there is none. Bytes are moved as bytes: no
dtype is ever looked at, so NaN payloads and any 8-bit format survive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ebbtide.kernels.layout import PagedLayout

STAGING_BYTES_MAX = 64 << 20
"""Device memory one call may take for staging when the blocks are not in host memory."""


class _Run(NamedTuple):
    """Blocks `first, first + step, ...` and records at equal distances, from position `start`."""

    start: int
    length: int
    first: int
    step: int
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

    Cost: one strided copy per row of fragments and run of blocks; runs form where ids ascend evenly
    and destinations are equidistant.
    """
    _check(layout, block_ids, destinations)
    if layout.device.type == "cpu":
        _move(layout, block_ids, destinations, to_blocks=False)
        return
    for ids, records in _batches(layout, block_ids, destinations):
        staging = _staging(layout, len(ids))
        _move(layout, ids, list(staging), to_blocks=False)
        for source, record in zip(staging, records, strict=True):
            record.copy_(source, non_blocking=record.is_pinned())


def scatter(layout: PagedLayout, block_ids: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
    """Copy each record of `sources` into the block at the same position of `block_ids`.

    The inverse of `gather`, with the same rules for arguments, errors, streams and cost; padding
    between blocks is never touched. A block may be named once only.
    """
    _check(layout, block_ids, sources)
    if len(set(block_ids)) != len(block_ids):
        raise MisuseError("A block would be written twice", blocks=len(block_ids))
    if layout.device.type == "cpu":
        _move(layout, block_ids, sources, to_blocks=True)
        return
    for ids, records in _batches(layout, block_ids, sources):
        staging = _staging(layout, len(ids))
        for target, record in zip(staging, records, strict=True):
            target.copy_(record, non_blocking=record.is_pinned())
        _move(layout, ids, list(staging), to_blocks=True)


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


def _move(
    layout: PagedLayout,
    block_ids: Sequence[int],
    records: Sequence[torch.Tensor],
    *,
    to_blocks: bool,
) -> None:
    for run in _runs(layout.record_bytes, block_ids, records):
        record = records[run.start]
        origin = int(record.storage_offset())
        for row in layout.rows:
            blocks = torch.as_strided(
                layout.storages[row.tensor],
                (run.length, row.count, row.length),
                (run.step * row.block_stride, row.spacing, 1),
                row.base + run.first * row.block_stride,
            )
            flat = torch.as_strided(
                record,
                (run.length, row.count, row.length),
                (run.record_stride, row.length, 1),
                origin + row.record_offset,
            )
            if to_blocks:
                blocks.copy_(flat)
            else:
                flat.copy_(blocks)


def _runs(
    record_bytes: int, block_ids: Sequence[int], records: Sequence[torch.Tensor]
) -> Iterator[_Run]:
    """Split the pairs into runs that one strided copy can serve."""
    offsets = [int(record.storage_offset()) for record in records]
    storages = [record.untyped_storage().data_ptr() for record in records]
    start = 0
    while start < len(block_ids):
        end = start + 1
        step = stride = 1
        if end < len(block_ids):
            step = block_ids[end] - block_ids[start]
            stride = offsets[end] - offsets[start]
            while (
                end < len(block_ids)
                and step > 0
                and stride >= record_bytes
                and storages[end] == storages[start]
                and block_ids[end] - block_ids[end - 1] == step
                and offsets[end] - offsets[end - 1] == stride
            ):
                end += 1
        if end == start + 1:  # a lone block: its distances play no part, and may be negative
            step = stride = 1
        yield _Run(start, end - start, block_ids[start], step, stride)
        start = end


def _batches(
    layout: PagedLayout, block_ids: Sequence[int], records: Sequence[torch.Tensor]
) -> Iterator[tuple[Sequence[int], Sequence[torch.Tensor]]]:
    size = max(1, STAGING_BYTES_MAX // layout.record_bytes)
    for start in range(0, len(block_ids), size):
        yield block_ids[start : start + size], records[start : start + size]


def _staging(layout: PagedLayout, count: int) -> torch.Tensor:
    """Device memory for `count` records. The caching allocator keeps it valid on this stream."""
    return torch.empty((count, layout.record_bytes), dtype=torch.uint8, device=layout.device)
