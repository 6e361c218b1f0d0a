"""A store in this process, of a size or of an exact number of records, and a client of it.

It is opened as `ebbtide serve` opens its store, and spoken to with the messages of the protocol;
only the socket is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ebbtide.config import check_fits, check_record_fits, load_config
from ebbtide.connectors.local_client import LocalClient
from ebbtide.errors import ConfigError
from ebbtide.sizes import exact_size, parse_size, round_up
from ebbtide.tiers.directory import Geometry
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import ThreadRuntime
from ebbtide.tiers.segments import (
    ALIGNMENT_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    SegmentSpace,
)

if TYPE_CHECKING:
    from ebbtide.config import Config

DRAIN_S = 60.0  # for a directory that is kept
SPARE_SLOTS = 1.25  # slots over an exact number of disk records, so that the number is the bound

_RECORDS = re.compile(r"\s*([0-9]{1,12})\s*records\s*", re.ASCII)


class Capacity(NamedTuple):
    """A size of a tier: bytes, or an exact number of records. The other one is None."""

    size_bytes: int | None
    records: int | None


def parse_capacity(text: str) -> Capacity:
    """`8GiB` or `3655records`. Raises ConfigError."""
    counted = _RECORDS.fullmatch(text)
    if counted is None:
        return Capacity(parse_size(text), None)
    if int(counted[1]) < 1:
        raise ConfigError("A tier holds at least one record", next_step="Raise the number.")
    return Capacity(None, int(counted[1]))


def arena_bytes_for(records: int, record_bytes: int) -> int:
    """The arena that holds exactly `records` records of that length, and no more.

    Raises ConfigError where segments of whole slots do not add up to that number: a record size
    of a power of two always has one, if it fits into the segments of so small an arena.
    """
    stride = round_up(record_bytes, ALIGNMENT_BYTES)
    sizes = [records * stride]  # one segment of exactly that size, where it is small enough
    segment = SEGMENT_BYTES_MIN
    while segment <= SEGMENT_BYTES_MAX:
        if segment >= stride:
            whole, rest = divmod(records, segment // stride)
            sizes.append(whole * segment + rest * stride)
        segment *= 2
    for size in sizes:
        space: SegmentSpace[Any] = SegmentSpace(size)
        if space.largest_bytes >= stride and space.slots_for(record_bytes) == records:
            return size
    raise ConfigError(
        f"No arena holds exactly {records} records of {record_bytes} bytes",
        next_step="Give a size, more records, or a record size that is a power of two.",
    )


def disk_bytes_for(records: int, record_bytes: int) -> int:
    """A disk capacity in which the number of records, not the bytes, is the bound.

    Raises ConfigError for a record that no segment holds.
    """
    stride = round_up(record_bytes, ALIGNMENT_BYTES)
    if stride > SEGMENT_BYTES_MAX:
        raise ConfigError(
            "A record does not fit into a segment of the disk tier",
            next_step="Lower the record size.",
            record_bytes=record_bytes,
            segment_bytes=SEGMENT_BYTES_MAX,
        )
    wanted = int(records * SPARE_SLOTS) + 1
    size = max(16 << 20, wanted * stride)
    while True:
        plan = Geometry.plan(size)
        space: SegmentSpace[Any] = SegmentSpace(plan.slab_bytes, segment_bytes=plan.segment_bytes)
        if (
            plan.records_max >= wanted
            and space.largest_bytes >= stride
            and space.slots_for(record_bytes) >= wanted
        ):
            return size
        size = round_up(size + size // 8, ALIGNMENT_BYTES)


class Rig:
    """A running store with a client. `close` ends its threads and removes what it made.

    `directory` None: the disk tier lies in a temporary directory. A directory that is named is
    kept and drained at the end, so that the next store finds its records.
    """

    def __init__(
        self,
        memory: Capacity,
        disk: Capacity | None,
        record_bytes: int,
        *,
        directory: str | None = None,
        verify_memory: bool = True,
    ) -> None:
        """Raises ConfigError for what this machine or the record size do not allow."""
        self._temporary: str | None = None
        if disk is not None and directory is None:
            directory = self._temporary = tempfile.mkdtemp(prefix="ebbtide-replay-")
        self.runtime = ThreadRuntime()
        with ExitStack() as on_failure:
            on_failure.callback(self._remove_temporary)
            on_failure.callback(self.runtime.close)
            config = _configured(memory, disk, record_bytes, directory, verify_memory)
            check_fits(config)
            check_record_fits(config, record_bytes)
            self._opened = OpenStore(
                config, self.runtime, disk_records_max=disk.records if disk else None
            )
            on_failure.pop_all()
        self.store = self._opened.store
        self.client = LocalClient(self.store, self.runtime)
        self.record_bytes = record_bytes

    def records_max(self) -> dict[str, int]:
        """How many records of the rig's length each tier holds; 0 for a disk that is absent."""
        disk = self.store.disk
        on_disk = 0
        if disk is not None:
            on_disk = min(disk.records_max, disk.space.slots_for(self.record_bytes))
        return {
            "memory": self.store.memory.space.slots_for(self.record_bytes),
            "disk": on_disk,
        }

    def close(self) -> None:
        """Blocks: up to 60 s for a directory that is kept, while memory is written to it."""
        clean = False
        if self.store.disk is not None and self._temporary is None:
            clean = self._drain()
        self.client.close()
        self.runtime.close()  # before the files: threads may still write to them
        self._opened.close(clean)
        self._remove_temporary()

    def _drain(self) -> bool:
        outcome: list[bool] = []
        self.store.drain(DRAIN_S, outcome.append)
        deadline = time.monotonic() + DRAIN_S + 1.0
        while not outcome and time.monotonic() < deadline:
            self.client.poll()
            self.client.wait(0.05)
        return outcome == [True]

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _configured(
    memory: Capacity,
    disk: Capacity | None,
    record_bytes: int,
    directory: str | None,
    verify_memory: bool,
) -> Config:
    memory_bytes = memory.size_bytes or arena_bytes_for(memory.records or 0, record_bytes)
    settings: dict[str, dict[str, object]] = {
        "memory": {
            "capacity": exact_size(memory_bytes),
            "verify": "all" if verify_memory else "disk",
        }
    }
    if disk is not None and directory is not None:
        disk_bytes = disk.size_bytes or disk_bytes_for(disk.records or 0, record_bytes)
        settings["disk"] = {
            "path": os.path.abspath(directory),
            "capacity": exact_size(disk_bytes),
        }
    return load_config(settings, environ={}).config
