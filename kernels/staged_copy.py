"""Copies through device memory: a kernel collects small fragments, the copy engine moves them all.

A fragment of a few KiB costs the copy engine more to start than to move. Here a kernel brings the
fragments of many blocks together in a staging buffer, at the speed of device memory and on few
compute units, and whole records cross the bus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import triton.language as tl

from ebbtide.errors import MisuseError
from ebbtide.kernels.driver import Order
from ebbtide.kernels.fragments import Copies, joined
from ebbtide.kernels.triton_copy import copy_fragments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ebbtide.kernels.arena_records import ArenaRecords
    from ebbtide.kernels.fragments import FragmentTable

STAGING_BYTES = 32 << 20
"""Device memory of one direction. At 50 GB/s, were a link so fast, it is a copy of 0.6 ms, against
which a launch is short; not measured yet."""
PROGRAMS = 24
"""So many compute units should fill device memory's path for the few percent of time they run."""
TILE_BYTES = 32 << 10  # that one program has in flight
WARPS = 8
JOBS_MAX = 1 << 30

_WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}


class CopyQueue(Protocol):
    """What takes copies between addresses: a `Driver`."""

    def copy(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        stream: int,
        order: Order,
    ) -> None:
        """Queue them on `stream`."""
        ...


class Tile(NamedTuple):
    """How the kernel is specialised for a table: the arguments that are known when it compiles."""

    JOBS: int
    WORDS: int
    WORD: Any  # a type of triton.language
    VECTOR: int

    @classmethod
    def of(cls, table: FragmentTable, tile_bytes: int = TILE_BYTES) -> Tile:
        """Rows as long as the longest fragment or the whole tile, all powers of two."""
        word, vector = _WORDS[table.alignment]
        size = word.primitive_bitwidth // 8
        longest = int(table.length.max()) // size
        words = min(tile_bytes // size, 1 << (longest - 1).bit_length())
        return cls(max(1, tile_bytes // size // words), words, word, vector)


class StagedCopies:
    """Gather and scatter for one table, by way of a staging buffer.

    Threads and streams: one at a time; torch's current stream must be the one that is passed. Both
    queue their work and return. `staging`: uint8 memory of the same device to use, if it is large
    enough for a record; only on the stream that its other users copy on. Raises
    torch.OutOfMemoryError when there is no room for staging.
    """

    name = "kernel"

    def __init__(
        self,
        driver: CopyQueue,
        table: FragmentTable,
        *,
        staging: torch.Tensor | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._driver = driver
        self._table = table
        device = table.layout.device
        self._columns = tuple(
            torch.from_numpy(column).to(device)
            for column in (table.base, table.block_stride, table.record_offset, table.length)
        )
        if staging is None or staging.numel() < table.record_bytes:
            size = max(1, staging_bytes // table.record_bytes) * table.record_bytes
            staging = torch.empty(size, dtype=torch.uint8, device=device)
        self.staging = staging
        self._capacity = staging.numel() // table.record_bytes  # records
        self._tile = Tile.of(table)

    def gather(self, records: ArenaRecords, *, stream: int) -> None:
        """Blocks into their records, behind everything that `stream` holds by now.

        Raises MisuseError before anything moves when an argument does not fit, TierUnavailableError
        when the driver refuses.
        """
        records.check(self._table.layout, to_blocks=False)
        for part, whole in self._parts(records):
            self.launch(records.block_ids[part], to_blocks=False)
            self._driver.copy(
                whole.records, whole.blocks, whole.lengths, stream=stream, order=Order.STREAM
            )

    def scatter(self, records: ArenaRecords, *, stream: int) -> None:
        """Records into their blocks; the inverse of `gather`."""
        records.check(self._table.layout, to_blocks=True)
        for part, whole in self._parts(records):
            self._driver.copy(
                whole.blocks, whole.records, whole.lengths, stream=stream, order=Order.ANY
            )
            self.launch(records.block_ids[part], to_blocks=True)

    def launch(
        self, block_ids: Sequence[int], *, to_blocks: bool, programs: int = PROGRAMS
    ) -> None:
        """The kernel alone: blocks to or from the first records of the staging buffer.

        Unchecked; at most as many blocks as the buffer has records. Runs on torch's stream.
        """
        jobs = len(block_ids) * len(self._table)
        if jobs > JOBS_MAX:
            raise MisuseError("Too many fragments for one launch", jobs=jobs, allowed=JOBS_MAX)
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self.staging.device)
        grid = (max(1, min(programs, -(-jobs // self._tile.JOBS))),)
        copy_fragments[grid](
            *self._columns,
            ids,
            self.staging.data_ptr(),
            jobs,
            len(self._table),
            self._table.record_bytes,
            GATHER=not to_blocks,
            **self._tile._asdict(),
            num_warps=WARPS,
        )

    def _parts(self, records: ArenaRecords) -> list[tuple[slice, Copies]]:
        """Batches that fit into staging, each with its whole-record copies."""
        size, registration = self._table.record_bytes, records.registration
        addresses = records.addresses()
        parts = []
        for start in range(0, len(addresses), self._capacity):
            part = slice(start, start + self._capacity)
            places = addresses[part]
            staged = self.staging.data_ptr() + np.arange(len(places), dtype=np.int64) * size
            whole = joined(Copies(staged, places, np.full_like(places, size)))
            parts.append((part, whole if registration is None else registration.cut(whole)))
        return parts
