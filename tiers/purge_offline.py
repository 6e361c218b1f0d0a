"""A namespace forgotten and its bytes overwritten in a directory that no store runs on.

1. One commit gives every purged namespace a new epoch: no store will find its records any more.
2. Their slots are overwritten with zeros, and the payload file is synced.
3. Their entries are removed. A purge that is cut short before this can be run again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.errors import TierUnavailableError
from ebbtide.tiers.index import IndexBatch
from ebbtide.tiers.index_page import entries_of
from ebbtide.tiers.slab import open_payload

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from ebbtide.tiers.directory import Directory, Geometry
    from ebbtide.tiers.index import DurableIndex
    from ebbtide.tiers.index_page import Entry

_ZEROS = bytes(1 << 20)


@dataclass(slots=True)
class Purged:
    """What was overwritten. `kept_slots`: named also by others, or outside the file: left alone."""

    disk_records: int = 0
    disk_bytes: int = 0
    kept_slots: int = 0


def purge_offline(
    directory: Directory, index: DurableIndex, digests: Sequence[bytes]
) -> dict[bytes, Purged]:
    """Purge these namespaces, and what earlier resets have left. Blocks as long as writing takes.

    Raises TierUnavailableError when the payload file cannot be written: what was not overwritten
    then still has its entries.
    """
    found = {digest: Purged() for digest in digests}
    namespaces = index.namespaces()
    purged = {one.epoch: one.digest for one in namespaces if one.digest in found}
    living = {one.epoch for one in namespaces} - set(purged)
    _renew(index, set(digests))
    positions, rows, _ = index.read()
    stays = np.isin(rows["epoch"], np.array(list(living), np.int64))
    leaving, others = entries_of(rows[~stays]), entries_of(rows[stays])
    free = _claimed_by_nobody_else(leaving, others, directory.geometry)
    slots: list[tuple[int, int]] = []
    for entry, is_free in zip(leaving, free, strict=True):
        report = found.get(purged.get(entry.epoch, b""), Purged())
        report.disk_records += 1
        report.disk_bytes += entry.length
        report.kept_slots += not is_free
        if is_free:
            slots.append((entry.offset, directory.geometry.slot_bytes(entry.length)))
    _overwrite(directory.slab_path, sorted(slots))
    index.remove(positions[~stays])
    return found


def _renew(index: DurableIndex, digests: Set[bytes]) -> None:
    """Durable at return."""
    namespaces = index.namespaces()
    epoch = max((one.epoch for one in namespaces), default=0)
    batch = IndexBatch()
    for one in namespaces:
        if one.digest in digests:
            epoch += 1
            batch.put_namespace(one._replace(epoch=epoch))
    index.commit(batch)


def _claimed_by_nobody_else(
    entries: Sequence[Entry], others: Sequence[Entry], geometry: Geometry
) -> list[bool]:
    """Which slots lie in the file and share no byte with another's: an index may be damaged."""
    starts, ends = _extents(others, geometry)
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    mine, behind = _extents(entries, geometry)
    below = np.searchsorted(starts, behind)  # others that begin before the end
    reach = np.concatenate([np.zeros(1), ends])[below]  # how far they go
    free: list[bool] = ((reach <= mine) & (behind <= geometry.slab_bytes)).tolist()
    return free


def _extents(
    entries: Sequence[Entry], geometry: Geometry
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """First byte and end of each slot. As floats: an entry may claim any 64 bits."""
    starts = np.array([float(entry.offset) for entry in entries])
    strides = [float(geometry.slot_bytes(entry.length)) for entry in entries]
    return starts, starts + np.array(strides)


def _overwrite(path: str, slots: Sequence[tuple[int, int]]) -> None:
    fd = open_payload(path, os.O_WRONLY)
    try:
        for offset, stride in slots:
            for start in range(0, stride, len(_ZEROS)):
                os.pwrite(fd, _ZEROS[: stride - start], offset + start)
        os.fdatasync(fd)
    except OSError as error:
        raise TierUnavailableError(
            "The payload file cannot be overwritten",
            next_step="Run the same purge again when the drive is well.",
            path=path,
            reason=error.strerror,
        ) from error
    finally:
        os.close(fd)
