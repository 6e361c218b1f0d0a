"""A disk tier over real files: alone, or below a whole store on a simulated clock."""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Any, Self

from ebbtide.testing.conformance import key_of
from ebbtide.testing.faults import FaultSlab
from ebbtide.testing.payload import keyed_bytes
from ebbtide.testing.store import SimStore, descriptor
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.disk_record import Put
from ebbtide.tiers.index import StoredNamespace
from ebbtide.tiers.namespace import namespace_digest
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.runtime import ThreadRuntime
from tests.index_rows import index_rows, key_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ebbtide.tiers.reasons import Miss
    from ebbtide.tiers.slab import Slab

PAGE = 4096
EPOCH = 1
PATIENCE_S = 30.0
_PAIRS = descriptor().pairs()
NAMESPACE = StoredNamespace(namespace_digest(_PAIRS), EPOCH, _PAIRS)


def payload_of(key: bytes, length: int) -> bytes:
    """The only right bytes under a key."""
    return keyed_bytes(key, length)


def raw_entries(place: Path) -> Iterator[tuple[bytes, int, int]]:
    """(key, offset, length) of what the index of a closed directory names. Raises lmdb.Error."""
    for row in index_rows(place / "index"):
        yield key_in(row), int(row["offset"]), int(row["length"])


class StoreOnFiles(SimStore):
    """A `SimStore` whose payload lies in the real slab file; only the clock is simulated."""

    def _on_device(self, file: Slab) -> Slab:
        self.slab = FaultSlab(file, rates=self.rates)
        return self.slab


class DiskRig:
    """One open directory. A context manager; closed in order, unless `close(clean=False)`."""

    def __init__(self, path: Path, capacity_bytes: int, length: int, **how: Any) -> None:
        """`length`: of every record. `how`: as of OpenDisk."""
        self.length = length
        self.runtime = ThreadRuntime()
        self.disk = OpenDisk(self.runtime, str(path), capacity_bytes, **how)
        if EPOCH not in self.disk.tier.digests:
            self.disk.tier.adopt_namespace(NAMESPACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def held(self) -> set[bytes]:
        """Keys in the serving index."""
        return set(self.disk.tier.keys(EPOCH))

    def put(self, numbers: Sequence[int]) -> list[Miss | None]:
        """Store the records of these numbers and wait for the writes; what each came to."""
        stride = -(-self.length // PAGE) * PAGE
        results: list[Miss | None] = []
        with mmap.mmap(-1, len(numbers) * stride) as pages, memoryview(pages) as view:
            slots = [view[n * stride : (n + 1) * stride] for n in range(len(numbers))]
            puts = [
                self._put_of(number, slot, results.append)
                for number, slot in zip(numbers, slots, strict=True)
            ]
            self.disk.tier.put(puts)
            self.until(lambda: len(results) == len(numbers))
            puts.clear()
            for slot in slots:
                slot.release()
        return results

    def flush(self) -> bool:
        """Wait until what was written is durable."""
        answers: list[bool] = []
        self.disk.tier.flush(answers.append)
        self.until(lambda: answers)
        return answers[0]

    def until(self, condition: Callable[[], object]) -> None:
        """Run the control thread's part until something is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "the disk tier does not come to an end"
            self.runtime.wait(0.01)
            self.runtime.run_ready()

    def close(self, *, clean: bool = True) -> None:
        """Close the files. `clean`: everything was flushed."""
        self.runtime.close()
        self.disk.tier.close(clean)
        self.disk.close()

    def _put_of(self, number: int, slot: memoryview, done: Callable[[Miss | None], None]) -> Put:
        key = key_of(number)
        slot[: self.length] = payload_of(key, self.length)
        digest = record_digest(slot[: self.length], record_seed(NAMESPACE.digest, key))
        return Put(EPOCH, key, self.length, digest, slot, done)
