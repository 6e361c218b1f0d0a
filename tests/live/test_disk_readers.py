"""The durable index when its map is full, and when other processes read it.

Nobody but the owner opens it in normal operation. A tool that does keeps every page that was freed
since from being used again: alive, it may cost the tier for as long; killed, nothing.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import disk_health, opening
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.disk_health import LOOK_S
from ebbtide.tiers.index import DurableIndex
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
LENGTH = 100
SLOTS = 1024
AT_ONCE = 8
ROUNDS = 150  # commits: more than a map of 256 pages takes while nothing is given back
READERS = 140  # more than LMDB's table of readers has places
BACK_S = disk_health.RETRY_MAX_S + 2 * LOOK_S
READER = Path(__file__).parent / "programs" / "index_reader.py"


class Rig:
    """A store, the keys that it said were durable, and the processes that read its index."""

    def __init__(self, place: Path, on_end: ExitStack) -> None:
        self.index_path = place / "index"
        self._on_end = on_end
        self.sim = on_end.enter_context(
            SimStore(
                3,
                16 * PAGE,
                disk_path=str(place),
                slab_bytes=SLOTS * PAGE,
                bounds=Bounds.for_capacity(16 * PAGE, write_after_s=0.0),
                reopens=True,
            )
        )
        self.durable: list[bytes] = []
        self.number = 0

    @property
    def down(self) -> str | None:
        assert self.sim.store.disk is not None
        return self.sim.store.disk.down

    @property
    def readers(self) -> str:
        """What LMDB lists: a line per transaction."""
        assert self.sim.store.disk is not None
        index = self.sim.store.disk._committer._index
        assert isinstance(index, DurableIndex)
        return str(index._env.readers())

    def put(self, rounds: int) -> None:
        """Commit so many times, or until the tier is down."""
        for _ in range(rounds):
            keys = [key_of(self.number + n) for n in range(AT_ONCE)]
            self.number += AT_ONCE
            assert self.sim.put(self.sim.namespace(), keys, LENGTH) == bytes(AT_ONCE)
            self.sim.runtime.pass_time(0.2)
            if self.down:
                return
            assert self.sim.flush()
            self.durable += keys
            assert self.index_bytes <= self.map_bytes

    @property
    def index_bytes(self) -> int:
        return (self.index_path / "data.mdb").stat().st_size

    @property
    def map_bytes(self) -> int:
        assert self.sim.open_disk is not None
        return self.sim.open_disk.directory.geometry.index_bytes

    def check_durable(self) -> None:
        """The latest of what was committed is there: the disk holds SLOTS, and evicts ahead."""
        space, latest = self.sim.namespace(), self.durable[-SLOTS // 2 :]
        found = self.sim.get(space, latest)
        assert found == [self.sim.content(space, key, LENGTH) for key in latest]

    def check_down(self, reason: str) -> None:
        """Visibly, and memory works on."""
        assert reason in (self.down or "")
        assert reason in str(self.sim.store.stats()["disk"])
        space, key = self.sim.namespace(), key_of(10**6)
        assert self.sim.get(space, self.durable[:1]) == [Miss.IO_ERROR]
        assert self.sim.put(space, [key], LENGTH) == bytes(1)
        assert self.sim.get(space, [key]) == [self.sim.content(space, key, LENGTH)]

    def reader(self, verb: str, *more: str) -> subprocess.Popen[str]:
        """A process that has begun to read, or has done what it should."""
        command = [sys.executable, str(READER), verb, str(self.index_path), *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._on_end.callback(self.kill, process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        """With SIGKILL: it gives nothing back."""
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as on_end:
        yield Rig(tmp_path / "disk", on_end)


def test_p51_a_full_map_takes_the_tier_down_and_costs_nothing_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot run full by the bound on records; here it is far too small for them."""
    small = 24 * PAGE
    monkeypatch.setattr(
        opening, "DurableIndex", lambda path, _, each: DurableIndex(path, small, each)
    )
    with ExitStack() as on_end:
        rig = Rig(tmp_path / "disk", on_end)
        rig.put(ROUNDS)
        assert len(rig.durable) >= 10 * AT_ONCE
        rig.check_down("MDB_MAP_FULL")
        assert rig.index_bytes <= small
        monkeypatch.undo()
        rig.sim.runtime.pass_time(BACK_S)
        assert rig.down is None
        rig.check_durable()
        assert rig.sim.drain()
        rig.sim.lose_power()
        rig.check_durable()


def test_p54_a_long_reader_may_cost_the_tier_as_long_as_it_lives(rig: Rig) -> None:
    rig.put(10)
    reader = rig.reader("hold")
    rig.put(ROUNDS)
    rig.check_down("MDB_MAP_FULL")
    rig.sim.runtime.pass_time(BACK_S)
    assert rig.down
    assert rig.index_bytes <= rig.map_bytes
    rig.kill(reader)
    rig.sim.runtime.pass_time(BACK_S)
    assert rig.down is None
    rig.check_durable()
    rig.put(ROUNDS)
    assert rig.down is None
    rig.check_durable()


def test_p54_a_reader_that_was_killed_costs_nothing(rig: Rig) -> None:
    rig.put(10)
    rig.kill(rig.reader("hold"))
    rig.put(ROUNDS)
    assert rig.down is None
    rig.check_durable()


def test_p54_many_readers_that_were_killed_leave_the_table_to_others(rig: Rig) -> None:
    rig.put(2)
    rig.reader("die", str(READERS))
    rig.put(2)
    assert rig.down is None
    assert "no active readers" in rig.readers
    rig.reader("hold")
    rig.check_durable()


def test_p54_an_opening_clears_the_readers_that_were_killed(rig: Rig) -> None:
    rig.put(2)
    rig.reader("hold")  # or the first opener would find the table empty anyway
    rig.kill(rig.reader("hold"))
    assert rig.readers.count("\n") == 3  # a heading, and one line for each
    rig.sim.restart(clean=False)
    assert rig.readers.count("\n") == 2
    rig.check_durable()
