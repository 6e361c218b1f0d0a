"""What each namespace holds of one medium, and how much it may.

A namespace may have a quota: a *floor*, below which no other one's record drives it, and a *cap*,
above which it evicts its own coldest. Both are shares of the medium. Bytes are those of the slots
of records that count, padding included; they are counted as records come and go, by reset epoch.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

COMMON = 0  # the order of eviction of all that have no quota; a reset epoch is never 0


class Quota(NamedTuple):
    """Shares of each tier, from 0 to 1."""

    floor: float = 0.0
    cap: float = 1.0

    @property
    def limits(self) -> bool:
        """Whether it says anything at all."""
        return self.floor > 0.0 or self.cap < 1.0


NO_QUOTA = Quota()


class Shares:
    """The account of one medium of `capacity_bytes`. Control thread only; every call is O(1)."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_of: Counter[int] = Counter()  # bytes by epoch
        self._quotas: dict[int, Quota] = {}  # by epoch; those with an order of their own
        self._capped: set[int] = set()

    # -- what is allowed ------------------------------------------------------------------------

    def assign(self, epoch: int, quota: Quota, *, ordered: bool) -> None:
        """Give an epoch its quota, in the place of the one it had.

        `ordered`: it has an order of eviction of its own, and must have had one from its first
        record on. What has none has no quota.
        """
        if ordered:
            self._quotas[epoch] = quota
            if quota.cap < 1.0:
                self._capped.add(epoch)

    def retire(self, epoch: int) -> None:
        """The epoch was reset: what is left of it has neither floor nor cap."""
        if epoch in self._quotas:
            self._quotas[epoch] = NO_QUOTA
            self._capped.discard(epoch)
            self._forget(epoch)

    @property
    def is_common(self) -> bool:
        """Nobody has a quota: there is one order of eviction."""
        return not self._quotas

    def quota(self, epoch: int) -> Quota:
        """What applies to the epoch now."""
        return self._quotas.get(epoch, NO_QUOTA)

    def order(self, epoch: int) -> int:
        """The order of eviction that records of the epoch belong to."""
        return epoch if epoch in self._quotas else COMMON

    def cap_bytes(self, epoch: int) -> int:
        """How much the epoch may hold."""
        return int(self.quota(epoch).cap * self.capacity_bytes)

    def floor_bytes(self, epoch: int) -> int:
        """How much nobody else takes from it."""
        return int(self.quota(epoch).floor * self.capacity_bytes)

    def excess(self, epoch: int, stride: int) -> int:
        """Bytes that the epoch has to give up before it may take `stride` more; 0 or less: none."""
        if epoch not in self._capped:
            return 0
        return self.used_of[epoch] + stride - self.cap_bytes(epoch)

    def may_lose(self, order: int, size_bytes: int, sake: int) -> bool:
        """Whether an order may lose so much for the sake of epoch `sake`."""
        if order in (COMMON, sake):
            return True
        return self.used_of[order] - size_bytes >= self.floor_bytes(order)

    def over_cap(self) -> list[int]:
        """Epochs that hold more than they may: after the cap was lowered. O(epochs with a cap)."""
        return [epoch for epoch in self._capped if self.excess(epoch, 0) > 0]

    # -- what is held ---------------------------------------------------------------------------

    def take(self, epoch: int, stride: int) -> None:
        """A record counts from now on."""
        self.used_of[epoch] += stride

    def give(self, epoch: int, stride: int) -> None:
        """It counts no more."""
        self.used_of[epoch] -= stride
        self._forget(epoch)

    def _forget(self, epoch: int) -> None:
        if not self.used_of[epoch]:
            del self.used_of[epoch]
            if self._quotas.get(epoch) == NO_QUOTA:
                del self._quotas[epoch]
