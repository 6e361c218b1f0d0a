"""ebbtide's disk tier as a design of `ebbtide bench disk`: the tier alone, no memory before it."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections import deque
from typing import TYPE_CHECKING

from ebbtide.bench.disk_load import Buffers, Guarantees, batches
from ebbtide.errors import EbbtideError
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.disk_record import Get, Put
from ebbtide.tiers.index import StoredNamespace
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.runtime import DIGEST, ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ebbtide.tiers.reasons import Miss

EPOCH = 1
NAMESPACE = StoredNamespace(bytes(32), EPOCH, [["bench", "disk"]])
WAIT_S = 0.05
BATCHES_IN_FLIGHT = 2


class Tier:
    """Implements `Design`. Puts and gets are digested and verified, and batches overlap."""

    name = "ebbtide"
    guarantees = Guarantees(synced=True, checksummed=True)

    def __init__(self, path: str, capacity_bytes: int, record_bytes: int) -> None:
        self._runtime = ThreadRuntime()
        self._disk = OpenDisk(self._runtime, path, capacity_bytes)
        self.tier = self._disk.tier
        self.tier.adopt_namespace(NAMESPACE)
        self._buffers = Buffers(record_bytes)
        self._record_bytes = record_bytes
        self._open: deque[list[int]] = deque()  # batches under way: records that have not ended
        self.failed = 0

    def put(self, numbers: Sequence[int]) -> None:
        for batch in batches(numbers, self._record_bytes):
            self._digest_and_put(batch, self._begin(len(batch)))
        self._until_all_ended()
        flushed: list[bool] = []
        self.tier.flush(flushed.append)
        self._until(lambda: bool(flushed))
        if not all(flushed) or self.failed:
            raise EbbtideError("The disk tier failed while it was measured", reason=self.tier.down)

    def get(self, numbers: Sequence[int]) -> int:
        right = position = 0
        for batch in batches(numbers, self._record_bytes):
            left = self._begin(len(batch))
            wanted: dict[int, int] = {}  # position -> number
            gets = []
            for at, number in enumerate(batch, start=position):
                record = self.tier.find(EPOCH, key_of(number))
                if record is not None:
                    self.tier.pin(record)
                    wanted[at] = number
                    gets.append(Get(record, self._buffers.emptied(at)))
            position += len(batch)

            def ended(
                results: list[Miss | None],
                left: list[int] = left,
                wanted: dict[int, int] = wanted,
            ) -> None:
                nonlocal right
                for (at, number), failure in zip(wanted.items(), results, strict=True):
                    right += failure is None and self._buffers.holds(at, number)
                left[0] = 0

            self.tier.get(gets, ended)
        self._until_all_ended()
        return right

    def get_beside_puts(self, puts: Sequence[int], gets: Iterator[int]) -> list[float]:
        """Seconds of each get, one after the other, while these are put. Raises EbbtideError."""
        times_s: list[float] = []
        flooding = True

        def get_next() -> None:
            record = self.tier.find(EPOCH, key_of(next(gets)))
            if record is None:
                raise EbbtideError("A record that was kept is not found")
            self.tier.pin(record)
            started = time.perf_counter()

            def ended(results: list[Miss | None]) -> None:
                times_s.append(time.perf_counter() - started)
                self.failed += results != [None]
                if flooding:
                    get_next()

            self.tier.get([Get(record, view)], ended)

        with mmap.mmap(-1, self._record_bytes) as pages, memoryview(pages) as view:
            get_next()
            self.put(puts)
            flooding, count = False, len(times_s)
            self._until(lambda: len(times_s) > count)
        return times_s

    def forget(self) -> None:
        """Reads pass the page cache in any case, or drop what they read."""

    @property
    def direct(self) -> bool:
        """Whether they pass it."""
        return self._disk.direct

    @property
    def runs_at_once(self) -> int:
        """How many runs one call to the drive has under way."""
        return self.tier.slab.runs_at_once

    def close(self) -> None:
        self._runtime.close()
        self.tier.close(clean=True)
        self._disk.close()
        self._buffers.close()

    def _digest_and_put(self, numbers: Sequence[int], left: list[int]) -> None:
        """As a store does it: digests are taken in threads, and then the records are put."""
        keys = [key_of(number) for number in numbers]
        views = [self._buffers.filled(number) for number in numbers]
        digests = [b""] * len(numbers)

        def take(position: int) -> None:
            seed = record_seed(NAMESPACE.digest, keys[position])
            digests[position] = record_digest(views[position], seed)

        def ended(failure: Miss | None) -> None:
            left[0] -= 1
            self.failed += failure is not None

        def taken(_: list[BaseException | None]) -> None:
            each = zip(keys, digests, views, strict=True)
            self.tier.put([Put(EPOCH, k, self._record_bytes, d, v, ended) for k, d, v in each])

        self._runtime.start(DIGEST, take, range(len(numbers)), taken)

    def _begin(self, records: int) -> list[int]:
        """Wait for the batch that has the next one's buffers."""
        if len(self._open) == BATCHES_IN_FLIGHT:
            oldest = self._open.popleft()
            self._until(lambda: not oldest[0])
        self._open.append([records])
        return self._open[-1]

    def _until_all_ended(self) -> None:
        self._until(lambda: not any(left[0] for left in self._open))
        self._open.clear()

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self._runtime.run_ready():
                self._runtime.wait(WAIT_S)


def key_of(number: int) -> bytes:
    """Block hash and KV group."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest() + bytes(4)
