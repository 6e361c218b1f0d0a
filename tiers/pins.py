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
        self._kept: set[MemoryRecord] = set()  # by a command: one of the record's pins
        self._of: dict[bytes, Counter[MemoryRecord]] = {}  # an engine's own ones of these
        self.kept_bytes = 0  # strides of all pinned records
        self._bytes_of: Counter[int] = Counter()  # the same, by epoch

    @property
    def free_bytes(self) -> int:
        """What may still be pinned."""
        return self._bytes_max - self.kept_bytes

    def keep(self, record: MemoryRecord) -> bool | None:
        """Pin a whole record until `let_go`, however often it is asked for. True: now. False: it
        was kept already. None: beyond the bound.
        """
        if record in self._kept:
            return False
        if not self._add(record):
            return None
        self._kept.add(record)
        return True

    def let_go(self, record: MemoryRecord) -> bool:
        """Undo `keep`. False when it was not kept."""
        if record not in self._kept:
            return False
        self._kept.discard(record)
        self._take_back(record)
        return True

    def kept_of(self, epoch: int) -> list[MemoryRecord]:
        """What is kept of a namespace. O(kept records)."""
        return [record for record in self._kept if record.epoch == epoch]

    def pin(self, engine: bytes, epoch: int, keys: Iterable[bytes]) -> int:
        """Pin what memory holds whole; stops at the bound. Returns how many were pinned."""
        pinned = 0
        for key in keys:
            record = self._memory.find(epoch, key)
            if record is None or record.state is not State.WHOLE:
                continue
            if not self._add(record):
                break
            self._of.setdefault(engine, Counter())[record] += 1
            pinned += 1
        return pinned

    def unpin(self, engine: bytes, epoch: int, keys: Iterable[bytes]) -> int:
        """Undo one pin of the engine's own per key. Returns how many were given back."""
        mine = self._of.get(engine, Counter())
        given_back = 0
        for key in keys:
            record = self._memory.find(epoch, key)
            if record is not None and record in mine:
                mine[record] -= 1
                if not mine[record]:
                    del mine[record]
                self._take_back(record)
                given_back += 1
        if not mine:
            self._of.pop(engine, None)
        return given_back

    def engine_gone(self, engine: bytes) -> None:
        """All its pins end. O(its pins)."""
        for record in self._of.pop(engine, Counter()).elements():
            self._take_back(record)

    def drop(self, record: MemoryRecord) -> None:
        """The record is lost: all its pins end. O(engines that pin)."""
        self._kept.discard(record)
        for engine in [engine for engine, mine in self._of.items() if record in mine]:
            del self._of[engine][record]
            if not self._of[engine]:
                del self._of[engine]
        for _ in range(self._counts.get(record, 0)):
            self._take_back(record)

    def drop_epoch(self, epoch: int) -> None:
        """The namespace is being reset. O(pinned records)."""
        for record in [record for record in self._counts if record.epoch == epoch]:
            self.drop(record)

    def _add(self, record: MemoryRecord) -> bool:
        if record not in self._counts:
            epoch, own_max = record.epoch, self._own_max_bytes(record.epoch)
            if record.stride > min(self.free_bytes, own_max - self._bytes_of[epoch]):
                return False
            self._counts[record] = 0
            self.kept_bytes += record.stride
            self._bytes_of[epoch] += record.stride
        self._counts[record] += 1
        self._memory.pin(record)
        return True

    def _own_max_bytes(self, epoch: int) -> int:
        """Of a cap, as of the whole, only half can be pinned: loads need the rest."""
        space = self._memory.space
        own_max = space.shares.cap_bytes(epoch) // 2
        return own_max if own_max < space.capacity_bytes // 2 else self._bytes_max

    def _take_back(self, record: MemoryRecord) -> None:
        self._counts[record] -= 1
        if not self._counts[record]:
            del self._counts[record]
            self.kept_bytes -= record.stride
            self._bytes_of[record.epoch] -= record.stride
            if not self._bytes_of[record.epoch]:
                del self._bytes_of[record.epoch]
        self._memory.unpin(record)
