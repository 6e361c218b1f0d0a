"""What became of the records of each namespace since the store was opened."""

from __future__ import annotations

from collections import Counter

from ebbtide.tiers.reasons import label


class Tally:
    """Counts of one namespace, by codes of `tiers.reasons`."""

    __slots__ = ("drops", "evicted_for_others", "failed_loads", "hits", "misses", "refused")

    def __init__(self) -> None:
        self.hits: Counter[int] = Counter()  # records granted to loads, by the tier they came from
        self.failed_loads: Counter[int] = Counter()  # records a load did not bring
        self.misses: Counter[int] = Counter()  # records that were computed and came to be stored
        self.drops: Counter[int] = Counter()  # records that left the store, or were not let in
        self.evicted_for_others: Counter[int] = Counter()  # for another namespace's sake, by tier
        self.refused: Counter[int] = Counter()  # reservations that ended early, by reason

    def as_labels(self) -> dict[str, dict[str, int]]:
        """What became of records, for humans."""
        return self._labels("hits", "misses", "failed_loads", "drops")

    def quota_labels(self) -> dict[str, dict[str, int]]:
        """What it cost to share the store, for humans."""
        return self._labels("evicted_for_others", "refused")

    def _labels(self, *names: str) -> dict[str, dict[str, int]]:
        return {
            name: {label(code): count for code, count in getattr(self, name).items()}
            for name in names
        }


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

    def renew(self, old_epoch: int, new_epoch: int) -> None:
        """A reset gave the namespace another epoch: its counts go on."""
        self._by_epoch[new_epoch] = self.of(old_epoch)
        del self._by_epoch[old_epoch]
