"""An engine whose store is killed, stopped or started again: slower at times, wrong never."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.controls import (
    NEW_TOKENS,
    TINY,
    Reference,
    answers,
    assert_request_adds_up,
    tokens,
)
from tests.live.conftest import PROGRAMS, eventually

from ebbtide.connectors import endpoint
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.scheduler import SchedulerBounds
from ebbtide.connectors.process import start_store
from ebbtide.connectors.reference import Engine
from ebbtide.connectors.reference.connect import attach_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.live.conftest import House

    from ebbtide.connectors.reference import RequestOutput

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("single_thread")]

KILLS = int(os.environ.get("EBBTIDE_TEST_KILLS", "5"))
HOOK_S_MAX = 0.05
STOPPED_S = 2.0
CROWDED_BLOCK = 32
PATIENCE_S = 30.0
SCHEDULER_HOOKS = (
    "on_new_request",
    "matched_tokens",
    "on_allocated",
    "build_step",
    "on_report",
    "request_finished",
    "has_pending_work",
)
WORKER_HOOKS = ("start_step", "finish_step")
_log = logging.getLogger("tests.live")


class Attached:
    """An engine in this process on a store in another, and how long its hooks take."""

    def __init__(self, house: House, *, memory: str, block_size: int = 16) -> None:
        self.house = house
        self.settings: dict[str, Any] = {
            "socket": house.socket,
            "memory": {"capacity": memory},
            "disk": {
                "path": str(house.directory / "disk"),
                "capacity": "16MiB",
                "write_after": "0s",
            },
        }
        self.store = self.start()
        self.engine = Engine(TINY, 2048 // block_size, block_size=block_size)
        bounds = SchedulerBounds(lookup_timeout_s=0.05)
        self.halves = attach_socket(self.engine, house.socket, bounds=bounds, load_timeout_s=0.3)
        self.longest: dict[str, float] = {}  # seconds that a hook waited, by name
        for half, hooks in (
            (self.halves.scheduler, SCHEDULER_HOOKS),
            (self.halves.worker, WORKER_HOOKS),
        ):
            for name in hooks:
                setattr(half, name, self._timed(name, getattr(half, name)))

    def start(self) -> subprocess.Popen[bytes]:
        """A failed start fails the test."""
        return self.house.adopt(start_store(self.settings, private=False, log_path=self.log))

    def start_version(self, major: int, minor: int) -> subprocess.Popen[bytes]:
        """A store that speaks another protocol, when somebody listens there."""
        program = [sys.executable, "-P", str(PROGRAMS / "newer_store.py"), str(major), str(minor)]
        with open(self.log, "ab") as log:
            store = subprocess.Popen([*program, "--extra", json.dumps(self.settings)], stderr=log)
        eventually(lambda: endpoint.answers(self.house.socket))
        return self.house.adopt(store)

    @property
    def log(self) -> str:
        return str(self.house.log)

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            gave_up_core = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            started = time.monotonic()
            try:
                return hook(*args, **kwargs)
            finally:
                seconds = time.monotonic() - started
                # On a busy machine a thread loses its core; only one that waits gives it up.
                if resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > gave_up_core:
                    self.longest[name] = max(self.longest.get(name, 0.0), seconds)

        return timed

    def ask(self, prompts: Sequence[list[int]]) -> list[RequestOutput]:
        """Together; within bounds."""
        for number, prompt in enumerate(prompts):
            self.engine.add_request(str(number), prompt, NEW_TOKENS)
        outputs: dict[int, RequestOutput] = {}
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.has_unfinished():
            assert time.monotonic() < deadline, "the engine hangs"
            outputs.update((int(output.request_id), output) for output in self.engine.step())
            if self.engine.last_step_tokens == 0:
                time.sleep(0.001)
        return [outputs[number] for number in range(len(prompts))]

    def until_reached(self) -> None:
        """Steps until both halves have found the store."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.halves.scheduler.ready and self.halves.worker.ready):
            assert time.monotonic() < deadline, "the store is not found again"
            self.engine.step()
            time.sleep(0.005)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def attached(house: House) -> Iterator[Attached]:
    found = Attached(house, memory="2MiB")
    yield found
    found.close()


