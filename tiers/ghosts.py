"""A bounded memory of keys that are gone, so that a miss can say why."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ebbtide.tiers.tally import Tallies


class Ghosts:
    """Why a key is not here. Fingerprints only: a collision gives a wrong reason, never bytes."""

    def __init__(self, entries_max: int, tallies: Tallies | None = None) -> None:
        """`tallies`: where each one that leaves is counted."""
        self._entries_max = entries_max
        self._tallies = tallies
        self._reasons: OrderedDict[int, Miss] = OrderedDict()

    def remember(self, epoch: int, key: Hashable, reason: Miss) -> None:
        """The key left, or was never let in. O(1); the oldest ghost makes room."""
        if self._tallies is not None:
            self._tallies.of(epoch).drops[reason] += 1
        name = hash((epoch, key))
        self._reasons[name] = reason
        self._reasons.move_to_end(name)
        if len(self._reasons) > self._entries_max:
            self._reasons.popitem(last=False)

    def forget(self, epoch: int, key: Hashable) -> None:
        """The key is back."""
        self._reasons.pop(hash((epoch, key)), None)

    def reason(self, epoch: int, key: Hashable) -> Miss:
        """Why the key is missing: NEVER_SEEN when nothing is known of it."""
        return self._reasons.get(hash((epoch, key)), Miss.NEVER_SEEN)

    def __len__(self) -> int:
        return len(self._reasons)
