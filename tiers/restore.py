"""What a new disk tier begins with: the serving index from the durable one, and a proof that the
drive works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.tiers.index_page import CODEC_RAW, are_formed, codecs_of, columns_of, positions_of
from ebbtide.tiers.key_index import NO_ROW, hashes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.index import DurableIndex, StoredNamespace
    from ebbtide.tiers.record_table import Array
    from ebbtide.tiers.segments import Bools, Ints, SegmentSpace
    from ebbtide.tiers.slab import Slab

MANY = 50_000  # records: reading so many leaves megabytes with the allocator


def restore(tier: DiskTier, namespaces: Sequence[StoredNamespace], index: DurableIndex) -> int:
    """Fill the serving index from the durable one. Returns how many records were dropped.

    Before the tier serves. O(n log n), vectorised: a second of CPU for a million.
    """
    for namespace in namespaces:
        tier.know(namespace)
    dropped = _fill(tier, index)
    if tier.records >= MANY:  # once nothing is held any more of what was read
        _give_memory_back()
    return dropped


def _fill(tier: DiskTier, index: DurableIndex) -> int:
    positions, rows, unreadable = index.read()
    good = are_formed(rows) & (codecs_of(rows) == CODEC_RAW)
    good &= np.isin(rows["epoch"], np.array(list(tier.digests), np.int64))
    good &= positions == positions_of(rows, tier.space.segment_bytes)
    columns, places = columns_of(rows[good]), np.flatnonzero(good)
    # The higher sequence keeps a slot or a key that two records claim.
    latest = np.argsort(-columns.sequence, kind="stable")
    latest = latest[_first_of_each(columns.name[latest])]
    columns, places = columns.take(latest), places[latest]
    placed = tier.adopt(columns, _coldest_first(columns.sequence, index.recency()))
    held = np.zeros(len(rows), np.bool_)
    held[places[placed]] = True
    dropped = len(rows) - int(held.sum()) + len(unreadable)
    if dropped:
        index.remove(positions[~held], unreadable)
    return dropped


def _give_memory_back() -> None:
    """What the reading took: the allocator would keep it, more than the index itself needs.

    Milliseconds, in a process that has used much memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _first_of_each(names: Array) -> Bools:
    """Which names are no other's before them. An index that is whole has each once."""
    hashes, first, which = np.unique(hashes_of(names), return_index=True, return_inverse=True)
    if len(hashes) == len(names):
        return np.ones(len(names), np.bool_)
    before = first[which]
    is_first: Bools = (before == np.arange(len(names))) | (names != names[before]).any(1)
    return is_first


def _coldest_first(sequences: Ints, saved: Ints) -> Ints:
    """Places in `sequences`, by the saved order; what was stored later is the most recent."""
    by_sequence = np.argsort(saved, kind="stable")
    found = np.searchsorted(saved, sequences, sorter=by_sequence)
    place = by_sequence[np.minimum(found, len(saved) - 1)] if len(saved) else found
    known = saved[place] == sequences if len(saved) else np.zeros(len(sequences), np.bool_)
    return np.lexsort((sequences, np.where(known, place, len(saved))))


def probe(space: SegmentSpace[int], slab: Slab) -> None:
    """Write, sync and read back a slot that nobody uses. Blocks; before the tier serves.

    Raises OSError when the drive does not do that. Where no slot is unused it only syncs.
    """
    stride = next(iter(space.classes), space.alignment)
    offset = space.place(NO_ROW, stride)
    if offset is None:
        slab.sync()
        return
    try:
        with mmap.mmap(-1, stride) as pages, memoryview(pages) as view:
            written = os.urandom(space.alignment) * (stride // space.alignment)
            view[:] = written
            slab.write(offset, [view])
            slab.sync()
            view[:] = bytes(stride)
            slab.read(offset, [view])
            if view != written:
                raise OSError(errno.EIO, "a probe did not read back what it had written")
    finally:
        space.remove(NO_ROW, stride, offset)
