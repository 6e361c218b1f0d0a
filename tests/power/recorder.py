"""Stores records on a real disk tier, more than it holds, and notes what is durable as it goes.

Usage: recorder.py DIRECTORY SEED [PLANTED]. The notes go to DIRECTORY/acked, so that the log of
writes has them in their place: a note says that the numbers up to it, but for its own, are durable.
PLANTED names an order to break: see `plant`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tests.disk_rig import DiskRig

from ebbtide.tiers.commit import Committer
from ebbtide.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.commit import _Batch

MIB = 1 << 20
CAPACITY_BYTES = 8 * MIB
LENGTH = 40_000
RECORDS = 400  # the disk holds some 150
BATCHES = (1, 12)  # records at a time
DIRECTORY, NOTES = "disk", "acked"


def plant(order: str) -> None:
    """Break the write order: the checks must notice."""
    if order == "commit_before_sync":

        def commit(self: Committer, batch: _Batch) -> None:
            if batch.index:
                self._index.commit(batch.index)
            self._slab.sync()

        Committer._commit = commit  # type: ignore[method-assign]
    elif order == "reuse_before_commit":

        def free(self: DiskTier, rows: Sequence[int]) -> None:
            self.index.free(rows)

        DiskTier._free_after_commit = free  # type: ignore[method-assign]
    elif order:
        raise ValueError(order)


def main() -> None:
    """Record."""
    where, seed, *planted = sys.argv[1:]
    plant("".join(planted))
    draw, number = Random(int(seed)), 0
    notes = os.open(Path(where) / NOTES, os.O_WRONLY | os.O_CREAT, 0o600)
    how = {"commit_interval_s": 0.005, "commit_batch_bytes": MIB}
    rig = DiskRig(Path(where) / DIRECTORY, CAPACITY_BYTES, LENGTH, **how)
    while number < RECORDS:
        end = number + draw.randint(*BATCHES)
        rig.put(range(number, end))
        if draw.random() < 0.5:
            assert rig.flush()
            os.pwrite(notes, end.to_bytes(8, "little"), 0)
        number = end
    os.close(notes)
    os._exit(0)  # as a machine ends that loses its power


if __name__ == "__main__":
    main()
