"""One process of `ebbtide bench index`: open, look up, answer one line of JSON."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import time
from contextlib import closing
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec import json as msgspec_json

from ebbtide.bench.index_directory import (
    EPOCH,
    PAIRS,
    RECORD_BYTES,
    capacity_bytes,
    key_of,
    until,
)
from ebbtide.config import load_config
from ebbtide.errors import EbbtideError
from ebbtide.sizes import exact_size
from ebbtide.tiers.directory import Geometry
from ebbtide.tiers.disk_record import Get
from ebbtide.tiers.index import DurableIndex
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.reasons import Place
from ebbtide.tiers.runtime import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.disk import DiskTier

MEMORY = "64MiB"


class Answer(Struct):
    """What one design took."""

    open_cpu_s: float
    ram_bytes_per_record: float
    lookup_p50_ms: float
    lookup_p99_ms: float
    found: int  # keys


def main(design: str, path: str, records: int, keys: int, lookups: int, seed: int) -> None:
    """Measure one design."""
    draw = Random(seed)
    starts = [draw.randrange(records - keys) for _ in range(lookups)]
    measure = _ebbtide if design == "ebbtide" else _dictionary

    def chain(start: int) -> tuple[bytes, ...]:
        return tuple(key_of(number) for number in range(start, start + keys))

    answer = measure(path, records, [partial(chain, start) for start in starts])
    sys.stdout.buffer.write(msgspec_json.encode(answer) + b"\n")


def _ebbtide(path: str, records: int, chains: Sequence[Callable[[], tuple[bytes, ...]]]) -> Answer:
    before, cpu_s = _anonymous_bytes(), time.process_time()
    runtime = ThreadRuntime()
    settings = {
        "memory": {"capacity": MEMORY},
        "disk": {"path": os.path.abspath(path), "capacity": exact_size(capacity_bytes(records))},
    }
    opened = OpenStore(load_config(settings, environ={}).config, runtime)
    try:
        assert opened.open_disk is not None
        _first_hit(runtime, opened.open_disk.tier)
        cpu_s = time.process_time() - cpu_s
        store = opened.store
        namespace = store.open_namespace(PAIRS)

        def count(asked: tuple[bytes, ...]) -> int:
            return store.lookup(namespace, asked).count(Place.DISK)

        return _answer(before, cpu_s, records, chains, count)
    finally:
        runtime.close()
        opened.close(clean=True)


def _first_hit(runtime: ThreadRuntime, tier: DiskTier) -> None:
    record, results = tier.find(EPOCH, key_of(0)), list[object]()
    if record is None:
        raise EbbtideError("The first record is not found")
    tier.pin(record)
    tier.get([Get(record, memoryview(mmap.mmap(-1, RECORD_BYTES)))], results.extend)
    until(runtime, lambda: bool(results))
    if results != [None]:
        raise EbbtideError("The first record cannot be read", result=results)


def _dictionary(
    path: str, records: int, chains: Sequence[Callable[[], tuple[bytes, ...]]]
) -> Answer:
    before, cpu_s = _anonymous_bytes(), time.process_time()
    segment_bytes = Geometry.plan(capacity_bytes(records)).segment_bytes
    with closing(DurableIndex(os.path.join(path, "index"), 1 << 30, segment_bytes)) as index:
        known = {
            entry.key: (entry.length, entry.offset, entry.sequence, entry.digest)
            for entry in index.entries()
        }
        cpu_s = time.process_time() - cpu_s

        def count(asked: tuple[bytes, ...]) -> int:
            return bytes(Place.DISK if key in known else 0 for key in asked).count(Place.DISK)

        return _answer(before, cpu_s, records, chains, count)


def _answer(
    before: int,
    cpu_s: float,
    records: int,
    chains: Sequence[Callable[[], tuple[bytes, ...]]],
    count: Callable[[tuple[bytes, ...]], int],
) -> Answer:
    gc.collect()
    ram_bytes = _anonymous_bytes() - before
    found, times_ms = 0, []
    for chain in chains:
        asked = chain()
        began = time.perf_counter()
        found += count(asked)
        times_ms.append((time.perf_counter() - began) * 1e3)
    times_ms.sort()
    return Answer(
        open_cpu_s=cpu_s,
        ram_bytes_per_record=ram_bytes / records,
        lookup_p50_ms=times_ms[len(times_ms) // 2],
        lookup_p99_ms=times_ms[len(times_ms) * 99 // 100],
        found=found,
    )


def _anonymous_bytes() -> int:
    """Memory that is this process's own: no mapped files, no arena."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise EbbtideError("This kernel does not tell RssAnon")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
