"""Engines that stop, die or vanish: a slot comes back when nobody can touch it, and not before."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S, eventually
from tests.live.programs.engine import key_of, payload_of

import ebbtide
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

RECORD_BYTES = 128 << 10
# How long a worker stays stopped in the middle of a store.
STOPPED_S = float(os.environ.get("EBBTIDE_TEST_STOPPED_S", "2"))


def _memory(client: SocketClient) -> dict[str, int]:
    report = ask(client, wire.Stats())
    assert isinstance(report, wire.Report)
    numbers: dict[str, int] = report.report["memory"]
    return numbers


def _reserved(client: SocketClient) -> int:
    return _memory(client)["reserved_bytes"] // RECORD_BYTES


# -- a worker that is stopped ---------------------------------------------------------------------


def test_a_worker_stopped_in_the_middle_of_a_store_spoils_no_record(house: House) -> None:
    """1. The sleeper reserves, writes half and is stopped. 2. The other engine fills the arena many
    times over. 3. The sleeper wakes, writes the rest and commits. 4. Every record is right.
    """
    house.start(disk=True)
    sleeper, other = house.engine(), house.engine()
    assert sleeper.do("reserve 0 20") == "20"
    assert sleeper.do("half") == "20"
    sleeper.signal(signal.SIGSTOP)
    until = time.monotonic() + STOPPED_S
    stored = 0
    while time.monotonic() < until:
        stored += int(other.do(f"put {1000 + stored} 40"))
    assert stored >= 80
    tool = house.client()
    assert _reserved(tool) == 20
    assert ask(tool, _lookup(tool, (0,))) == wire.States(b"\x04")  # pending
    sleeper.signal(signal.SIGCONT)
    assert sleeper.do("rest") == "20"
    assert sleeper.do("commit") == "00" * 20
    right, wrong, _ = map(int, other.do(f"load 1000 {stored}").split())
    assert wrong == 0
    assert right > 0
    assert other.do("load 0 20") == "20 0 0"
    assert _reserved(tool) == 0


def _lookup(client: SocketClient, numbers: tuple[int, ...]) -> wire.Lookup:
    opened = ask(client, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    return wire.Lookup(opened.namespace, tuple(map(key_of, numbers)))


def test_a_stopped_worker_keeps_its_slots_until_it_has_exited(shared: House) -> None:
    tool = shared.client()
    worker = shared.engine()
    worker.do("reserve 0 8")
    worker.signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert _reserved(tool) == 8
    worker.signal(signal.SIGKILL)
    eventually(lambda: _reserved(tool) == 0)


def test_a_closed_connection_frees_nothing_and_the_exit_does(shared: House) -> None:
    tool = shared.client()
    worker = shared.engine()
    worker.do("put 100 8")
    assert int(worker.do("hold 100 8")) > 0
    worker.do("reserve 0 8")
    assert worker.do("disconnect") == "gone"
    time.sleep(0.2)
    assert _reserved(tool) == 8
    assert _memory(tool)["pinned_bytes"] > 8 * RECORD_BYTES
    worker.end()
    eventually(lambda: _reserved(tool) == 0 and _memory(tool)["pinned_bytes"] == 0)


def test_the_exit_of_one_process_frees_nothing_while_its_engine_has_another(shared: House) -> None:
    tool = shared.client()
    engine = os.urandom(16)
    first, second = shared.engine(engine), shared.engine(engine)
    first.do("reserve 0 8")
    first.end()
    time.sleep(0.2)
    assert _reserved(tool) == 8
    second.end()
    eventually(lambda: _reserved(tool) == 0)


def test_the_exit_of_one_engine_frees_only_its_own(shared: House) -> None:
    tool = shared.client()
    first, second = shared.engine(), shared.engine()
    first.do("reserve 0 8")
    second.do("reserve 50 4")
    second.do("half")
    first.end()
    eventually(lambda: _reserved(tool) == 4)
    second.do("rest")
    assert second.do("commit") == "00" * 4
    assert second.do("load 50 4") == "4 0 0"


def test_a_half_without_an_arena_ends_with_its_connection(shared: House) -> None:
    tool = shared.client()
    scheduler = shared.client()
    opened = ask(scheduler, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    ask(scheduler, wire.Reserve(opened.namespace, RECORD_BYTES, (bytes(36),)))
    assert _reserved(tool) == 1
    scheduler.close()
    eventually(lambda: _reserved(tool) == 0)


def test_p18_ranks_and_replicas_write_at_once_and_each_reads_its_own_in_both_lives(
    house: House,
) -> None:
    """Two ranks of one engine and a replica, on one directory that belongs to the store."""
    together = os.urandom(16)
    store = house.start(disk=True)
    writers = [house.engine(engine) for engine in (together, together, None)]
    for rank, writer in enumerate(writers):  # all at the same time
        writer.send(f"put {100 * rank} 20")
    assert [writer.answer() for writer in writers] == ["20"] * 3
    for rank, writer in enumerate(writers):
        assert writer.do(f"load {100 * rank} 20") == "20 0 0"
        writer.end()
    store.terminate()
    assert store.wait(PATIENCE_S) == 0
    house.start(disk=True)
    keys = [key_of(100 * rank + number) for rank in range(3) for number in range(20)]
    right = {key[:32]: payload_of(key) for key in keys}
    with ebbtide.Client(house.socket) as client:
        assert client.namespace(model="m").get_many(right) == right


# -- a private store ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_private_store_drains_and_ends_with_its_last_engine(
    house: House, number: signal.Signals
) -> None:
    store = house.start(disk=True, private=True)
    first, second = house.engine(), house.engine()
    assert first.do("put 0 40") == "40"
    first.signal(number)
    first.process.wait(PATIENCE_S)
    time.sleep(0.2)
    assert store.poll() is None
    second.signal(number)
    assert store.wait(PATIENCE_S) == 0
    house.start(disk=True)
    assert house.engine().do("load 0 40") == "40 0 0"


def test_a_private_store_does_not_end_with_a_mere_connection(house: House) -> None:
    store = house.start(private=True)
    worker = house.engine()
    assert worker.do("disconnect") == "gone"
    time.sleep(0.3)
    assert store.poll() is None
    worker.end()
    assert store.wait(PATIENCE_S) == 0
