"""Copies by the device's copy engines: straight between the engine's blocks and the arena.

One call to the driver for many copies. The compute units are not touched, so a forward pass beside
it should keep its speed; each copy should cost the calling thread about half a microsecond, so many
small fragments go better through `staged_copy`. Nothing of this was measured yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ebbtide.kernels.driver import Order

if TYPE_CHECKING:
    from ebbtide.kernels.arena_records import ArenaRecords
    from ebbtide.kernels.driver import Driver
    from ebbtide.kernels.fragments import Copies, FragmentTable


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

    def gather(self, records: ArenaRecords, *, stream: int) -> None:
        """Blocks into their records, behind everything that `stream` holds by now.

        Raises MisuseError before anything moves when an argument does not fit, TierUnavailableError
        when the driver refuses.
        """
        copies = self._copies(records, to_blocks=False)
        self._driver.copy(
            copies.records, copies.blocks, copies.lengths, stream=stream, order=Order.STREAM
        )

    def scatter(self, records: ArenaRecords, *, stream: int) -> None:
        """Records into their blocks; the inverse of `gather`.

        The records are whole and nobody writes them. Still the order is that of the stream:
        blocks that are written may be read by work that the stream waits for.
        """
        copies = self._copies(records, to_blocks=True)
        self._driver.copy(
            copies.blocks, copies.records, copies.lengths, stream=stream, order=Order.ANY
        )

    def _copies(self, records: ArenaRecords, *, to_blocks: bool) -> Copies:
        records.check(self._table.layout, to_blocks=to_blocks)
        ids = np.asarray(records.block_ids, dtype=np.int64)
        copies = self._table.copies(ids, records.addresses())
        return copies if records.registration is None else records.registration.cut(copies)
