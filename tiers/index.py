"""The durable index: which record lies where in the slab, in LMDB. `docs/disk-format.md` is the
format.

LMDB holds no payload and serves no lookup: the index that serves is in RAM. It is read once, at
open, and written by the committer alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import cbor2
import lmdb
import numpy as np

from ebbtide.tiers.index_page import (
    ROW_TYPE,
    are_records,
    by_page,
    changed_page,
    columns_of,
    empty_rows,
    entries_of,
    is_page,
    name_of_page,
    page_of_name,
    positions_in,
    positions_of,
    sequences_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ebbtide.tiers.index_page import Entry, Rows
    from ebbtide.tiers.record_table import Columns
    from ebbtide.tiers.segments import Ints

Sequences = np.ndarray[Any, np.dtype[np.int64]]  # of records

CLOCK_START_S = 1_577_836_800  # 2020-01-01, UTC
MINUTE_MAX = (1 << 24) - 1  # in 2051
RECENCY_CHUNK = 510  # sequences that fill one of LMDB's pages: several in a row are hard to find


class StoredNamespace(NamedTuple):
    """One committed namespace."""

    digest: bytes
    epoch: int
    descriptor: list[list[object]]


@dataclass(slots=True)
class IndexBatch:
    """All that one transaction changes. Of a slot the last change counts."""

    changes: list[Rows] = field(default_factory=list)
    namespaces: dict[bytes, bytes] = field(default_factory=dict)

    def add(self, rows: Rows) -> None:
        """Records that their slots hold from now on, each another one."""
        if len(rows):
            self.changes.append(rows)

    def remove(self, offsets: Ints, lengths: Ints) -> None:
        """The slots that records of these lengths were in hold none, each another one."""
        self.add(empty_rows(offsets, lengths))

    def added(self) -> Columns:
        """Every record that the transaction would add."""
        rows = self._joined()
        rows = rows[_last_of_each(rows["offset"])]
        return columns_of(rows[are_records(rows)])

    def put_namespace(self, namespace: StoredNamespace) -> None:
        self.namespaces[namespace.digest] = cbor2.dumps(
            {"epoch": namespace.epoch, "descriptor": namespace.descriptor}
        )

    def by_page(self, segment_bytes: int) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """Per page that changes: its number, and which of its rows become what."""
        rows = self._joined()
        positions = positions_of(rows, segment_bytes)
        last = _last_of_each(positions)
        positions, rows = positions[last], rows[last]
        rows[~are_records(rows)] = np.zeros((), ROW_TYPE)  # where it was is no part of the page
        return by_page(positions, rows)

    def _joined(self) -> Rows:
        return np.concatenate(self.changes) if self.changes else np.zeros(0, ROW_TYPE)

    def __bool__(self) -> bool:
        return bool(self.changes or self.namespaces)


class Found(NamedTuple):
    """All that the pages of an index say."""

    positions: Ints  # per record its place in the index
    rows: Rows
    unreadable: list[bytes]  # names of what is no page


def _last_of_each(values: Ints) -> Ints:
    """Of each value the last place that has it, by value."""
    _, backwards = np.unique(values[::-1], return_index=True)
    last: Ints = len(values) - 1 - backwards
    return last


def minute_of(wall_s: float) -> int:
    """Minutes since 2020, of seconds since 1970; 0 is for unknown: a clock that is not set."""
    return min(max(int(wall_s - CLOCK_START_S) // 60, 0), MINUTE_MAX)


class DurableIndex:
    """The LMDB environment of one directory. Every method may raise lmdb.Error.

    `commit` and `save_recency` run in the committer thread; `load`, `mark_clean` and `close` while
    nothing else does.
    """

    def __init__(self, path: str, map_bytes: int, segment_bytes: int) -> None:
        """`segment_bytes`: as in the directory's geometry; it says which slots are neighbours."""
        self._segment_bytes = segment_bytes
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

    def read(self) -> Found:
        """All records. 0.2 s for a million."""
        rows: list[Rows] = [np.zeros(0, ROW_TYPE)]
        positions: list[Ints] = [np.zeros(0, np.int64)]
        unreadable: list[bytes] = []
        with self._env.begin(db=self._records) as txn:
            for name, value in txn.cursor():
                if is_page(name, value):
                    rows.append(np.frombuffer(value, ROW_TYPE))
                    positions.append(positions_in(page_of_name(name), len(rows[-1])))
                else:
                    unreadable.append(name)
        joined = np.concatenate(rows)
        used = are_records(joined)
        return Found(np.concatenate(positions)[used], joined[used], unreadable)

    def entries(self) -> list[Entry]:
        """Every record, one by one. 2 us each."""
        return entries_of(self.read().rows)

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
            for page, changes in batch.by_page(self._segment_bytes):
                self._change(txn, page, changes)

    def copy_to(self, other: DurableIndex, slab_bytes: int, records_max: int) -> None:
        """Write into an empty index what fits a smaller capacity: the most recently stored."""
        batch = IndexBatch()
        for namespace in self.namespaces():
            batch.put_namespace(namespace)
        rows = self.read().rows
        inside = rows["offset"] + rows["length"] <= slab_bytes
        rows = rows[inside & (positions_of(rows, self._segment_bytes) >= 0)]
        latest = np.argsort(-sequences_of(rows), kind="stable")[:records_max]
        batch.add(rows[latest])
        other.commit(batch)
        order = self.recency()
        other.save_recency(order[np.isin(order, sequences_of(rows[latest]))])

    def remove(self, positions: Ints | Sequence[int], unreadable: Iterable[bytes] = ()) -> None:
        """Drop records found bad, where they were read, and what is no page."""
        at = np.unique(np.asarray(positions, np.int64))
        with self._env.begin(write=True, db=self._records) as txn:
            for page, changes in by_page(at, np.zeros(len(at), ROW_TYPE)):
                self._change(txn, page, changes)
            for name in unreadable:
                txn.delete(name)

    def _change(self, txn: Any, page: int, changes: Sequence[tuple[int, bytes]]) -> None:
        name = name_of_page(page)
        old = txn.get(name, db=self._records)
        changed = changed_page(old if old and is_page(name, old) else b"", changes)
        if changed:
            txn.put(name, changed, db=self._records)
        elif old is not None:
            txn.delete(name, db=self._records)

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
