"""Records that somebody wants kept in memory, whatever their recency."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ebbtide.tiers.memory import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ebbtide.tiers.memory import MemoryRecord, MemoryTier


class Pins:
    """Counted pins within a bound of bytes. Control thread only; O(keys)."""

    def __init__(self, memory: MemoryTier, bytes_max: int) -> None:
        self._memory = memory
        self._bytes_max = bytes_max
        self._counts: dict[MemoryRecord, int] = {}
        self._bytes = 0
        self._bytes_of: Counter[int] = Counter()  # by epoch

    def pin(self, epoch: int, keys: Iterable[bytes]) -> int:
        """Pin what memory holds whole; stops at the bound. Returns how many were pinned.

        Of a cap, as of the whole, only half can be pinned: loads need the rest.
        """
        pinned, own_max = 0, self._memory.space.shares.cap_bytes(epoch) // 2
        for key in keys:
            record = self._memory.find(epoch, key)
            if record is None or record.state is not State.WHOLE:
                continue
            if record not in self._counts:
                if self._bytes + record.stride > self._bytes_max:
                    break
                capped = own_max < self._memory.space.capacity_bytes // 2
                if capped and self._bytes_of[epoch] + record.stride > own_max:
                    break
                self._counts[record] = 0
                self._bytes += record.stride
                self._bytes_of[epoch] += record.stride
            self._counts[record] += 1
            self._memory.pin(record)
            pinned += 1
        return pinned

    def unpin(self, epoch: int, keys: Iterable[bytes]) -> int:
        """Undo one pin per key. Returns how many were given back."""
        given_back = 0
        for key in keys:
            record = self._memory.find(epoch, key)
            if record is not None and record in self._counts:
                self._counts[record] -= 1
                self._memory.unpin(record)
                self._forget_unpinned(record)
                given_back += 1
        return given_back

    def drop(self, record: MemoryRecord) -> None:
        """The record is lost: all its pins end."""
        for _ in range(self._counts.get(record, 0)):
            self._counts[record] -= 1
            self._memory.unpin(record)
        self._forget_unpinned(record)

    def drop_epoch(self, epoch: int) -> None:
        """The namespace is being reset. O(pinned records)."""
        for record in [record for record in self._counts if record.epoch == epoch]:
            self.drop(record)

    def _forget_unpinned(self, record: MemoryRecord) -> None:
        if self._counts.get(record) == 0:
            del self._counts[record]
            self._bytes -= record.stride
            self._bytes_of[record.epoch] -= record.stride
            if not self._bytes_of[record.epoch]:
                del self._bytes_of[record.epoch]
