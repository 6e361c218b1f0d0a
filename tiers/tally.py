"""What became of the records of each namespace since the store was opened.

What adds up is written down in `docs/metrics.md`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ebbtide.tiers.reasons import Miss, label

if TYPE_CHECKING:
    from collections.abc import Iterable

TOTALS = ("asked", "stored", "promoted", "found", "written")


class Tally:
    """Counts of one namespace: whole numbers, and others by codes of `tiers.reasons`."""

    __slots__ = (
        *TOTALS,
        "abandoned",
        "drops",
        "evicted_for_others",
        "failed_loads",
        "hits",
        "left_disk",
        "left_memory",
        "misses",
        "refused",
    )

    def __init__(self) -> None:
        self.asked = 0  # records that loads asked for
        self.stored = 0  # records that became readable in memory: put by an engine
        self.promoted = 0  # records that were read from disk into memory
        self.found = 0  # records that were on disk when it was opened
        self.written = 0  # records that became readable on disk
        self.hits: Counter[int] = Counter()  # records granted to loads, by the tier they came from
        self.failed_loads: Counter[int] = Counter()  # records a load did not bring
        self.misses: Counter[int] = Counter()  # records that were computed and came to be stored
        self.abandoned: Counter[int] = Counter()  # of these the ones that never were, after all
        self.left_memory: Counter[int] = Counter()  # whole records that are there no more
        self.left_disk: Counter[int] = Counter()
        self.drops: Counter[int] = Counter()  # records that left the store, or were not let in
        self.evicted_for_others: Counter[int] = Counter()  # for another namespace's sake, by tier
        self.refused: Counter[int] = Counter()  # reservations that ended early, by reason

    def as_labels(self) -> dict[str, int | dict[str, int]]:
        """What became of records, for humans."""
        counts = ("hits", "misses", "failed_loads", "drops", "abandoned")
        return {
            **{name: getattr(self, name) for name in TOTALS},
            **self._labels(*counts, "left_memory", "left_disk"),
        }

    def quota_labels(self) -> dict[str, dict[str, int]]:
        """What it cost to share the store, for humans."""
        return self._labels("evicted_for_others", "refused")

    def _labels(self, *names: str) -> dict[str, dict[str, int]]:
        return {
            name: {label(code): count for code, count in getattr(self, name).items()}
            for name in names
        }

    def lose_disk(self) -> None:
        """The disk tier is replaced: what it held has left with it."""
        held = self.found + self.written - self.left_disk.total()
        if held:
            self.left_disk[Miss.IO_ERROR] += held


class Tallies:
    """A tally per namespace, found by its present epoch. Control thread only; O(1) but for
    `sums`.
    """

    def __init__(self) -> None:
        self._by_epoch: dict[int, Tally] = {}

    def of(self, epoch: int) -> Tally:
        """The tally of the namespace that has this epoch; a new one if there was none."""
        tally = self._by_epoch.get(epoch)
        if tally is None:
            tally = self._by_epoch[epoch] = Tally()
        return tally

    def sums(self, name: str) -> Counter[int]:
        """One kind of count ("hits", "misses", ...) over all namespaces, by code. O(namespaces)."""
        total: Counter[int] = Counter()
        for tally in self._by_epoch.values():
            total.update(getattr(tally, name))
        return total

    def total(self, name: str) -> int:
        """One of `TOTALS` over all namespaces. O(namespaces)."""
        return sum(getattr(tally, name) for tally in self._by_epoch.values())

    def all(self) -> Iterable[Tally]:
        """Of every namespace that anything was counted of."""
        return self._by_epoch.values()

    def renew(self, old_epoch: int, new_epoch: int) -> None:
        """A reset gave the namespace another epoch: its counts go on."""
        self._by_epoch[new_epoch] = self.of(old_epoch)
        del self._by_epoch[old_epoch]
