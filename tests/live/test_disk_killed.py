"""A store that is killed while it writes to its disk, again and again.

The checker keeps its own list of what the store said was durable, and looks at the files itself:
it compares every byte that the index names with what was stored under that key, and asks no digest.

`EBBTIDE_TEST_DISK_KILLS=500` kills that often, `EBBTIDE_TEST_DISK_SEED` sets when.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.disk_rig import raw_entries
from tests.live.programs.engine import RECORD_BYTES, key_of, payload_of

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.conftest import Engine, House

KILLS = int(os.environ.get("EBBTIDE_TEST_DISK_KILLS", "40"))
SEED = int(os.environ.get("EBBTIDE_TEST_DISK_SEED", "1"))
BATCH = 16  # records, 2 MiB
LIFE_S = (0.02, 0.35)  # of a store, once it has work
DISK = {"capacity": "32MiB", "write_after": "0s", "commit_interval": "5ms"}
SURELY_KEPT = 150  # of the latest durable records: the disk holds some 230
WORK_LEAST = 1.5  # times the disk's records were stored, or nothing was overwritten


class Deadline(Exception):
    """The store's time has come."""


class Life:
    """One store from its start to its kill, and an engine that works for it."""

    def __init__(self, house: House, until_s: float) -> None:
        self._engine = house.engine()
        self._client = SocketClient(house.socket, os.urandom(16), "tool", arena=False)
        self._until = time.monotonic() + until_s

    def close(self) -> None:
        self._client.close()
        self._engine.end()

    def store(self, first: int) -> None:
        """Store a batch and wait until it is durable. Raises Deadline."""
        self._engine.send(f"put {first} {BATCH}")
        assert self._answer(self._engine) == str(BATCH)
        while self._memory()["dirty_bytes"]:
            self._look()
        answer = ask(self._client, wire.Flush())
        assert isinstance(answer, wire.Ok)

    def _memory(self) -> dict[str, int]:
        answer = ask(self._client, wire.Stats())
        assert isinstance(answer, wire.Report)
        found: dict[str, int] = answer.report["memory"]
        return found

    def _look(self) -> None:
        if time.monotonic() > self._until:
            raise Deadline

    def _answer(self, engine: Engine) -> str:
        assert engine.process.stdout is not None
        left_s = max(0.0, self._until - time.monotonic())
        if not select.select([engine.process.stdout], [], [], left_s)[0]:
            raise Deadline
        return engine.answer()


def wrong_and_held(place: Path) -> tuple[int, set[bytes]]:
    """Entries whose bytes are not those of their key, and all keys."""
    held: set[bytes] = set()
    wrong = 0
    with open(place / "slab", "rb", buffering=0) as slab:
        for key, offset, length in raw_entries(place):
            held.add(key)
            wrong += length != RECORD_BYTES or os.pread(
                slab.fileno(), length, offset
            ) != payload_of(key)
    return wrong, held


@pytest.mark.timeout(3600)  # kills take a second and a half each, and more in the long form
def test_p57_a_store_killed_at_any_moment_keeps_what_was_durable_and_names_no_wrong_byte(
    house: House,
) -> None:
    draw, place = Random(SEED), house.directory / "disk"
    durable: list[bytes] = []
    number = checked = 0
    for _ in range(KILLS):
        store = house.start(disk={"path": str(place), **DISK})
        with closing(Life(house, draw.uniform(*LIFE_S))) as life:
            try:
                while True:
                    first, number = number, number + BATCH
                    life.store(first)
                    durable += [key_of(n) for n in range(first, first + BATCH)]
            except Deadline:
                store.kill()
                store.wait()
        wrong, held = wrong_and_held(place)
        assert wrong == 0
        assert set(durable[-SURELY_KEPT:]) <= held
        checked += len(held)
    print(f"{KILLS} kills, {len(durable)} records durable, {checked} entries checked, 0 wrong")  # noqa: T201  # shown with -s
    assert "starts empty" not in house.log_text()
    assert len(durable) > WORK_LEAST * SURELY_KEPT
