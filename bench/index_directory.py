"""A directory of the disk tier with many records, of which one has its payload: for `bench index`.

The others are entries alone: opening and looking up read no payload.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.errors import EbbtideError
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.directory import (
    INDEX_BYTES_MIN,
    INDEX_BYTES_PER_RECORD,
    INDEX_SHARE,
    Geometry,
)
from ebbtide.tiers.disk_record import Put
from ebbtide.tiers.index import DurableIndex, IndexBatch, StoredNamespace
from ebbtide.tiers.index_page import CODEC_RAW, Entry, rows_of_entries
from ebbtide.tiers.namespace import namespace_digest
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.runtime import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = 1
PAIRS: list[list[object]] = [["bench", "index"]]
NAMESPACE = StoredNamespace(namespace_digest(PAIRS), EPOCH, PAIRS)
RECORD_BYTES = 4096
COMMIT_RECORDS = 50_000
WAIT_S = 0.05


def key_of(number: int) -> bytes:
    """As a block of group 0 has it."""
    return hashlib.sha256(b"bench index %d" % number).digest() + bytes(4)


def capacity_bytes(records: int) -> int:
    """What allows so many records."""
    return INDEX_SHARE * max(INDEX_BYTES_MIN, INDEX_BYTES_PER_RECORD * (records + 1))


def until(runtime: ThreadRuntime, condition: Callable[[], bool]) -> None:
    """Turn the store's loop until then."""
    while not condition():
        if not runtime.run_ready():
            runtime.wait(WAIT_S)


def fill(path: str, records: int) -> None:
    """Make the directory, and close it in order. Blocks for some 15 s a million."""
    _write_first(path, records)
    plan = Geometry.plan(capacity_bytes(records))
    index_path = os.path.join(path, "index")
    with closing(DurableIndex(index_path, plan.index_bytes, plan.segment_bytes)) as index:
        for start in range(1, records, COMMIT_RECORDS):
            batch = IndexBatch()
            numbers = range(start, min(start + COMMIT_RECORDS, records))
            batch.add(rows_of_entries(map(_entry, numbers)))
            index.commit(batch)
        order = list(range(1, records + 1))  # sequences: the order of eviction is any
        Random(records).shuffle(order)
        index.save_recency(np.array(order, np.int64))
    _open_and_close(path, records)


def _entry(number: int) -> Entry:
    offset, digest = number * RECORD_BYTES, bytes(16)
    return Entry(EPOCH, key_of(number), CODEC_RAW, RECORD_BYTES, offset, number + 1, digest)


def _write_first(path: str, records: int) -> None:
    runtime = ThreadRuntime()
    disk = OpenDisk(runtime, path, capacity_bytes(records))
    try:
        tier = disk.tier
        tier.adopt_namespace(NAMESPACE)
        page = memoryview(mmap.mmap(-1, RECORD_BYTES))  # aligned
        digest = record_digest(page, record_seed(NAMESPACE.digest, key_of(0)))
        answers: list[object] = []
        tier.put([Put(EPOCH, key_of(0), RECORD_BYTES, digest, page, answers.append)])
        until(runtime, lambda: len(answers) == 1)
        tier.flush(answers.append)
        until(runtime, lambda: len(answers) == 2)
        if answers != [None, True]:
            raise EbbtideError("The first record could not be written", answers=answers)
    finally:
        runtime.close()
        disk.tier.close(clean=True)
        disk.close()


def _open_and_close(path: str, records: int) -> None:
    """So that the next opening finds it as a store leaves it."""
    runtime = ThreadRuntime()
    disk = OpenDisk(runtime, path, capacity_bytes(records))
    runtime.close()
    held = disk.tier.records
    disk.tier.close(clean=True)
    disk.close()
    if held != records:
        raise EbbtideError("The directory does not hold what was written", records=held)
