"""Runs: neighbouring slots that one vectored call reads or writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.slab import RUN_BYTES_MAX, RUN_RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence


class Run(NamedTuple):
    """Slots one behind the other, from `offset` on."""

    offset: int
    views: list[memoryview]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.views))


def merge(slots: Sequence[tuple[int, memoryview]]) -> tuple[list[Run], list[list[int]]]:
    """Merge (offset, view) of whole slots into runs; also which inputs each run consists of.

    O(n log n).
    """
    order = sorted(range(len(slots)), key=lambda number: slots[number][0])
    runs: list[Run] = []
    members: list[list[int]] = []
    end = size = -1
    for number in order:
        offset, view = slots[number]
        joins = (
            offset == end
            and size + len(view) <= RUN_BYTES_MAX
            and len(members[-1]) < RUN_RECORDS_MAX
        )
        if not joins:
            runs.append(Run(offset, []))
            members.append([])
            size = 0
        runs[-1].views.append(view)
        members[-1].append(number)
        end, size = offset + len(view), size + len(view)
    return runs, members
