"""What the first long replay with a disk found: the index must have room for all its records."""

from __future__ import annotations

import random
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.tiers.directory import Geometry
from ebbtide.tiers.index import DurableIndex, Entry, IndexBatch

if TYPE_CHECKING:
    from pathlib import Path


def test_a_full_index_has_room_for_any_churn(tmp_path: Path) -> None:
    """Commits of all sizes at the greatest number of records, with the order saved in between.

    A map that is full ends in MDB_MAP_FULL, which takes the disk tier down.
    """
    plan = Geometry.plan(16 << 20)
    draw = random.Random(5)
    held: deque[bytes] = deque()
    sequence = 0
    with closing(DurableIndex(str(tmp_path), plan.index_bytes)) as index:
        for number in range(150):
            batch = IndexBatch()
            size = draw.choice([1, 16, 64, 256, plan.records_max // 2, plan.records_max])
            while len(held) + size > plan.records_max:
                batch.remove(1, held.popleft())
            for _ in range(size):
                sequence += 1
                held.append(draw.randbytes(36))
                batch.add(Entry(1, held[-1], 0, 4096, sequence * 4096, sequence, bytes(16)))
            index.commit(batch)
            if number % 5 == 0:
                index.save_recency(np.arange(len(held)))
        assert sum(1 for _ in index.entries()) == len(held)