@pytest.fixture
def crowded(house: House) -> Iterator[Attached]:
    """Memory holds one prompt in twenty, the disk three in four: its slots are its bound."""
    found = Attached(house, memory="1MiB", block_size=CROWDED_BLOCK)
    yield found
    found.close()


def restored(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.sources.memory + output.sources.disk for output in outputs)


def test_p76_a_killed_store_costs_hits_and_a_new_one_is_used_again(
    attached: Attached, reference: Reference
) -> None:
    prompts = [tokens(300, seed=number) for number in range(10)]
    right = reference.answers(prompts)
    assert answers(attached.ask(prompts)) == right
    assert attached.engine.drain()
    assert restored(attached.ask(prompts[:3])) > 0
    time.sleep(0.3)  # what has been written is committed
    for number in range(10):  # killed in the middle of a request
        attached.engine.add_request(f"m{number}", prompts[number], NEW_TOKENS)
    attached.engine.step()
    attached.store.kill()
    attached.store.wait()
    outputs = {output.request_id: output for output in attached.engine.run()}
    assert [outputs[f"m{number}"].token_ids for number in range(10)] == right
    alone = attached.ask(prompts)
    assert answers(alone) == right
    assert restored(alone) == 0
    missed = [reason for output in alone for reason in output.misses]
    assert "unknown" in missed
    assert attached.engine.drain(5.0)  # nothing is waited for that cannot come
    assert attached.engine.pool.num_free_blocks == len(attached.engine.pool.blocks) - 1
    attached.start()
    attached.until_reached()
    again = attached.ask(prompts)
    assert answers(again) == right
    assert sum(output.sources.disk for output in again) > 0
    assert attached.halves.scheduler.faults.count == attached.halves.worker.faults.count == 0


