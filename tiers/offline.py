"""A disk directory's index without a store, for commands: under the directory's own lock."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import lmdb

from ebbtide.errors import ConfigError
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.index import DurableIndex
from ebbtide.tiers.index_probe import index_is_sound
from ebbtide.tiers.survey import Held, describe

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def open_offline(path: str) -> Iterator[tuple[Directory, DurableIndex]]:
    """The directory and its index; closed in order. Blocks while a child process reads the index.

    Raises ConfigError for what is no directory of ours, is in use, or cannot be read.
    """
    with closing(Directory.existing(path)) as directory:
        if not index_is_sound(directory.index_path):
            raise _unreadable(path)
        try:
            geometry = directory.geometry
            index = DurableIndex(directory.index_path, geometry.index_bytes, geometry.segment_bytes)
            with closing(index):
                yield directory, index
            directory.say_goodbye()
        except lmdb.Error as error:
            raise _unreadable(path) from error


def survey_directory(path: str) -> dict[str, Any]:
    """What the namespaces of a directory hold: what a running store reports, as far as an index
    knows it. Seconds for a million records. Raises as `open_offline`.
    """
    with open_offline(path) as (directory, index):
        geometry, namespaces = directory.geometry, index.namespaces()
        held: dict[int, Held] = {}
        used_bytes = 0
        for entry in index.entries():
            one = held.setdefault(entry.epoch, Held())
            one.add(1, entry.length, entry.minute, entry.minute)
            used_bytes += geometry.slot_bytes(entry.length)
    wall_s = time.time()
    return {
        "namespaces": [
            {
                "digest": one.digest,
                "fields": describe(one.descriptor),
                **held.get(one.epoch, Held()).as_fields(wall_s),
            }
            for one in sorted(namespaces, key=lambda stored: stored.digest)
        ],
        "store": {
            "disk": {
                "capacity_bytes": geometry.slab_bytes,
                "used_bytes": used_bytes,
                "payload_bytes": sum(one.payload_bytes for one in held.values()),
                "records": sum(one.records for one in held.values()),
            }
        },
    }


def _unreadable(path: str) -> ConfigError:
    return ConfigError(
        "The index cannot be read",
        next_step="A store would start empty on this directory; `ebbtide fsck --repair` does.",
        path=path,
    )
