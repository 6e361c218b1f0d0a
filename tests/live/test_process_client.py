"""A client whose store is killed and comes back: misses meanwhile, never an error, never a wait."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion, SocketClient, ask
from ebbtide.connectors.client_interface import LOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.live.conftest import House

pytestmark = pytest.mark.live

BLOCKED_S_MAX = 0.05


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Stopwatch:
    """A client whose calls are timed: the slowest one that waited for anything counts.

    A call that never gave up the processor of its own will was only interrupted by a busy machine.
    """

    def __init__(self, client: SocketClient) -> None:
        self.client = client
        self.slowest_s = 0.0

    def _timed(self, call: Callable[[], object]) -> None:
        waits, begun = _waits(), time.monotonic()
        call()
        elapsed_s = time.monotonic() - begun
        if _waits() > waits:
            self.slowest_s = max(self.slowest_s, elapsed_s)

    def poll(self) -> list[Completion]:
        found: list[Completion] = []
        self._timed(lambda: found.extend(self.client.poll()))
        return found

    def submit(self, message: wire.Message) -> int:
        tickets: list[int] = []
        self._timed(lambda: tickets.append(self.client.submit(message)))
        return tickets[0]

    def notify(self, message: wire.Message) -> None:
        self._timed(lambda: self.client.notify(message))

    def poll_until(self, condition: Callable[[], bool]) -> list[Completion]:
        found: list[Completion] = []
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            found += self.poll()
            time.sleep(0.001)
        return found


def _mapped_arenas() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "memfd:ebbtide-arena" in line})


def test_p76_a_killed_store_is_a_miss_and_its_successor_is_found(house: House) -> None:
    store = house.start()
    before = _mapped_arenas()
    client = house.client(arena=True)
    watch = Stopwatch(client)
    old_arena, old_generation = client.arena, client.arena_generation
    assert old_arena is not None
    # Stopped first, so that the requests are open when it is killed.
    store.send_signal(signal.SIGSTOP)
    tickets = [watch.submit(wire.Lookup(0, (bytes(36),))) for _ in range(50)]
    store.kill()
    store.wait(PATIENCE_S)
    found = watch.poll_until(lambda: not client.connected)
    assert found == [Completion(ticket, LOST, True) for ticket in tickets]
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        ticket = watch.submit(wire.Stats())
        watch.notify(wire.Touch(0, (bytes(36),)))
        assert watch.poll() == [Completion(ticket, LOST, True)]
    house.start()
    begun = time.monotonic()
    watch.poll_until(lambda: client.connected)
    assert time.monotonic() - begun < 2.0
    assert client.incarnation == 2
    assert client.arena_generation != old_generation
    assert client.arena is not old_arena
    assert old_arena.fd == -1
    assert _mapped_arenas() == before + 1
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    assert watch.slowest_s < BLOCKED_S_MAX


def test_a_stopped_store_stops_no_client(house: House) -> None:
    store = house.start()
    client = house.client(arena=True)
    watch = Stopwatch(client)
    store.send_signal(signal.SIGSTOP)
    keys = tuple(number.to_bytes(36, "big") for number in range(2048))
    tickets = [watch.submit(wire.Lookup(0, keys)) for _ in range(200)]  # 15 MB
    watch.notify(wire.Touch(0, keys))
    crowded = watch.poll()
    assert crowded
    assert all(completion.final for completion in crowded)
    store.send_signal(signal.SIGCONT)
    answered = len(crowded)

    def all_answered() -> bool:
        return answered == len(tickets)

    deadline = time.monotonic() + PATIENCE_S
    while not all_answered():
        assert time.monotonic() < deadline
        client.wait(0.01)
        answered += len(watch.poll())
    assert watch.slowest_s < BLOCKED_S_MAX


def test_p76_two_halves_of_one_engine_find_the_successor_both(house: House) -> None:
    store = house.start()
    engine = os.urandom(16)
    control, data = house.client(engine), house.client(engine, arena=True)
    assert control.arena_generation == data.arena_generation
    store.kill()
    store.wait(PATIENCE_S)
    house.start()
    for client in (control, data):
        Stopwatch(client).poll_until(lambda client=client: client.incarnation == 2)  # type: ignore[misc]
    assert control.arena_generation == data.arena_generation
    opened = ask(control, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    grants = ask(control, wire.Reserve(opened.namespace, 4096, (bytes(36),)))
    assert isinstance(grants, wire.Grants)
    ((_, sequence),) = grants.grants
    assert ask(data, wire.Commit((sequence,))) == wire.Settled(b"\0")


def test_sequences_of_a_dead_store_mean_nothing_to_its_successor(house: House) -> None:
    store = house.start()
    client = house.client(arena=True)
    opened = ask(client, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    grants = ask(client, wire.Reserve(opened.namespace, 4096, (bytes(36),)))
    assert isinstance(grants, wire.Grants)
    store.kill()
    store.wait(PATIENCE_S)
    house.start()
    Stopwatch(client).poll_until(lambda: client.incarnation == 2)
    settled = ask(client, wire.Commit(tuple(sequence for _, sequence in grants.grants)))
    assert isinstance(settled, wire.Settled)
    assert settled.codes != b"\0"
    failure = client.submit(wire.Lookup(opened.namespace, (bytes(36),)))
    client.wait(5.0)
    ((ticket, message, _),) = client.poll()
    assert ticket == failure
    assert isinstance(message, wire.Failure)
    assert "new connection" in message.next_step


def test_p56_a_forked_child_has_nothing_of_its_parents_client(house: House) -> None:
    """It meets a closed client, and the parent's goes on."""
    house.start()
    client = house.client(arena=True)
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    child = os.fork()
    if child == 0:
        try:
            client.submit(wire.Stats())
            (completion,) = client.poll()
            client.notify(wire.Touch(0, (bytes(36),)))
            alone = completion.message is LOST and client.arena is None
            os._exit(0 if alone and not client.connected else 1)
        finally:  # whatever fails here: the child must not go on as the parent's tests
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    assert client.incarnation == 1
    assert client.arena is not None


# Forks first, so that each child has a client, connections and an arena of its own.
MANY_CHILDREN = """
import os, sys
from ebbtide import Client
children = []
for number in range(16):
    child = os.fork()
    if not child:
        name = number.to_bytes(32, "big")
        for _ in range(50):
            with Client(sys.argv[1]) as client:
                space = client.namespace(model="m")
                right = space.get(name) == name * 9 or (space.put(name, name * 9) and None)
        os._exit(0 if right else 1)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] for child in children))
"""


def test_p56_many_processes_that_open_and_close_all_the_time_are_served(house: House) -> None:
    """Nobody but the store has its files open."""
    store = house.start(disk=True)
    command = [sys.executable, "-P", "-c", MANY_CHILDREN, house.socket]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert store.poll() is None
    opened = ask(house.client(), wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    assert opened.records == 16
