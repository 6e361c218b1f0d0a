"""Where a block is, or why it is missed: one closed vocabulary, one byte on the wire.

Codes 1-15 are places, codes from 16 on are reasons. A code never changes its meaning; new ones are
appended. The words are the metric labels.
"""

from __future__ import annotations

from enum import IntEnum


class Place(IntEnum):
    """A tier that holds a whole, readable record; or PENDING: someone is putting it right now."""

    MEMORY = 1
    DISK = 2
    REMOTE = 3
    PENDING = 4


class Miss(IntEnum):
    """Why a block that was asked for has to be computed."""

    NEVER_SEEN = 16
    EVICTED = 17
    OTHER_NAMESPACE = 18
    NAMESPACE_PENDING = 19
    ROOT_DIFFERS = 20
    NOT_ADMITTED = 21
    STORE_SHED = 22
    EXPIRED = 23
    OVER_QUOTA = 24
    CORRUPT = 25
    IO_ERROR = 26
    TIMEOUT = 27
    SLOWER_THAN_COMPUTE = 28
    RESET = 29
    PARTIAL_BLOCK = 30
    LAST_TOKEN = 31
    BEHIND_MISS = 32
    UNKNOWN = 33
    BUSY = 34  # only as the reason why a reserve or a load got less than it asked for
    CANCELLED = 35  # only as the end of what its own engine gave up, or left behind


def label(code: int) -> str:
    """The metric label of a code: `Place.DISK` -> "disk". Unknown codes are "unknown"."""
    return _LABELS.get(code, "unknown")


_LABELS: dict[int, str] = {member.value: member.name.lower() for member in (*Place, *Miss)}
