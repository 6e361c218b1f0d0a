"""Looks at states of a disk tier after a power cut, in a process that one of them may kill.

A line in is "DIRECTORY ACKED": the tier's directory, and up to which number records were durable.
A line out is JSON, see `Found`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TypedDict

from tests.disk_rig import DiskRig, payload_of, raw_entries
from tests.power.recorder import CAPACITY_BYTES, LENGTH

from ebbtide.testing.conformance import key_of

SURELY_KEPT = 80  # of the latest durable records; the disk holds some 150
MORE = range(10_000, 10_040)


class Found(TypedDict):
    """`entries` of the index, and how many of them are `wrong` if no digest is asked; how many
    durable records are `lost`; `unusable` is 1 when nothing more can be stored.
    """

    entries: int
    wrong: int
    lost: int
    unusable: int


def look(place: Path, acked: int) -> Found:
    """At the files, and then by opening them. Raises lmdb.Error, or worse."""
    found = Found(entries=0, wrong=0, lost=0, unusable=0)
    if (place / "index" / "data.mdb").exists():
        with open(place / "slab", "rb", buffering=0) as slab:
            for key, offset, length in raw_entries(place):
                found["entries"] += 1
                payload = os.pread(slab.fileno(), length, offset)
                found["wrong"] += payload != payload_of(key, LENGTH)
    surely = {key_of(number) for number in range(max(0, acked - SURELY_KEPT), acked)}
    # This process is the probe: an index that kills it has been found.
    with DiskRig(place, CAPACITY_BYTES, LENGTH, probe_index=lambda path: True) as rig:
        found["lost"] = len(surely - rig.held)
        stored = rig.put(MORE)
        found["unusable"] = int(stored != [None] * len(MORE) or not rig.flush())
    return found


def main() -> None:
    """Look until standard input ends."""
    for line in sys.stdin:
        place, _, acked = line.rpartition(" ")
        print(json.dumps(look(Path(place), int(acked))), flush=True)  # noqa: T201  # its purpose


if __name__ == "__main__":
    main()
