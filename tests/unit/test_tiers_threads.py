"""The store on real threads, real files and real time; and killed in the middle of it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import RecordingSink, descriptor, disk_bytes_for, keyed_bytes
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.runtime import ThreadRuntime
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ebbtide.tiers.namespace import Namespace

MIB = 1 << 20
LENGTHS = (10_496, 18_432, 41_984)
COUNT = 200


class Live:
    """A store on threads, driven to the end of each verb."""

    def __init__(self, path: str) -> None:
        self.runtime = ThreadRuntime()
        self.disk = OpenDisk(self.runtime, path, disk_bytes_for(15 * MIB))
        bounds = Bounds.for_capacity(8 * MIB, write_after_s=0.0)
        self.store = Store(
            self.runtime,
            Arena.create(8 * MIB),
            self.disk.tier,
            bounds,
            stored_namespaces=self.disk.namespaces,
        )
        self.space = self.store.open_namespace(descriptor().pairs())

    def finish(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.runtime.wait(0.05)
            self.runtime.run_ready()

    def put(self, number: int) -> None:
        key, length = key_of(number), LENGTHS[number % len(LENGTHS)]
        replies: list[bytes] = []
        while True:
            grants, _ = self.store.reserve(b"e", self.space, [key], length)
            if grants:
                break
            self.runtime.wait(0.05)
            self.runtime.run_ready()
        if grants[0].sequence:
            view = self.store.arena.view(grants[0].offset, length)
            view[:] = payload(self.space, number)
            self.store.commit(b"e", [grants[0].sequence], replies.append)
            self.finish(lambda: bool(replies))
            assert replies == [bytes(1)]

    def right(self, numbers: list[int]) -> set[int]:
        """Load records; the numbers of those that came. Wrong bytes fail."""
        sink = RecordingSink(len(numbers))
        load = self.store.load(b"e", self.space, [key_of(n) for n in numbers], sink)
        while not sink.is_over:
            self.finish(lambda: bool(sink.open_batches) or sink.is_over)
            for batch in list(sink.open_batches):
                for granted in sink.acked(batch):
                    view = self.store.arena.view(granted.offset, granted.length)
                    assert view == payload(self.space, numbers[granted.position])
                load.ack(batch)
        return {numbers[position] for position in sink.granted}

    def drain(self) -> bool:
        answers: list[bool] = []
        self.store.drain(60.0, answers.append)
        self.finish(lambda: bool(answers))
        return answers[0]

    def close(self, clean: bool) -> None:
        self.runtime.close()
        self.store.close(clean)
        self.disk.close()


def payload(space: Namespace, number: int) -> bytes:
    return keyed_bytes(space.digest + key_of(number), LENGTHS[number % len(LENGTHS)])


@contextmanager
def live(path: Path, *, clean: bool = True) -> Iterator[Live]:
    made = Live(str(path))
    try:
        yield made
    finally:
        made.close(clean=clean and made.drain())
    assert made.runtime.faults == 0


def test_what_was_stored_is_right_before_and_after_a_restart(tmp_path: Path) -> None:
    numbers = list(range(COUNT))
    with live(tmp_path / "d") as store:
        for number in numbers:
            store.put(number)
        assert store.right(numbers) == set(numbers)
    with live(tmp_path / "d") as store:
        assert store.disk.was_clean
        assert store.disk.dropped == 0
        assert store.right(numbers[::-1]) == set(numbers)
        store.store.check_integrity()


def test_p36_many_loads_and_stores_at_once_are_right_or_missed(tmp_path: Path) -> None:
    with live(tmp_path / "d") as store:
        draw = random.Random(1)
        for _ in range(60):
            for number in draw.sample(range(2 * COUNT), 8):
                store.put(number)
            assert store.right(draw.sample(range(2 * COUNT), 12)) is not None
        store.store.check_integrity()


CHILD = """
import sys
sys.path.append(sys.argv[3])
from tests.unit.test_tiers_threads import Live
store = Live(sys.argv[1])
print("open", flush=True)
for number in range(int(sys.argv[2]), 100_000):
    store.put(number)
    if number % 10 == 9:
        assert store.drain()
        print(number + 1, flush=True)
"""


@pytest.mark.live
def test_p57_a_killed_store_keeps_what_it_said_was_durable(tmp_path: Path) -> None:
    """SIGKILL at a random moment, three times over one directory."""
    repository, durable, draw = Path(__file__).resolve().parents[2], 0, random.Random(2)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(tmp_path / "d"), str(durable), str(repository)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            for _ in range(3):
                durable = int(child.stdout.readline())
            time.sleep(draw.random() * 0.05)
            child.send_signal(signal.SIGKILL)
            rest = [line for line in child.stdout.read().splitlines() if line.isdigit()]
            durable = int(rest[-1]) if rest else durable
        with live(tmp_path / "d", clean=False) as store:
            assert not store.disk.was_clean
            recent = list(range(max(0, durable - 100), durable))
            assert store.right(recent) == set(recent)
