"""Slabs that misbehave on purpose.

What they may do: fail a write, a read or a sync with EIO; refuse a write or a sync for want of
room or quota, or because the file system is read-only; move only the first part and fail; end a
read short, as a file that was cut; flip a bit on the way in, on the way out or at rest; at a power
cut keep any subset of the 4 KiB pieces written since the last sync that covered them. A sync that
lies (`LOST`, `REORDERED`) covers none or some of them and says that all went well. What they never
do: lose what an honest sync covered, or change bytes that nobody wrote to without `flip_at_rest`.
Slow and hanging devices are the runtime's part (`SimRuntime.slow`, `SimRuntime.hold`).
"""

from __future__ import annotations

import errno
import mmap
from collections import Counter
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.slab import OneByOne

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.slab import Slab

PIECE_BYTES = 4096


class MemorySlab(OneByOne):
    """A slab over a bytearray that knows what a power cut may take. Not for several threads.

    It stands for the device, not for an open file: `close` does nothing, and the next store opens
    the same object again. Writes begin where a piece of 4 KiB does.
    """

    direct = True

    def __init__(self, size_bytes: int) -> None:
        self.image = bytearray(size_bytes)  # what reads see
        self.lost: set[int] = set()  # offsets of the pieces that the last power cut took
        self._stable = bytearray(size_bytes)  # what certainly survives
        self._unsynced: dict[int, list[bytes]] = {}  # by a piece's offset: what was written to it

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        data = b"".join(views)
        self._check(offset, len(data))
        self.image[offset : offset + len(data)] = data
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._unsynced.setdefault(offset + start, []).append(piece)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._check(offset, sum(len(view) for view in views))
        for view in views:
            view[:] = self.image[offset : offset + len(view)]
            offset += len(view)

    def sync(self) -> None:
        for offset, pieces in self._unsynced.items():
            for piece in pieces:
                self._stable[offset : offset + len(piece)] = piece
        self._unsynced.clear()

    def sync_some(self, random: Random) -> None:
        """As a drive that flushes what it likes: any subset of the pieces is stable after it."""
        for offset, pieces in list(self._unsynced.items()):
            later = self._keep_some(offset, pieces, random)
            if later:
                self._unsynced[offset] = later
            else:
                del self._unsynced[offset]

    def close(self) -> None:
        """The device lives on."""

    def lose_power(self, random: Random) -> None:
        """Keep what was synced, and of every later write a random subset of its 4 KiB pieces."""
        self.lost = {
            offset
            for offset, pieces in self._unsynced.items()
            if self._keep_some(offset, pieces, random)
        }
        self._unsynced.clear()
        self.image[:] = self._stable

    def _keep_some(self, offset: int, pieces: list[bytes], random: Random) -> list[bytes]:
        """Make some of what was written to one place stable. Returns what came after that."""
        later: list[bytes] = []
        for piece in pieces:
            later.append(piece)
            if random.random() < 0.5:
                self._stable[offset : offset + len(piece)] = piece
                later.clear()
        return later

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
    """What can go wrong with one operation. `FAULTS` says which operation meets which."""

    EIO = "the operation fails and nothing happens"
    ENOSPC = "there is no room, and nothing happens"
    EDQUOT = "the quota is used up, and nothing happens"
    EROFS = "the file system is read-only, and nothing happens"
    TORN = "a write stops half way and fails; a read stops half way and fails"
    SHORT = "fewer bytes are written, or are there to be read, than were asked for"
    FLIP = "one bit is wrong, and nobody is told"
    LOST = "a sync covers nothing, and nobody is told"
    REORDERED = "a sync covers some pieces and not others, and nobody is told"


