"""Reads come first: while somebody reads, only few bytes are being written at a time.

A drive serves what it was given in the order in which it was given it, or worse: a read behind
eight megabytes of writes takes as long as they do.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import Condition
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BESIDE_READS_BYTES = 512 << 10  # that the drive may have before it while somebody reads
LULL_S = 0.005  # without a read: whoever reads one record after the other is still reading


class ReadsFirst:
    """Between the reads and the writes of one slab. Writes are slowed down, never held up: one may
    always go.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._reads = 0
        self._lull_since = -LULL_S
        self._writing_bytes = 0

    def read_began(self) -> None:
        """Control thread only."""
        self._reads += 1

    def read_ended(self) -> None:
        """Control thread only."""
        self._lull_since = time.monotonic()
        self._reads -= 1

    @property
    def reading(self) -> bool:
        """Whether somebody reads, or has just read."""
        return self._reads > 0 or time.monotonic() - self._lull_since < LULL_S

    @contextmanager
    def write(self, size_bytes: int) -> Iterator[None]:
        """Around a write, in its I/O thread. Waits for its turn."""
        with self._changed:
            while self._must_wait(size_bytes):
                self._changed.wait(LULL_S)
            self._writing_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._writing_bytes -= size_bytes
                self._changed.notify()

    def _must_wait(self, size_bytes: int) -> bool:
        if not self._writing_bytes or self._writing_bytes + size_bytes <= BESIDE_READS_BYTES:
            return False
        return self.reading
