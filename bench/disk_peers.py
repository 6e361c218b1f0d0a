"""Other ways to keep records on a disk, for `ebbtide bench disk`, and what each guarantees."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import lmdb

from ebbtide.bench.disk_load import STAMP_BYTES, Buffers, Guarantees, batches

if TYPE_CHECKING:
    from collections.abc import Sequence

THREADS = 4
LMDB_SPARE = 1.5  # map to payload: less fails under churn
KIB, MIB = 1 << 10, 1 << 20


class Files:
    """A file for each record, written beside and renamed: what file-per-block tiers do."""

    def __init__(
        self,
        path: str,
        records: int,
        record_bytes: int,
        *,
        direct: bool = False,
        synced: bool = False,
    ) -> None:
        self.name = "files" + ("_direct" if direct else "") + ("_synced" if synced else "")
        self.guarantees = Guarantees(synced=synced, checksummed=False)
        self._path = path
        self._records = records
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._synced = synced
        self._kept: deque[int] = deque()
        self._buffers = Buffers(record_bytes)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bench-files")
        os.mkdir(path)

    def put(self, numbers: Sequence[int]) -> None:
        def write(lane: int) -> None:
            for number in numbers[lane::THREADS]:
                self._write(number)

        list(self._pool.map(write, range(THREADS)))
        self._kept.extend(numbers)
        while len(self._kept) > self._records:
            os.unlink(self._name(self._kept.popleft()))

    def get(self, numbers: Sequence[int]) -> int:
        def read(lane: int) -> int:
            return sum(self._read(number, lane) for number in numbers[lane::THREADS])

        return sum(self._pool.map(read, range(THREADS)))

    def forget(self) -> None:
        os.sync()
        for number in self._kept:
            fd = os.open(self._name(number), os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        self._pool.shutdown()
        self._buffers.close()

    def _write(self, number: int) -> None:
        name = self._name(number)
        fd = os.open(name + ".new", os.O_WRONLY | os.O_CREAT | self._flags, 0o600)
        try:
            os.pwrite(fd, self._buffers.filled(number), 0)
            if self._synced:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(name + ".new", name)

    def _read(self, number: int, lane: int) -> bool:
        fd = os.open(self._name(number), os.O_RDONLY | self._flags)
        try:
            os.preadv(fd, [self._buffers.emptied(lane)], 0)
        finally:
            os.close(fd)
        return self._buffers.holds(lane, number)

    def _name(self, number: int) -> str:
        return os.path.join(self._path, str(number))


class LmdbValues:
    """Records as values of an LMDB, a synced transaction for each batch."""

    name = "lmdb_values"
    guarantees = Guarantees(synced=True, checksummed=False)

    def __init__(self, path: str, records: int, record_bytes: int) -> None:
        self._map_bytes = int(records * (record_bytes + 4 * KIB) * LMDB_SPARE) + 64 * MIB
        self._env = lmdb.open(path, map_size=self._map_bytes)
        self._records = records
        self._kept: deque[int] = deque()
        self._buffers = Buffers(record_bytes)
        self._path = path

    def put(self, numbers: Sequence[int]) -> None:
        for batch in batches(numbers, self._buffers.record_bytes):
            with self._env.begin(write=True) as txn:
                for number in batch:
                    txn.put(_key(number), self._buffers.filled(number))
                self._kept.extend(batch)
                while len(self._kept) > self._records:
                    txn.delete(_key(self._kept.popleft()))

    def get(self, numbers: Sequence[int]) -> int:
        right = 0
        for batch in batches(numbers, self._buffers.record_bytes):
            with self._env.begin(buffers=True) as txn:
                for lane, number in enumerate(batch):
                    value = txn.get(_key(number))
                    if value is not None:
                        self._buffers.emptied(lane)[:] = value
                        right += self._buffers.holds(lane, number)
        return right

    def forget(self) -> None:
        """Only unmapped pages leave the cache: open it anew."""
        self._env.close()
        with open(os.path.join(self._path, "data.mdb"), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._env = lmdb.open(self._path, map_size=self._map_bytes)

    def close(self) -> None:
        self._env.close()
        self._buffers.close()


class Mapping:
    """A package that is used like a dictionary of bytes."""

    def __init__(
        self,
        name: str,
        guarantees: Guarantees,
        path: str,
        store: Any,
        records: int,
        record_bytes: int,
    ) -> None:
        self.name = name
        self.guarantees = guarantees
        self._path = path
        self._store = store
        self._records = records
        self._kept: deque[int] = deque()
        self._buffers = Buffers(record_bytes)

    def put(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._store[_key(number)] = bytes(self._buffers.filled(number))
            self._kept.append(number)
            while len(self._kept) > self._records:
                del self._store[_key(self._kept.popleft())]

    def get(self, numbers: Sequence[int]) -> int:
        right = 0
        for number in numbers:
            with suppress(KeyError):
                value = self._store[_key(number)]
                right += value[:STAMP_BYTES] == number.to_bytes(STAMP_BYTES, "little")
        return right

    def forget(self) -> None:
        os.sync()
        for directory, _, names in os.walk(self._path):
            for name in names:
                with ExitStack() as stack, suppress(OSError):
                    file = stack.enter_context(open(os.path.join(directory, name), "rb"))
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._store.close()
        self._buffers.close()


def rocksdb(path: str, records: int, record_bytes: int) -> Mapping:
    """RocksDB through `rocksdict`, values in blob files. Raises ModuleNotFoundError."""
    package = import_module("rocksdict")
    options = package.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_enable_blob_files(True)
    options.set_enable_blob_gc(True)
    guarantees = Guarantees(synced=False, checksummed=True)
    store = package.Rdict(path, options)
    return Mapping("rocksdb", guarantees, path, store, records, record_bytes)


def diskcache(path: str, records: int, record_bytes: int) -> Mapping:
    """`diskcache`: SQLite and files. Raises ModuleNotFoundError."""
    package = import_module("diskcache")
    limit = 4 * records * record_bytes  # what leaves is for the benchmark to say
    store = package.Cache(path, size_limit=limit, eviction_policy="none")
    guarantees = Guarantees(synced=False, checksummed=False)
    return Mapping("diskcache", guarantees, path, store, records, record_bytes)


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")
