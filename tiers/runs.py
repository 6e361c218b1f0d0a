"""Runs: neighbouring slots that one vectored call reads or writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    Outcomes = list[BaseException | None]  # of runs: what each raised

RUN_BYTES_MAX = 1 << 20  # neighbours are merged into one call up to this size
RUN_RECORDS_MAX = 256  # well below IOV_MAX


class Run(NamedTuple):
    """Slots one behind the other, from `offset` on."""

    offset: int
    views: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.views))


def merge(slots: Sequence[tuple[int, memoryview]]) -> tuple[list[Run], list[list[int]]]:
    """Merge (offset, view) of whole slots into runs; also which inputs each run consists of.

    O(n log n).
    """
    order = sorted(range(len(slots)), key=lambda number: slots[number][0])
    runs: list[tuple[int, list[memoryview]]] = []
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
            runs.append((offset, []))
            members.append([])
            size = 0
        runs[-1][1].append(view)
        members[-1].append(number)
        end, size = offset + len(view), size + len(view)
    return [Run(*run) for run in runs], members


def shared(runs: Sequence[Run], at_once: int, bytes_max: int) -> list[slice]:
    """Which runs, one after the other, make one call: at most so many, and so many bytes unless one
    run has more.
    """
    shares: list[slice] = []
    start = share_bytes = 0
    for number, run in enumerate(runs):
        run_bytes = run.size_bytes
        full = number > start and share_bytes + run_bytes > bytes_max
        if full or number - start == at_once:
            shares.append(slice(start, number))
            start, share_bytes = number, 0
        share_bytes += run_bytes
    if runs:
        shares.append(slice(start, len(runs)))
    return shares
