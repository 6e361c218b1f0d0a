"""What each namespace holds: counted in the table of a store that runs, in small pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.errors import EbbtideError, NoSpaceError
from ebbtide.tiers.disk_record import DiskState
from ebbtide.tiers.index import CLOCK_START_S
from ebbtide.tiers.record_table import epochs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.tiers.record_table import RecordTable
    from ebbtide.tiers.store import Store

    Reply = Callable[[dict[str, Any] | EbbtideError], None]

ROWS = 4096  # counted in one call: a third of a millisecond
NAMESPACES_MAX = 32  # of one answer
RUNNING_MAX = 8
TELLING = ("engine", "model", "kv_dtype", "block_size", "tensor_parallel", "pipeline_parallel")
WORD_CHARACTERS_MAX = 120  # of a field's value: a client may have sent anything


@dataclass(slots=True)
class Held:
    """Records of one epoch on disk. Minutes as in the index; 0: no age is known."""

    records: int = 0
    payload_bytes: int = 0
    oldest: int = 0
    newest: int = 0

    def add(self, records: int, payload_bytes: int, oldest: int, newest: int) -> None:
        """Count more of them. `oldest` and `newest` are 0 when none of these has an age."""
        self.records += records
        self.payload_bytes += payload_bytes
        self.oldest = min(filter(None, (self.oldest, oldest)), default=0)
        self.newest = max(self.newest, newest)

    def as_fields(self, wall_s: float) -> dict[str, Any]:
        """For a report that is made at this time."""
        return {
            "disk_records": self.records,
            "disk_bytes": self.payload_bytes,
            "oldest_s": _age_s(self.oldest, wall_s),
            "newest_s": _age_s(self.newest, wall_s),
        }


def describe(pairs: Sequence[Sequence[object]]) -> dict[str, str | int]:
    """The fields of a descriptor that tell humans most."""
    found: dict[str, str | int] = {}
    for name, value in pairs:
        if name in TELLING and isinstance(value, int | str):
            found[str(name)] = value[:WORD_CHARACTERS_MAX] if isinstance(value, str) else value
    return found


class Surveys:
    """The store's part for `stats`. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running = 0

    def describe(self, start: int, reply: Reply) -> None:
        """Report on some namespaces, from a place in the order of their digests on; later.

        `next`: where to go on, None at the end. Counts what moves meanwhile once, twice or not.
        """
        if self._running >= RUNNING_MAX:
            raise NoSpaceError("Too many commands look at this store", next_step="Try again.")
        self._running += 1
        digests = self._store.namespaces.digests()
        mine, following = digests[start : start + NAMESPACES_MAX], start + NAMESPACES_MAX
        held: dict[int, Held] = {}

        def counted() -> None:
            self._running -= 1
            namespaces = [self.report(digest, held) for digest in mine]
            reply(
                {
                    "namespaces": namespaces,
                    "next": following if following < len(digests) else None,
                    "store": self._store.stats(),
                }
            )

        disk = self._store.disk
        if disk is None or disk.down:
            self._store.runtime.call_later(0.0, counted)
        else:
            self._count(disk.index.table, 0, held, counted)

    def _count(
        self, table: RecordTable, start: int, held: dict[int, Held], done: Callable[[], None]
    ) -> None:
        """One piece now, the next ones later."""
        count_rows(table, start, held)
        following = start + ROWS
        later = self._store.runtime.call_later
        if following < table.used:
            later(0.0, lambda: self._count(table, following, held, done))
        else:
            later(0.0, done)

    def report(self, digest: bytes, held: Mapping[int, Held]) -> dict[str, Any]:
        """What a namespace holds, of the disk as counted in `held`, and what became of the rest."""
        store = self._store
        known = store.namespaces.by_digest(digest)
        assert known is not None  # namespaces are renewed and never forgotten
        epoch, pairs = known.epoch, known.descriptor
        memory = store.memory
        return {
            "digest": digest,
            "fields": describe(pairs),
            "open": store.namespaces.by_epoch(epoch) is not None,
            "memory_records": len(memory.index(epoch)),
            "memory_bytes": memory.payload_of[epoch],
            **held.get(epoch, Held()).as_fields(store.runtime.wall()),
            **store.ledger.tallies.of(epoch).as_labels(),
            **store.shares(known),
        }


def count_rows(table: RecordTable, start: int, held: dict[int, Held]) -> None:
    """Add the records of the next `ROWS` rows that are held or being written. Vectorised."""
    end = min(start + ROWS, table.used)
    states = table.state[start:end]
    live = np.flatnonzero((states == DiskState.WHOLE) | (states == DiskState.WRITING)) + start
    if not len(live):
        return
    epochs, which = np.unique(epochs_of(table.name[live]), return_inverse=True)
    minutes = table.minute[live].astype(np.int64)
    records = np.bincount(which)
    payload = np.bincount(which, weights=table.length[live])
    newest = np.zeros(len(epochs), np.int64)
    np.maximum.at(newest, which, minutes)
    unknown = np.iinfo(np.int64).max
    oldest = np.full(len(epochs), unknown)
    np.minimum.at(oldest, which, np.where(minutes, minutes, unknown))
    oldest[oldest == unknown] = 0
    columns = (epochs, records, payload, oldest, newest)
    for epoch, *counts in zip(*(column.tolist() for column in columns), strict=True):
        one = held.setdefault(epoch, Held())
        one.add(counts[0], int(counts[1]), counts[2], counts[3])


def _age_s(minute: int, wall_s: float) -> int | None:
    return max(0, int(wall_s) - CLOCK_START_S - 60 * minute) if minute else None
