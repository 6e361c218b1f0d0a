"""What a new disk tier begins with: the serving index from the durable one, and a proof that the
drive works.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

from ebbtide.tiers.disk import DiskRecord
from ebbtide.tiers.index import CODEC_RAW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.index import DurableIndex, Entry, StoredNamespace
    from ebbtide.tiers.segments import SegmentSpace
    from ebbtide.tiers.slab import Slab


def restore(tier: DiskTier, namespaces: Sequence[StoredNamespace], index: DurableIndex) -> int:
    """Fill the serving index from the durable one. Returns how many entries were dropped.

    Before the tier serves. O(n log n).
    """
    tier.digests = {namespace.epoch: namespace.digest for namespace in namespaces}
    dropped: list[bytes] = []
    entries: list[tuple[bytes, Entry]] = []
    for name, entry in index.entries():
        if entry is None or entry.epoch not in tier.digests or entry.codec != CODEC_RAW:
            dropped.append(bytes(name))
        else:
            entries.append((bytes(name), entry))
    rank = {sequence: place for place, sequence in enumerate(index.recency(), start=1)}
    # Coldest first; records stored after the order was saved are the most recent.
    later = len(rank) + 1
    entries.sort(key=lambda pair: (rank.get(pair[1].sequence, later), pair[1].sequence))
    # The higher sequence keeps a slot that two entries claim.
    claims = sorted(entries, key=lambda pair: -pair[1].sequence)
    placed = {name: tier.adopt_record(entry) for name, entry in claims}
    tier.space.finish_placing()
    for name, _ in entries:
        record = placed[name]
        if record is None:
            dropped.append(name)
        else:
            tier.space.expose(record)
    if dropped:
        index.remove(dropped)
    return len(dropped)


def probe(space: SegmentSpace[DiskRecord], slab: Slab) -> None:
    """Write, sync and read back a slot that nobody uses. Blocks; before the tier serves.

    Raises OSError when the drive does not do that. Where no slot is unused it only syncs.
    """
    spare = DiskRecord(0, b"", 0, b"")
    stride = next(iter(space.classes), space.alignment)
    if not space.place(spare, stride):
        slab.sync()
        return
    try:
        offset = space.offset(spare)
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
        space.remove(spare)
