"""The durable index: which record lies where in the slab, in LMDB. `docs/disk-format.md` is the
format.

LMDB holds no payload and serves no lookup: the index that serves is in RAM. It is read once, at
open, and written by the committer alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import cbor2
import lmdb
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Sequences = np.ndarray[Any, np.dtype[np.int64]]  # of records

RECORD = struct.Struct("<BBHIQQ16s")
RECORD_TYPE = np.dtype(
    [
        ("head", "<u4"),  # codec, and from the second byte on the minute
        ("length", "<u4"),
        ("offset", "<u8"),
        ("sequence", "<u8"),
        ("digest", "u1", 16),
    ]
)  # the same, of many
CODEC_RAW = 0
CODEC_BITS = 8
CLOCK_START_S = 1_577_836_800  # 2020-01-01, UTC
MINUTE_MAX = (1 << 24) - 1  # in 2051
EPOCH_BYTES = 4
RECENCY_CHUNK = 8192


class Entry(NamedTuple):
    """One committed record."""

    epoch: int
    key: bytes
    codec: int
    length: int
    offset: int
    sequence: int
    digest: bytes
    minute: int = 0  # when it was stored, see `minute_of`


class StoredNamespace(NamedTuple):
    """One committed namespace."""

    digest: bytes
    epoch: int
    descriptor: list[list[object]]


@dataclass(slots=True)
class IndexBatch:
    """All that one transaction changes. For a record key the last operation counts."""

    records: dict[bytes, bytes | None] = field(default_factory=dict)  # None: remove
    namespaces: dict[bytes, bytes] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.records[record_name(entry.epoch, entry.key)] = RECORD.pack(
            entry.codec,
            entry.minute & 0xFF,
            entry.minute >> 8,
            entry.length,
            entry.offset,
            entry.sequence,
            entry.digest,
        )

    def remove(self, epoch: int, key: bytes) -> None:
        self.records[record_name(epoch, key)] = None

    def added(self) -> list[tuple[int, bytes]]:
        """Epoch and key of every record that the transaction would add."""
        names = (name for name, packed in self.records.items() if packed is not None)
        return [(int.from_bytes(name[:EPOCH_BYTES], "big"), name[EPOCH_BYTES:]) for name in names]

    def put_namespace(self, namespace: StoredNamespace) -> None:
        self.namespaces[namespace.digest] = cbor2.dumps(
            {"epoch": namespace.epoch, "descriptor": namespace.descriptor}
        )

    def __bool__(self) -> bool:
        return bool(self.records or self.namespaces)


def record_name(epoch: int, key: bytes) -> bytes:
    """The LMDB key: epoch (big-endian) + block hash + KV group."""
    return epoch.to_bytes(EPOCH_BYTES, "big") + key


def minute_of(wall_s: float) -> int:
    """Minutes since 2020, of seconds since 1970; 0 is for unknown: a clock that is not set."""
    return min(max(int(wall_s - CLOCK_START_S) // 60, 0), MINUTE_MAX)


class DurableIndex:
    """The LMDB environment of one directory. Every method may raise lmdb.Error.

    `commit` and `save_recency` run in the committer thread; `load`, `mark_clean` and `close` while
    nothing else does.
    """

    def __init__(self, path: str, map_bytes: int) -> None:
        self._env = lmdb.open(
            path,
            map_size=map_bytes,
            max_dbs=4,
            mode=0o600,
            readahead=False,
            meminit=False,
            sync=True,
            metasync=True,
        )
        self._env.reader_check()
        self._records = self._env.open_db(b"records")
        self._namespaces = self._env.open_db(b"namespaces")
        self._meta = self._env.open_db(b"meta")

    def namespaces(self) -> list[StoredNamespace]:
        """Every namespace. Values that cannot be read are dropped: their records become garbage."""
        found = []
        with self._env.begin(db=self._namespaces) as txn:
            for digest, value in txn.cursor():
                try:
                    fields = cbor2.loads(value)
                    found.append(
                        StoredNamespace(digest, int(fields["epoch"]), list(fields["descriptor"]))
                    )
                except (cbor2.CBORDecodeError, KeyError, TypeError, ValueError):
                    continue
        return found

    def entries(self) -> Iterator[tuple[bytes, Entry | None]]:
        """Every (LMDB key, entry); None for a value of the wrong form. 0.5 s for a million."""
        with self._env.begin(db=self._records) as txn:
            for name, value in txn.cursor():
                if len(value) != RECORD.size or len(name) <= EPOCH_BYTES:
                    yield name, None
                    continue
                codec, low, high, length, offset, sequence, digest = RECORD.unpack(value)
                epoch, key = int.from_bytes(name[:EPOCH_BYTES], "big"), name[EPOCH_BYTES:]
                minute = high << 8 | low
                yield name, Entry(epoch, key, codec, length, offset, sequence, digest, minute)

    def raw_entries(self, at_most: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Every (LMDB key, value), in pieces of so many. 0.4 s for a million."""
        with self._env.begin(db=self._records) as txn:
            cursor = iter(txn.cursor())
            while piece := list(islice(cursor, at_most)):
                yield piece

    def recency(self) -> Sequences:
        """Record sequences as last saved, coldest first."""
        pieces = [np.zeros(0, np.int64)]
        with self._env.begin(db=self._meta) as txn:
            for name, value in txn.cursor():
                if name.startswith(b"recency/") and len(value) % 8 == 0:
                    pieces.append(np.frombuffer(value, "<i8"))
        return np.concatenate(pieces)

    def commit(self, batch: IndexBatch) -> None:
        """One durable transaction: when this returns, all of the batch survives a power cut."""
        with self._begin_write() as txn:
            for digest, value in batch.namespaces.items():
                txn.put(digest, value, db=self._namespaces)
            for name, packed in batch.records.items():
                if packed is None:
                    txn.delete(name, db=self._records)
                else:
                    txn.put(name, packed, db=self._records)

    def copy_to(self, other: DurableIndex, slab_bytes: int, records_max: int) -> None:
        """Write into an empty index what fits a smaller capacity: the most recently stored."""
        batch = IndexBatch()
        for namespace in self.namespaces():
            batch.put_namespace(namespace)
        inside = [e for _, e in self.entries() if e and e.offset + e.length <= slab_bytes]
        inside.sort(key=lambda entry: -entry.sequence)
        for entry in inside[:records_max]:
            batch.add(entry)
        kept = {entry.sequence for entry in inside[:records_max]}
        other.commit(batch)
        order = self.recency()
        other.save_recency(order[np.isin(order, list(kept))])

    def remove(self, names: Iterable[bytes]) -> None:
        """Drop entries found bad while opening."""
        with self._env.begin(write=True, db=self._records) as txn:
            for name in names:
                txn.delete(name)

    def save_recency(self, sequences: Sequences) -> None:
        """Replace the saved order of eviction, coldest first."""
        with self._begin_write(self._meta) as txn:
            old = [bytes(name) for name, _ in txn.cursor() if name.startswith(b"recency/")]
            for name in old:
                txn.delete(name)
            for start in range(0, len(sequences), RECENCY_CHUNK):
                chunk = sequences[start : start + RECENCY_CHUNK]
                name = b"recency/%08d" % (start // RECENCY_CHUNK)
                txn.put(name, chunk.astype("<i8").tobytes())

    def was_clean(self) -> bool:
        """Whether the last owner closed the directory in order."""
        with self._env.begin(db=self._meta) as txn:
            return bool(txn.get(b"clean") == b"1")

    def mark_clean(self, clean: bool) -> None:
        """Durable at return."""
        with self._env.begin(write=True, db=self._meta) as txn:
            txn.put(b"clean", b"1" if clean else b"0")

    def close(self) -> None:
        self._env.close()

    def _begin_write(self, db: Any = None) -> Any:
        """A foreign reader that was killed would keep all pages freed since from being reused, and
        the map would run full.
        """
        self._env.reader_check()
        return self._env.begin(write=True, db=db)
