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

from ebbtide.tiers.index import CODEC_BITS, CODEC_RAW, EPOCH_BYTES, RECORD, RECORD_TYPE, record_name
from ebbtide.tiers.key_index import NO_ROW
from ebbtide.tiers.record_table import KEY_BYTES_MAX, WIDTH_BITS, WORDS, Columns, epochs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.index import DurableIndex, StoredNamespace
    from ebbtide.tiers.segments import Ints, SegmentSpace
    from ebbtide.tiers.slab import Slab

PIECE = 8192  # entries
MANY = 50_000  # records: reading so many leaves megabytes with the allocator


def restore(tier: DiskTier, namespaces: Sequence[StoredNamespace], index: DurableIndex) -> int:
    """Fill the serving index from the durable one. Returns how many entries were dropped.

    Before the tier serves. O(n log n), vectorised: 2 s of CPU for a million.
    """
    for namespace in namespaces:
        tier.know(namespace)
    dropped, columns = _read(index, np.array(list(tier.digests), np.int64))
    # The higher sequence keeps a slot that two entries claim.
    columns = columns.take(np.argsort(-columns.sequence, kind="stable"))
    placed = tier.adopt(columns, _coldest_first(columns.sequence, index.recency()))
    lost = columns.take(np.flatnonzero(~placed))
    dropped += [_lmdb_name(words) for words in lost.name]
    if dropped:
        index.remove(dropped)
    if len(placed) >= MANY:
        _give_memory_back()
    return len(dropped)


def _give_memory_back() -> None:
    """What the reading took: the allocator would keep it, more than the index itself needs.

    Milliseconds, in a process that has used much memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _read(index: DurableIndex, epochs: Ints) -> tuple[list[bytes], Columns]:
    """Names of entries that cannot be used; all others. In pieces: their bytes are many objects."""
    dropped: list[bytes] = []
    pieces = [_columns([], [])]
    for entries in index.raw_entries(PIECE):
        formed = [
            entry
            for entry in entries
            if len(entry[1]) == RECORD.size and 0 < len(entry[0]) - EPOCH_BYTES <= KEY_BYTES_MAX
        ]
        if len(formed) < len(entries):
            dropped += {bytes(name) for name, _ in entries} - {bytes(name) for name, _ in formed}
        names, values = [name for name, _ in formed], [value for _, value in formed]
        piece, codecs = _columns(names, values)
        known = np.isin(epochs_of(piece.name), epochs)
        good = known & (codecs == CODEC_RAW)
        dropped += [bytes(names[place]) for place in np.flatnonzero(~good).tolist()]
        pieces.append((piece.take(np.flatnonzero(good)), codecs))
    joined = [np.concatenate(parts) for parts in zip(*(piece for piece, _ in pieces), strict=True)]
    return dropped, Columns(*joined)


def _columns(names: Sequence[bytes], values: Sequence[bytes]) -> tuple[Columns, Ints]:
    """The columns of well-formed entries, and their codecs."""
    width = EPOCH_BYTES + KEY_BYTES_MAX
    padded = b"".join([name.ljust(width, b"\0") for name in names])
    named = np.frombuffer(padded, np.uint8).reshape(len(names), width)
    fields = np.frombuffer(b"".join(values), RECORD_TYPE)
    epochs = np.ascontiguousarray(named[:, :EPOCH_BYTES]).view(">u4")[:, 0].astype(np.uint64)
    widths = np.fromiter(map(len, names), np.uint64, len(names)) - np.uint64(EPOCH_BYTES)
    whole = np.zeros((len(names), WORDS), np.uint64)
    whole.view(np.uint8)[:, :KEY_BYTES_MAX] = named[:, EPOCH_BYTES:]
    whole[:, -1] = epochs << np.uint64(WIDTH_BITS) | widths
    columns = Columns(
        name=whole,
        length=fields["length"].astype(np.int64),
        offset=fields["offset"].astype(np.int64),
        sequence=fields["sequence"].astype(np.int64),
        digest=fields["digest"],
        minute=fields["head"] >> np.uint32(CODEC_BITS),
    )
    return columns, (fields["head"] & np.uint32((1 << CODEC_BITS) - 1)).astype(np.int64)


def _lmdb_name(words: Ints) -> bytes:
    epoch, width = divmod(int(words[-1]), 1 << WIDTH_BITS)
    return record_name(epoch, words.tobytes()[:width])


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
