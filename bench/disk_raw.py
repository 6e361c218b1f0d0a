"""The ceiling of `ebbtide bench disk`: records at fixed places of one file, and nothing else.

No index, no checksum, no order of writes: threads that each have one call under way, past the page
cache, on extents that have been written before.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ebbtide.bench.disk_load import IN_FLIGHT_MIN, Buffers, Guarantees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEPTHS = (4, 8, 16)


class Raw:
    """Implements `Design`, at one depth. `put` syncs once, at its end."""

    guarantees = Guarantees(synced=True, checksummed=False)

    def __init__(
        self, path: str, records: int, record_bytes: int, depth: int, name: str = "raw"
    ) -> None:
        self.name = f"{name}{depth}"
        self._records = records
        self._depth = depth
        self._buffers = Buffers(record_bytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, records * record_bytes)
        self._pool = ThreadPoolExecutor(depth + 1, thread_name_prefix="bench-raw")

    def put(self, numbers: Sequence[int]) -> None:
        def write(lane: int) -> None:
            for number in numbers[lane :: self._depth]:
                view = self._buffers.filled(number)
                os.pwrite(self._fd, view, self._offset(number))

        self._run(write)
        os.fdatasync(self._fd)

    def get(self, numbers: Sequence[int]) -> int:
        right = itertools.count()

        def read(lane: int) -> None:
            for number in numbers[lane :: self._depth]:
                view = self._buffers.emptied(lane)
                os.preadv(self._fd, [view], self._offset(number))
                if self._buffers.holds(lane, number):
                    next(right)

        self._run(read)
        return next(right)

    def get_beside_puts(self, puts: Sequence[int], gets: Iterator[int]) -> list[float]:
        """Seconds of each get, one after the other, while these are put."""
        times_s: list[float] = []
        with mmap.mmap(-1, self._buffers.record_bytes) as pages, memoryview(pages) as view:
            flood = self._pool.submit(self.put, puts)  # a thread more than the depth
            while not flood.done():
                started = time.perf_counter()
                os.preadv(self._fd, [view], self._offset(next(gets)))
                times_s.append(time.perf_counter() - started)
            flood.result()
        return times_s

    def forget(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)
        self._buffers.close()

    def _run(self, work: Callable[[int], None]) -> None:
        assert self._depth <= IN_FLIGHT_MIN
        list(self._pool.map(work, range(self._depth)))

    def _offset(self, number: int) -> int:
        return number % self._records * self._buffers.record_bytes
