"""Copies by the device's copy engines: straight between the engine's blocks and the arena.

One call to the driver for many copies. The compute units are not touched, so a forward pass beside
it keeps its speed; each copy costs the calling thread about half a microsecond, so many small
fragments go better through `staged_copy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ebbtide.kernels.arena_records import check_records
from ebbtide.kernels.driver import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ebbtide.kernels.driver import Driver
    from ebbtide.kernels.fragments import Copies, FragmentTable
    from ebbtide.kernels.registration import Registration


class EngineCopies:
    """Gather and scatter for one table. Threads: one at a time, after `driver.use` in it.

    Both queue the copies on `stream` and return; the caller waits for the stream before it reads
    what was written, or lets go of a block, a slot or the arena.
    """

    name = "engine"
    staging = None

    def __init__(self, driver: Driver, table: FragmentTable) -> None:
        self._driver = driver
        self._table = table

    def gather(
        self,
        block_ids: Sequence[int],
        arena: torch.Tensor,
        offsets: Sequence[int],
        *,
        stream: int,
        registration: Registration | None = None,
    ) -> None:
        """Blocks into the records at `offsets`, behind everything that `stream` holds by now.

        Raises MisuseError before anything moves when an argument does not fit, TierUnavailableError
        when the driver refuses.
        """
        copies = self._copies(block_ids, arena, offsets, registration, to_blocks=False)
        self._driver.copy(
            copies.records, copies.blocks, copies.lengths, stream=stream, order=Order.STREAM
        )

    def scatter(
        self,
        block_ids: Sequence[int],
        arena: torch.Tensor,
        offsets: Sequence[int],
        *,
        stream: int,
        registration: Registration | None = None,
    ) -> None:
        """Records at `offsets` into blocks; the inverse of `gather`.

        The records are whole and nobody writes them. Still the order is that of the stream:
        blocks that are written may be read by work that the stream waits for.
        """
        copies = self._copies(block_ids, arena, offsets, registration, to_blocks=True)
        self._driver.copy(
            copies.blocks, copies.records, copies.lengths, stream=stream, order=Order.ANY
        )

    def _copies(
        self,
        block_ids: Sequence[int],
        arena: torch.Tensor,
        offsets: Sequence[int],
        registration: Registration | None,
        *,
        to_blocks: bool,
    ) -> Copies:
        check_records(self._table.layout, block_ids, arena, offsets, to_blocks=to_blocks)
        records = np.asarray(offsets, dtype=np.int64) + arena.data_ptr()
        copies = self._table.copies(np.asarray(block_ids, dtype=np.int64), records)
        return copies if registration is None else registration.cut(copies)
