"""Slabs that misbehave on purpose.

What they may do: fail a write, a read or a sync with EIO; write only the first part and fail; flip
a bit on the way in, on the way out or at rest; end a read short; at a power cut keep any subset of
the 4 KiB pieces written since the last completed sync. What they never do: lose what a completed
sync covered, change bytes that nobody wrote to without `flip_at_rest`, or reorder a sync with the
writes before it. Slow and hanging devices are the runtime's part (`SimRuntime.hold`).
"""

from __future__ import annotations

import errno
import mmap
from collections import Counter
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.tiers.slab import Slab

PIECE_BYTES = 4096


class MemorySlab:
    """A slab over a bytearray that knows what a power cut may take. Not for several threads.

    It stands for the device, not for an open file: `close` does nothing, and the next store opens
    the same object again.
    """

    direct = True

    def __init__(self, size_bytes: int) -> None:
        self.image = bytearray(size_bytes)  # what reads see
        self._stable = bytearray(size_bytes)  # what certainly survives
        self._unsynced: list[tuple[int, bytes]] = []

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        data = b"".join(views)
        self._check(offset, len(data))
        self.image[offset : offset + len(data)] = data
        self._unsynced.append((offset, data))

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._check(offset, sum(len(view) for view in views))
        for view in views:
            view[:] = self.image[offset : offset + len(view)]
            offset += len(view)

    def sync(self) -> None:
        for offset, data in self._unsynced:
            self._stable[offset : offset + len(data)] = data
        self._unsynced.clear()

    def close(self) -> None:
        """The device lives on."""

    def lose_power(self, random: Random) -> None:
        """Keep what was synced, and of every later write a random subset of its 4 KiB pieces."""
        for offset, data in self._unsynced:
            for start in range(0, len(data), PIECE_BYTES):
                if random.random() < 0.5:
                    piece = data[start : start + PIECE_BYTES]
                    self._stable[offset + start : offset + start + len(piece)] = piece
        self._unsynced.clear()
        self.image[:] = self._stable

    def resize(self, size_bytes: int) -> None:
        """As `ftruncate`, when nothing is unsynced: new bytes are zero."""
        self.sync()
        for part in (self.image, self._stable):
            del part[size_bytes:]
            part.extend(bytes(size_bytes - len(part)))

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > len(self.image):
            raise OSError(errno.EIO, f"{length} bytes at {offset} lie outside the slab")


class Fault(Enum):
    """What can go wrong with one operation."""

    EIO = "the operation fails and nothing happens"
    TORN = "a write stops half way and fails; a read stops half way and fails"
    FLIP = "one bit is wrong, and nobody is told"


class Operation(NamedTuple):
    """One call that reached the slab. `name` is "write", "read", "sync" or "close"."""

    name: str
    offset: int
    length: int


class FaultSlab:
    """Implements `tiers.slab.Slab` over another slab, with faults on the way.

    Faults are planned (`fail_next`) or drawn from `rates`, keyed by (operation, fault), with the
    seed. `log` holds every operation in order, failed ones included; `counts` the faults given.
    """

    def __init__(
        self,
        inner: Slab,
        *,
        seed: int = 0,
        rates: Mapping[tuple[str, Fault], float] | None = None,
        on_operation: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self.inner = inner
        self.direct = inner.direct
        self.rates = dict(rates or {})
        self.log: list[Operation] = []
        self.counts: Counter[Fault] = Counter()
        self._random = Random(seed)
        self._planned: dict[str, list[Fault]] = {}
        self._on_operation = on_operation

    def fail_next(self, operation: str, fault: Fault = Fault.EIO, times: int = 1) -> None:
        """The next `times` calls of "write", "read" or "sync" meet this fault."""
        self._planned.setdefault(operation, []).extend([fault] * times)

    def flip_at_rest(self, offset: int, bit: int = 0) -> None:
        """Turn one bit of what the slab holds, as a decaying medium does."""
        start = offset // PIECE_BYTES * PIECE_BYTES
        with mmap.mmap(-1, PIECE_BYTES) as page, memoryview(page) as view:
            self.inner.read(start, [view])
            view[offset - start] ^= 1 << bit
            self.inner.write(start, [view])

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        fault = self._meet("write", offset, views)
        if fault is Fault.TORN:
            half = list(views[: len(views) // 2]) or [views[0][: len(views[0]) // 2]]
            self.inner.write(offset, half)
        if fault is Fault.FLIP:
            copies = [memoryview(bytearray(view)) for view in views]
            self._flip(copies)
            self.inner.write(offset, copies)
        elif fault is None:
            self.inner.write(offset, views)
        else:
            raise OSError(errno.EIO, f"injected: write {fault.name}")

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        fault = self._meet("read", offset, views)
        if fault is Fault.TORN:
            half = list(views[: len(views) // 2]) or [views[0][: len(views[0]) // 2]]
            self.inner.read(offset, half)
        if fault in (Fault.EIO, Fault.TORN):
            raise OSError(errno.EIO, f"injected: read {fault.name}")
        self.inner.read(offset, views)
        if fault is Fault.FLIP:
            self._flip(views)

    def sync(self) -> None:
        fault = self._meet("sync", 0, ())
        if fault is not None:
            raise OSError(errno.EIO, "injected: sync")
        self.inner.sync()

    def close(self) -> None:
        self._meet("close", 0, ())
        self.inner.close()

    def _meet(self, name: str, offset: int, views: Sequence[memoryview]) -> Fault | None:
        operation = Operation(name, offset, sum(len(view) for view in views))
        self.log.append(operation)
        self._on_operation(operation)
        fault = self._planned[name].pop(0) if self._planned.get(name) else None
        for (of, kind), rate in self.rates.items():
            if fault is None and of == name and self._random.random() < rate:
                fault = kind
        if fault is not None:
            self.counts[fault] += 1
        return fault

    def _flip(self, buffers: Sequence[memoryview]) -> None:
        buffer = self._random.choice(buffers)
        buffer[self._random.randrange(len(buffer))] ^= 1 << self._random.randrange(8)
