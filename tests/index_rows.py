"""The rows of a closed directory's index, read and changed behind ebbtide's back."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from ebbtide.tiers.index_page import ROW_TYPE, are_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ebbtide.tiers.index_page import Rows


def index_rows(index: Path) -> Rows:
    """A copy of the rows that have a record, in the order of their slots. Raises lmdb.Error."""
    with closing(lmdb.open(str(index), max_dbs=4, readonly=True, lock=False)) as env:
        try:
            records = env.open_db(b"records", create=False)
        except lmdb.NotFoundError:  # nothing was committed yet
            return np.zeros(0, ROW_TYPE)
        with env.begin(db=records) as txn:
            rows = np.frombuffer(b"".join(value for _, value in txn.cursor()), ROW_TYPE)
    return rows[are_records(rows)]


def key_in(row: np.void) -> bytes:
    """The key that a row is under."""
    return bytes(row["key"])[: int(row["tail"]) >> 56]


@contextmanager
def changed_index(index: Path) -> Iterator[Rows]:
    """Rows with a record, in the order of their slots; what they become is written back in place.

    Raises lmdb.Error.
    """
    with closing(lmdb.open(str(index), max_dbs=4)) as env:
        records = env.open_db(b"records")
        with env.begin(write=True, db=records) as txn:
            pages = [(bytes(name), bytes(value)) for name, value in txn.cursor()]
            everything = np.frombuffer(b"".join(value for _, value in pages), ROW_TYPE).copy()
            used = np.flatnonzero(are_records(everything))
            rows = everything[used]
            yield rows
            everything[used] = rows
            written, start = everything.tobytes(), 0
            for name, value in pages:
                txn.put(name, written[start : start + len(value)])
                start += len(value)
