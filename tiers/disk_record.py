"""One record of the disk tier, and the orders to write and to read one."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.tiers.reasons import Miss


class DiskState(IntEnum):
    """The life of a disk record; 0 is nobody's row."""

    WRITING = 1
    WHOLE = 2  # the payload is in the slab and readable; committed or about to be
    LEAVING = 3  # out of the index; the slot goes after its last reader and a commit
    BAD = 4  # out of the index for wrong bytes; the slot stays until the directory is opened again


class DiskRecord(NamedTuple):
    """A record as it was found. It stays true only while it is pinned."""

    row: int
    epoch: int
    key: bytes
    length: int
    offset: int
    sequence: int
    digest: bytes
    minute: int  # when it was stored


class Put(NamedTuple):
    """A record to be written. `view` is the whole slot: payload and zeroed padding."""

    epoch: int
    key: bytes
    length: int
    digest: bytes
    view: memoryview
    done: Callable[[Miss | None], None]  # None: the payload is written and readable


class Get(NamedTuple):
    """A record to be read, pinned by `DiskTier.pin`. `view` is the whole slot to fill."""

    record: DiskRecord
    view: memoryview
