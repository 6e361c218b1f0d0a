"""What the designs of `ebbtide bench disk` are given: records in page-aligned buffers, and numbers.

Record `n` is a fixed random sequence that begins with `n`. A design that brings the wrong record is
found out by that; whether every byte is right is what its checksum, if any, is for.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

IN_FLIGHT_MIN = 32  # records
IN_FLIGHT_BYTES = 16 << 20
STAMP_BYTES = 8


class Guarantees(NamedTuple):
    """What a design's user may rely on."""

    synced: bool  # what `put` returned for survives a power cut
    checksummed: bool  # `get` checks every byte

    def __str__(self) -> str:
        words = [word for word, has in zip(("synced", "checksummed"), self, strict=True) if has]
        return "+".join(words) or "none"


class Design(Protocol):
    """A way to keep records on a disk. One thread uses it.

    Records are numbered upwards. A design that is full gives up its oldest ones.
    """

    name: str
    guarantees: Guarantees

    def put(self, numbers: Sequence[int]) -> None:
        """Keep these records. On return they are as durable as the design makes anything."""
        ...

    def get(self, numbers: Sequence[int]) -> int:
        """Bring these records. Returns how many were right."""
        ...

    def forget(self) -> None:
        """Have the next `get` read from the disk and not from the page cache."""
        ...

    def close(self) -> None: ...


def in_flight(record_bytes: int) -> int:
    """Records that a design has in memory at a time, every design alike: two batches."""
    return max(IN_FLIGHT_MIN, IN_FLIGHT_BYTES // record_bytes)


class Buffers:
    """`in_flight` records in memory, page aligned. Record `n` uses buffer `n % in_flight`."""

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self._count = count = in_flight(record_bytes)
        self.memory = mmap.mmap(-1, count * record_bytes)
        self._whole = memoryview(self.memory)
        self._whole[:] = os.urandom(record_bytes) * count
        self.views = [self._whole[n * record_bytes : (n + 1) * record_bytes] for n in range(count)]

    def filled(self, number: int) -> memoryview:
        """The record, to be written."""
        view = self.views[number % self._count]
        view[:STAMP_BYTES] = number.to_bytes(STAMP_BYTES, "little")
        return view

    def emptied(self, position: int) -> memoryview:
        """Room for a record to be read, as the `position`-th of a series."""
        view = self.views[position % self._count]
        view[:STAMP_BYTES] = b"\xff" * STAMP_BYTES
        return view

    def holds(self, position: int, number: int) -> bool:
        """Whether the record that was read there is the right one."""
        return self.views[position % self._count][:STAMP_BYTES] == number.to_bytes(
            STAMP_BYTES, "little"
        )

    def close(self) -> None:
        """Let the memory go."""
        for view in (*self.views, self._whole):
            view.release()
        self.memory.close()


def batches(numbers: Sequence[int], record_bytes: int) -> list[Sequence[int]]:
    """In order, half of what is in flight at a time."""
    size = in_flight(record_bytes) // 2
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