REFUSALS = {
    Fault.ENOSPC: errno.ENOSPC,
    Fault.EDQUOT: errno.EDQUOT,
    Fault.EROFS: errno.EROFS,
}  # everything else that is told comes as EIO
FAULTS = {
    "write": (Fault.EIO, *REFUSALS, Fault.TORN, Fault.SHORT, Fault.FLIP),
    "read": (Fault.EIO, Fault.TORN, Fault.SHORT, Fault.FLIP),
    "sync": (Fault.EIO, *REFUSALS, Fault.LOST, Fault.REORDERED),
}
UNTOLD = frozenset({Fault.FLIP, Fault.LOST, Fault.REORDERED})


class Operation(NamedTuple):
    """One call that reached the slab. `name` is "write", "read", "sync" or "close"."""

    name: str
    offset: int
    length: int


class FaultSlab(OneByOne):
    """Implements `tiers.slab.Slab` over another slab, with faults on the way.

    Faults are planned (`fail_next`) or drawn from `rates`, keyed by (operation, fault), with the
    seed. `rates` is kept, not copied: a device's faults outlast the slab that is opened over it.
    `log` holds every operation in order, failed ones included; `counts` the faults given. A
    REORDERED sync is a LOST one over anything but a `MemorySlab`.
    """

    def __init__(
        self,
        inner: Slab,
        *,
        seed: int = 0,
        rates: dict[tuple[str, Fault], float] | None = None,
        on_operation: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self.inner = inner
        self.direct = inner.direct
        self.rates = {} if rates is None else rates
        self.log: list[Operation] = []
        self.counts: Counter[Fault] = Counter()
        self._random = Random(seed)
        self._planned: dict[str, list[Fault]] = {}
        self._on_operation = on_operation

    def fail_next(self, operation: str, fault: Fault = Fault.EIO, times: int = 1) -> None:
        """The next `times` calls of "write", "read" or "sync" meet this fault."""
        if fault not in FAULTS[operation]:
            raise ValueError(f"a {operation} does not meet {fault.name}")
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
        if fault is None:
            self.inner.write(offset, views)
        elif fault is Fault.FLIP:
            copies = [memoryview(bytearray(view)) for view in views]
            self._flip(copies)
            self.inner.write(offset, copies)
        else:
            part = self._first_part(fault, views)
            if part:
                self.inner.write(offset, part)
            raise _error(fault, "write", offset, part, views)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        fault = self._meet("read", offset, views)
        if fault is None or fault is Fault.FLIP:
            self.inner.read(offset, views)
            if fault is Fault.FLIP:
                self._flip(views)
        else:
            part = self._first_part(fault, views)
            if part:
                self.inner.read(offset, part)
            raise _error(fault, "read", offset, part, views)

    def sync(self) -> None:
        fault = self._meet("sync", 0, ())
        if fault is None:
            self.inner.sync()
        elif fault is Fault.REORDERED and isinstance(self.inner, MemorySlab):
            self.inner.sync_some(self._random)
        elif fault not in UNTOLD:
            raise _error(fault, "sync", 0, (), ())

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

    def _first_part(self, fault: Fault, views: Sequence[memoryview]) -> list[memoryview]:
        """What is moved before the operation fails."""
        if fault is Fault.TORN:
            return list(views[: len(views) // 2]) or [views[0][: len(views[0]) // 2]]
        part: list[memoryview] = []
        if fault is Fault.SHORT:
            whole = sum(len(view) for view in views) // PIECE_BYTES
            left = self._random.randrange(whole) * PIECE_BYTES if whole else 0
            for view in views:
                if left:
                    part.append(view[:left])
                    left -= len(part[-1])
        return part


def _error(
    fault: Fault,
    name: str,
    offset: int,
    part: Sequence[memoryview],
    views: Sequence[memoryview],
) -> OSError:
    """A short transfer looks as `SlabFile` reports it."""
    if fault is Fault.SHORT:
        moved, wanted = (sum(len(view) for view in each) for each in (part, views))
        return OSError(errno.EIO, f"short {name}: {moved} of {wanted} bytes at {offset}")
    return OSError(REFUSALS.get(fault, errno.EIO), f"injected: {name} {fault.name}")
