"""What the first long replay with a disk found: the index must have room for all its records."""

from __future__ import annotations

import random
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ebbtide.tiers.directory import Geometry
from ebbtide.tiers.index import DurableIndex, IndexBatch
from ebbtide.tiers.index_page import Entry, rows_of_entries

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
MIB = 1 << 20


@pytest.mark.parametrize("slots", ["dense", "sparse"])
@pytest.mark.parametrize(
    ("capacity_bytes", "stride"),
    [(16 * MIB, PAGE), (48 * MIB, PAGE), (16 * MIB, 16 * PAGE), (48 * MIB, MIB)],
)
def test_a_full_index_has_room_for_any_churn(
    tmp_path: Path, capacity_bytes: int, stride: int, slots: str
) -> None:
    """Commits of all sizes at the greatest number of records, with the order saved in between.

    Sparse: records everywhere in the slab, so that each page has few. A map that is full ends in
    MDB_MAP_FULL, which takes the disk tier down.
    """
    plan = Geometry.plan(capacity_bytes)
    draw = random.Random(5)
    free = [
        start + at
        for start in range(0, plan.slab_bytes, plan.segment_bytes)
        for at in range(0, min(plan.segment_bytes, plan.slab_bytes - start) - stride + 1, stride)
    ]
    if slots == "sparse":
        draw.shuffle(free)
    records_max = min(plan.records_max, len(free))
    held: deque[int] = deque()  # offsets
    index_path = str(tmp_path)
    with closing(DurableIndex(index_path, plan.index_bytes, plan.segment_bytes)) as index:
        for number in range(30):
            batch = IndexBatch()
            size = min(draw.choice([1, 16, 64, 256, records_max // 2, records_max]), records_max)
            leaving = [held.popleft() for _ in range(max(0, len(held) + size - records_max))]
            batch.remove(np.array(leaving, np.int64), np.full(len(leaving), stride))
            new, free = free[:size], [*free[size:], *leaving]
            held.extend(new)
            batch.add(
                rows_of_entries(
                    Entry(1, draw.randbytes(36), 0, stride, offset, number + 1, bytes(16))
                    for offset in new
                )
            )
            index.commit(batch)
            if number % 5 == 0:
                index.save_recency(np.arange(len(held)))
        assert len(index.entries()) == len(held)
