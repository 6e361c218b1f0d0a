"""`ebbtide fsck`: a directory's index against its payload, record by record, while no store runs.

Reads everything once and changes nothing, unless it is asked to repair: then entries that are not
right are taken out of the index. They would have been misses.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.index import DurableIndex
from ebbtide.tiers.index_page import CODEC_RAW, are_formed, entries_of, positions_of
from ebbtide.tiers.index_probe import index_is_sound
from ebbtide.tiers.segments import SegmentSpace
from ebbtide.tiers.slab import open_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.directory import Geometry
    from ebbtide.tiers.index_page import Entry

BATCH = 64  # records read between two reports of progress


@dataclass
class Report:
    """What was found. `bad` counts entries that were not right, by what was wrong with them."""

    records: int = 0  # entries in the index
    payload_bytes: int = 0
    namespaces: int = 0
    sound: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    garbage: int = 0  # entries of namespaces that were reset: never served, not wrong
    slab_bytes: int = 0
    slab_missing_bytes: int = 0  # of the file, behind its end
    unused_bytes: int = 0  # of the slab, named by no sound entry
    stale_recency: int = 0  # places in the saved order of records that are gone
    index_usable: bool = True
    repaired: int = 0  # entries taken out
    by_store: bool = False  # by the store that runs on it: its index is the one in RAM

    @property
    def is_sound(self) -> bool:
        """Nothing is corrupt."""
        return self.index_usable and not self.bad and not self.slab_missing_bytes

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return {**asdict(self), "sound_directory": self.is_sound}


def check_directory(
    path: str, *, repair: bool = False, progress: Callable[[int, int], None] = lambda done, of: None
) -> Report:
    """Check the directory. Blocks as long as reading it takes.

    Raises ConfigError for what is no directory of ours, or is in use.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(closing(Directory.existing(path)))
        report = Report(slab_bytes=directory.geometry.slab_bytes)
        report.unused_bytes = report.slab_bytes
        slab = stack.enter_context(closing(_PayloadFile(directory.slab_path)))
        report.slab_missing_bytes = max(0, report.slab_bytes - slab.size_bytes)
        geometry = directory.geometry
        report.index_usable = index_is_sound(directory.index_path)
        try:
            if report.index_usable:
                index = DurableIndex(
                    directory.index_path, geometry.index_bytes, geometry.segment_bytes
                )
                with closing(index):
                    bad, unreadable = _check_entries(index, geometry, slab, report, progress)
                    if repair and (bad or unreadable):
                        index.remove(bad, unreadable)
                        report.repaired = len(bad) + len(unreadable)
                directory.say_goodbye()
        except lmdb.Error:
            report.index_usable = False
        if repair and not report.index_usable:
            directory.forget_index()  # what a store would do
    return report


def _check_entries(
    index: DurableIndex,
    geometry: Geometry,
    slab: _PayloadFile,
    report: Report,
    progress: Callable[[int, int], None],
) -> tuple[list[int], list[bytes]]:
    """Positions of the entries that are not right, and names of what is no page."""
    digests = {one.epoch: one.digest for one in index.namespaces()}
    report.namespaces = len(digests)
    bad: list[int] = []

    def is_bad(position: int, what: str) -> None:
        bad.append(position)
        report.bad[what] = report.bad.get(what, 0) + 1

    entries: list[tuple[int, Entry]] = []
    positions, rows, unreadable = index.read()
    report.records = len(rows)
    if unreadable:
        report.bad["unreadable_page"] = len(unreadable)
    right = positions == positions_of(rows, geometry.segment_bytes)
    found = zip(positions.tolist(), entries_of(rows), are_formed(rows), right, strict=True)
    for position, entry, is_formed, is_placed in found:
        if not is_formed:
            is_bad(position, "malformed")
        elif entry.codec != CODEC_RAW:
            is_bad(position, "unknown_codec")
        elif entry.epoch not in digests:
            report.garbage += 1
            bad.append(position)
        elif not is_placed:
            is_bad(position, "misplaced")
        else:
            entries.append((position, entry))
    placed = _place(entries, geometry, is_bad)
    placed.sort(key=lambda pair: pair[1].offset)
    for number, (position, entry) in enumerate(placed):
        if number % BATCH == 0:
            progress(number, len(placed))
        what = slab.judge(entry, digests[entry.epoch])
        if what:
            is_bad(position, what)
        else:
            report.sound += 1
            report.payload_bytes += entry.length
            report.unused_bytes -= geometry.slot_bytes(entry.length)
    known = [entry.sequence for _, entry in placed]
    report.stale_recency = int((~np.isin(index.recency(), known)).sum())
    return bad, unreadable


def _place(
    entries: Sequence[tuple[int, Entry]],
    geometry: Geometry,
    is_bad: Callable[[int, str], None],
) -> list[tuple[int, Entry]]:
    """Those whose slots can all exist side by side; of two on one slot the higher sequence."""
    space: SegmentSpace[int] = SegmentSpace(
        geometry.slab_bytes, alignment=geometry.alignment, segment_bytes=geometry.segment_bytes
    )
    claims = sorted(entries, key=lambda pair: -pair[1].sequence)
    lengths = np.array([entry.length for _, entry in claims], np.int64)
    offsets = np.array([entry.offset for _, entry in claims], np.uint64).astype(np.int64)
    placed = space.place_all([position for position, _ in claims], lengths, offsets).tolist()
    for (position, _), fits in zip(claims, placed, strict=True):
        if not fits:
            is_bad(position, "misplaced")
    return [pair for pair, fits in zip(claims, placed, strict=True) if fits]


class _PayloadFile:
    """The slab, read only and dropped from the page cache behind the reading."""

    def __init__(self, path: str) -> None:
        self._fd = open_payload(path, os.O_RDONLY)
        self.size_bytes = os.fstat(self._fd).st_size

    def judge(self, entry: Entry, namespace_digest: bytes) -> str:
        """What is wrong with a record, or nothing."""
        try:
            payload = os.pread(self._fd, entry.length, entry.offset)
        except OSError:
            return "unreadable"
        os.posix_fadvise(self._fd, entry.offset, entry.length, os.POSIX_FADV_DONTNEED)
        if len(payload) < entry.length:
            return "truncated"
        seed = record_seed(namespace_digest, entry.key)
        return "" if record_digest(payload, seed) == entry.digest else "corrupt"

    def close(self) -> None:
        os.close(self._fd)
