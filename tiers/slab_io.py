"""Runs of a slab, many under way at a time, by one call of one thread, where that was compiled.

`slab_io.c` hands a call's runs to the kernel together; see `docs/design/0018-runs-in-one-call.md`.
Without it, and with `EBBTIDE_PURE=1`, `SlabFile` moves the same bytes run by run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from ebbtide.compiled import compiled_module
from ebbtide.tiers.runs import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE = "ebbtide.tiers._slab_io"


class SlabIO(Protocol):
    """The compiled module, as `slab_io.c` describes it. Any thread."""

    DEPTH: int
    """How many runs a call has under way at a time."""

    def transfer(self, fd: int, runs: Sequence[Run], writes: bool) -> list[int]:
        """Write the runs' views or fill them. Per run the bytes that were moved, or an errno below
        zero. The interpreter lock is free meanwhile.
        """
        ...

    def has_queues(self) -> bool:
        """Whether the kernel takes many runs at a time. Else (a sandbox forbids it, fs.aio-max-nr
        is reached) `transfer` moves one after the other.
        """
        ...


def is_right(found: SlabIO) -> bool:
    """Whether it moves the bytes that it was given to where they belong, and tells what it moved:
    one run, and more than it can have under way, in a file in memory.
    """
    return all(_moves(found, count) for count in (1, found.DEPTH + 3))


def _moves(found: SlabIO, count: int) -> bool:
    sizes = [2 + number % 5 for number in range(count)]
    starts = [7 * number for number in range(count)]
    written = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    expected = bytearray(starts[-1] + sizes[-1])
    for start, data in zip(starts, written, strict=True):
        expected[start : start + len(data)] = data
    buffers = [bytearray(size) for size in sizes]
    halves = [[memoryview(data[:1]), memoryview(data[1:])] for data in written]
    views = [[memoryview(buffer)] for buffer in buffers]
    fd = os.memfd_create("ebbtide-slab-io", os.MFD_CLOEXEC)
    try:
        if found.transfer(fd, _runs(starts, halves), True) != sizes:
            return False
        if os.pread(fd, len(expected) + 1, 0) != expected:
            return False
        behind_the_end = Run(len(expected), [memoryview(bytearray(1))])
        moved = found.transfer(fd, [*_runs(starts, views), behind_the_end], False)
        return moved == [*sizes, 0] and buffers == written
    finally:
        os.close(fd)


def _runs(starts: Sequence[int], views: Sequence[Sequence[memoryview]]) -> list[Run]:
    return [Run(start, mine) for start, mine in zip(starts, views, strict=True)]


slab_io = compiled_module(MODULE, is_right, "compiled slab I/O")
"""The compiled module, or None; see `compiled_module`. The first call takes a millisecond."""