def test_p76_an_upgraded_store_is_used_again_and_another_protocol_costs_hits_alone(
    attached: Attached, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed, and followed by a minor version, a major version, and the old one."""
    prompts = [tokens(300, seed=number) for number in range(10)]
    right = reference.answers(prompts)
    assert answers(attached.ask(prompts)) == right
    assert attached.engine.drain()
    time.sleep(0.3)  # what has been written is committed
    major, minor = wire.VERSION
    for version, is_used in (((major, minor + 1), True), ((major + 1, 0), False)):
        attached.store.kill()
        attached.store.wait()
        assert answers(attached.ask(prompts)) == right
        attached.store = attached.start_version(*version)
        if is_used:
            attached.until_reached()
        outputs = attached.ask(prompts)
        assert answers(outputs) == right
        assert bool(restored(outputs)) is is_used
        assert attached.halves.scheduler.ready is is_used
    assert "The client speaks another protocol" in caplog.text
    assert "Use the same ebbtide on both sides" in caplog.text
    assert max(attached.longest.values(), default=0.0) < HOOK_S_MAX, attached.longest
    attached.store.kill()
    attached.store.wait()
    attached.start()
    attached.until_reached()
    outputs = attached.ask(prompts)
    assert answers(outputs) == right
    assert restored(outputs) > 0
    assert attached.halves.scheduler.faults.count == attached.halves.worker.faults.count == 0


def test_an_engine_that_starts_before_its_store_computes_until_it_is_there(
    house: House, reference: Reference
) -> None:
    prompts = [tokens(300, seed=number) for number in range(4)]
    right = reference.answers(prompts)
    engine = Engine(TINY, 128)
    scheduler, worker = attach_socket(engine, house.socket, required=False)
    try:
        assert answers(engine.generate(prompts, NEW_TOKENS)) == right
        house.start()
        deadline = time.monotonic() + PATIENCE_S
        while not (scheduler.ready and worker.ready):
            assert time.monotonic() < deadline
            engine.step()
        for source in ("computed", "memory"):
            assert engine.reset_prefix_cache()
            outputs = engine.generate(prompts, NEW_TOKENS)
            assert engine.drain()
            assert answers(outputs) == right
            assert min(getattr(output.sources, source) for output in outputs) > 250
        assert scheduler.faults.count == worker.faults.count == 0
    finally:
        engine.close()


def test_no_hook_waits_for_a_store_that_is_stopped(
    attached: Attached, reference: Reference
) -> None:
    prompts = [tokens(300, seed=number) for number in range(12)]
    right = reference.answers(prompts)
    assert answers(attached.ask(prompts)) == right
    assert attached.engine.drain()
    attached.longest.clear()
    for number in range(4):  # stopped in the middle of a request
        attached.engine.add_request(f"m{number}", prompts[number], NEW_TOKENS)
    attached.engine.step()
    attached.store.send_signal(signal.SIGSTOP)
    woken = threading.Timer(STOPPED_S, attached.store.send_signal, (signal.SIGCONT,))
    woken.start()
    started = time.monotonic()
    outputs = {output.request_id: output for output in attached.engine.run()}
    assert [outputs[f"m{number}"].token_ids for number in range(4)] == right[:4]
    asked: list[RequestOutput] = []
    while time.monotonic() - started < STOPPED_S - 0.2:
        first = len(asked) % 12
        asked += attached.ask(prompts[first : first + 2])
        assert answers(asked[-2:]) == right[first : first + 2]
    assert {"timeout"} <= {reason for output in asked for reason in output.misses}
    woken.join()
    assert attached.engine.drain()
    found = 0
    while not found:  # a store that was stopped may be behind with its answers for a while
        again = attached.ask(prompts)
        assert answers(again) == right
        found = restored(again)
    assert max(attached.longest.values(), default=0.0) < HOOK_S_MAX, attached.longest
    assert attached.halves.scheduler.faults.count == attached.halves.worker.faults.count == 0


@pytest.mark.timeout(60 + 10 * KILLS)
def test_a_store_killed_while_it_writes_starts_again_and_never_gives_a_wrong_token(
    crowded: Attached, reference: Reference
) -> None:
    """The same directory lives through all kills; every answer is compared.

    The disk is full from the start: it evicts, frees and reuses slots all the time.
    """
    prompts = [tokens(470, seed=number) for number in range(85)]
    right = reference.answers(prompts)
    assert answers(crowded.ask(prompts)) == right
    slab = next((crowded.house.directory / "disk").glob("*slab*"))
    totals = {"requests": 0, "disk tokens": 0, "memory tokens": 0, "reached": 0}
    for kill in range(KILLS):
        draw = Random(kill)
        killer = threading.Thread(target=kill_in_a_write, args=(crowded.store, slab, kill))
        killer.start()
        while crowded.store.poll() is None:
            ask_some(crowded, draw, prompts, right, totals)
        killer.join()
        ask_some(crowded, draw, prompts, right, totals)
        crowded.store = crowded.start()
        ask_some(crowded, draw, prompts, right, totals)
        crowded.until_reached()
        totals["reached"] += 1
    for _ in range(5):
        ask_some(crowded, Random(KILLS), prompts, right, totals)
    _log.info("%d kills, no wrong token, no failed start: %s", KILLS, totals)
    assert totals["reached"] == KILLS
    assert totals["disk tokens"] > 100 * KILLS
    assert crowded.halves.scheduler.faults.count == crowded.halves.worker.faults.count == 0
    assert crowded.engine.drain()
    assert crowded.engine.pool.num_free_blocks == len(crowded.engine.pool.blocks) - 1


def kill_in_a_write(store: subprocess.Popen[bytes], slab: Path, seed: int) -> None:
    """After a while, and then within 50 ms of a write to the slab."""
    draw = Random(seed)
    time.sleep(draw.uniform(0.02, 0.4))
    before = slab.stat().st_mtime_ns
    deadline = time.monotonic() + PATIENCE_S
    while slab.stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.05))
    store.kill()


def ask_some(
    crowded: Attached,
    draw: Random,
    prompts: list[list[int]],
    right: list[tuple[int, ...]],
    totals: dict[str, int],
) -> None:
    """Three random conversations come back together."""
    numbers = draw.sample(range(len(prompts)), 3)
    outputs = crowded.ask([prompts[number] for number in numbers])
    assert answers(outputs) == [right[number] for number in numbers]
    totals["requests"] += len(outputs)
    totals["disk tokens"] += sum(output.sources.disk for output in outputs)
    totals["memory tokens"] += sum(output.sources.memory for output in outputs)
    for output in outputs:
        assert_request_adds_up(output, CROWDED_BLOCK)
