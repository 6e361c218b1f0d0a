"""The server's own rim, in this process: descriptors, partial sends, faults of its callbacks."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.connectors import connection as connection_module
from ebbtide.connectors import endpoint as endpoint_module
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.endpoint import Endpoint, answers, has_exited, peer_process
from ebbtide.connectors.server import RECEIVE_BYTES, AsyncioRuntime, StoreServer
from ebbtide.errors import ConfigError
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MEMORY_BYTES = 16 << 20


class Rim:
    """A server on a real socket, in this process, and raw peers."""

    def __init__(self, path: str) -> None:
        self.runtime = AsyncioRuntime(asyncio.get_running_loop())
        bounds = Bounds.for_capacity(MEMORY_BYTES)
        self.store = Store(self.runtime, Arena.create(MEMORY_BYTES), None, bounds)
        self.endpoint = Endpoint(path, wait_s=0.0)
        self.server = StoreServer(
            self.store, self.endpoint.listen(), private=False, drain_timeout_s=1.0
        )
        self.peers: list[socket.socket] = []

    async def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        peer.connect(self.endpoint.path)
        self.peers.append(peer)
        await asyncio.sleep(0.01)
        return peer

    async def greeted(self) -> socket.socket:
        peer = await self.connect()
        await self.say(peer, 0, wire.Hello(bytes(16), "tool", False))
        assert isinstance((await self.hear(peer))[0][1], wire.Welcome)
        return peer

    async def say(self, peer: socket.socket, ticket: int, message: wire.Message) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(peer, wire.encode(ticket, message))

    async def hear(self, peer: socket.socket) -> list[tuple[int, wire.Message]]:
        loop = asyncio.get_running_loop()
        return wire.Decoder().feed(await asyncio.wait_for(loop.sock_recv(peer, 1 << 16), 5.0))

    async def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.server.stop()
        await self.server.run()
        self.endpoint.close()
        self.runtime.close()
        self.store.close(False)


@pytest.fixture
async def rim(tmp_path: Path) -> AsyncIterator[Rim]:
    found = Rim(str(tmp_path / "s"))
    yield found
    await found.close()


async def test_the_arena_arrives_also_when_the_socket_was_full(rim: Rim) -> None:
    peer = await rim.connect()
    (connection,) = rim.server._connections
    junk = 0
    while True:
        try:
            junk += connection._peer.send(b"j" * 65_536)
        except BlockingIOError:
            break
    await rim.say(peer, 0, wire.Hello(bytes(16), "worker", True))
    await asyncio.sleep(0.05)
    assert connection._waiting
    stream, fds = b"", []
    while len(stream) < junk + 16:
        try:
            data, more, _, _ = socket.recv_fds(peer, 1 << 20, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await asyncio.sleep(0.005)
            continue
        stream += data
        fds += more
    (fd,) = fds
    assert os.fstat(fd).st_size == MEMORY_BYTES
    os.close(fd)
    assert isinstance(wire.Decoder().feed(stream[junk:])[0][1], wire.Welcome)
    assert not connection._waiting


async def test_a_fault_in_one_request_is_answered_counted_and_left_behind(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await rim.greeted()

    def fail(*args: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(rim.store, "stats", fail)
    stream = wire.encode(7, wire.Stats()) + wire.encode(8, wire.Flush())
    await asyncio.get_running_loop().sock_sendall(peer, stream)
    answers: list[tuple[int, wire.Message]] = []
    while len(answers) < 2:
        answers += await rim.hear(peer)
    assert answers == [(7, connection_module.FAULT), (8, wire.Ok())]
    assert rim.store.ledger.counts["faults"] == 1


async def test_a_fault_in_a_store_that_waited_is_answered_and_left_behind(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await rim.greeted()

    def fail(*args: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(rim.store, "abort", fail)
    stream = wire.encode(7, wire.Abort((1,))) + wire.encode(8, wire.Flush())
    await asyncio.get_running_loop().sock_sendall(peer, stream)
    answers: list[tuple[int, wire.Message]] = []
    while len(answers) < 2:
        answers += await rim.hear(peer)
    assert answers == [(7, connection_module.FAULT), (8, wire.Ok())]
    assert rim.store.ledger.counts["faults"] == 1


async def test_a_lookup_goes_before_the_stores_of_another_connection(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives last, and is answered first."""
    flood, other = await rim.greeted(), await rim.greeted()
    await rim.say(other, 1, wire.OpenNamespace([["model", "m"]]))
    ((_, opened),) = await rim.hear(other)
    assert isinstance(opened, wire.NamespaceOpened)
    keys = tuple(n.to_bytes(36, "big") for n in range(1000))
    order: list[str] = []
    reserve, lookup = rim.store.reserve, rim.store.lookup

    def reserving(*args: Any) -> Any:
        order.append("reserve")
        if len(order) == 1:  # the lookup arrives while the first piece is dealt with
            other.sendall(wire.encode(2, wire.Lookup(opened.namespace, keys[:4])))
        return reserve(*args)

    def looking_up(*args: Any) -> Any:
        order.append("lookup")
        return lookup(*args)

    monkeypatch.setattr(rim.store, "reserve", reserving)
    monkeypatch.setattr(rim.store, "lookup", looking_up)
    await rim.say(flood, 3, wire.Reserve(opened.namespace, 4096, keys))
    ((_, grants),) = await rim.hear(flood)
    assert isinstance(grants, wire.Grants)
    assert len(grants.grants) == len(keys)
    assert order.index("lookup") <= 2
    assert order.count("reserve") > 10
    assert isinstance((await rim.hear(other))[0][1], wire.States)


async def test_a_connection_with_many_stores_is_not_read_and_all_are_answered(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.connectors.turns.WAITING_MAX", 4)
    loop = asyncio.get_running_loop()
    paused = most = 0
    take = connection_module.Connection._pieces

    def counting(self: Any, ticket: int, message: wire.Message) -> Any:
        nonlocal paused, most
        paused += not self._reading
        most = max(most, len(self._lane._waiting))
        return take(self, ticket, message)

    monkeypatch.setattr(connection_module.Connection, "_pieces", counting)
    peer = await rim.greeted()
    sent = [(ticket, wire.Abort((ticket,))) for ticket in range(1, 9000)]
    sending = asyncio.create_task(
        loop.sock_sendall(peer, b"".join(wire.encode(*each) for each in sent))
    )
    decoder, heard = wire.Decoder(), list[tuple[int, wire.Message]]()
    while len(heard) < len(sent):
        heard += decoder.feed(await asyncio.wait_for(loop.sock_recv(peer, 1 << 16), 5.0))
    await sending
    assert [ticket for ticket, _ in heard] == [ticket for ticket, _ in sent]
    assert 0 < paused < len(sent)
    assert most <= 4 + RECEIVE_BYTES // len(wire.encode(1, wire.Abort((1,))))


async def test_a_connection_that_ends_takes_half_a_reservation_back(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A reservation is half done. 2. Its connection ends: nobody hears of it. 3. The engine
    lives on in another connection, and nothing is left reserved.
    """
    peer, other = await rim.greeted(), await rim.greeted()
    await rim.say(peer, 1, wire.OpenNamespace([["model", "m"]]))
    ((_, opened),) = await rim.hear(peer)
    assert isinstance(opened, wire.NamespaceOpened)
    reserve = rim.store.reserve

    def reserving(*args: Any) -> Any:
        peer.close()
        return reserve(*args)

    monkeypatch.setattr(rim.store, "reserve", reserving)
    keys = tuple(n.to_bytes(36, "big") for n in range(1000))
    await rim.say(peer, 3, wire.Reserve(opened.namespace, 4096, keys))
    await asyncio.sleep(0.05)
    assert rim.store.memory.reserved_bytes == 0
    await rim.say(other, 4, wire.Flush())
    assert await rim.hear(other) == [(4, wire.Ok())]


async def test_a_fault_in_a_callback_is_counted_and_the_loop_goes_on(rim: Rim) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    rim.server.loop.call_soon(fail)
    await rim.greeted()
    assert rim.store.ledger.counts["faults"] == 1


async def test_requests_behind_the_end_of_a_connection_are_not_acted_on(rim: Rim) -> None:
    peer = await rim.greeted()
    (connection,) = rim.server._connections
    stream = wire.encode(1, wire.Ok()) + wire.encode(2, wire.OpenNamespace([["model", "m"]]))
    await asyncio.get_running_loop().sock_sendall(peer, stream)
    await asyncio.sleep(0.02)
    assert rim.store.namespace(0) is None
    assert connection not in rim.server._connections


async def test_answers_that_pile_up_end_the_connection(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "OUTBOX_BYTES_MAX", 1 << 20)
    peer = await rim.greeted()
    (connection,) = rim.server._connections
    for _ in range(40):
        connection.send(1, wire.States(bytes(65_536)))
    assert not rim.server._connections
    assert not connection._outbox
    peer.close()


async def test_a_process_that_cannot_be_watched_gets_no_arena(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(peer: socket.socket) -> None:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(connection_module, "peer_process", unseen)
    peer = await rim.connect()
    await rim.say(peer, 0, wire.Hello(bytes(16), "worker", True))
    ((ticket, message),) = await rim.hear(peer)
    assert ticket == 0
    assert isinstance(message, wire.Failure)
    assert "cannot watch" in message.problem


async def test_reconnects_of_one_process_cost_one_descriptor(rim: Rim) -> None:
    for _ in range(5):
        peer = await rim.connect()
        await rim.say(peer, 0, wire.Hello(bytes(16), "worker", True))
        _, fds, _, _ = socket.recv_fds(peer, 4096, 1) if await _ready(peer) else (b"", [], 0, 0)
        for fd in fds:
            os.close(fd)
        peer.close()
    await asyncio.sleep(0.02)
    (engine,) = rim.server._engines.values()
    assert len(engine.mapping) == 1
    assert not engine.connections


async def _ready(peer: socket.socket) -> bool:
    await asyncio.sleep(0.02)
    return peer.fileno() >= 0


# -- the endpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("peerpidfd", [endpoint_module.SO_PEERPIDFD, 9999])
def test_a_peer_is_watched_on_kernels_old_and_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peerpidfd: int
) -> None:
    monkeypatch.setattr(endpoint_module, "SO_PEERPIDFD", peerpidfd)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    program = (
        "import socket, sys\n"
        "peers = [socket.socket(socket.AF_UNIX) for _ in range(2)]\n"
        "[peer.connect(sys.argv[1]) for peer in peers]\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "s")], stdin=subprocess.PIPE
    )
    first, second = listener.accept()[0], listener.accept()[0]
    processes = [peer_process(first), peer_process(second)]
    assert processes[0].identity == processes[1].identity
    assert not has_exited(processes[0].pidfd)
    child.communicate()
    assert has_exited(processes[0].pidfd)
    for process in processes:
        os.close(process.pidfd)
    for peer in (first, second, listener):
        peer.close()


def test_a_full_backlog_counts_as_an_answer_and_a_dead_socket_does_not(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert not answers(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    assert not answers(path)  # bound by a process that does not listen
    listener.listen(0)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(path)
    assert answers(path)
    for peer in (waiting, listener):
        peer.close()
    assert not answers(path)


def test_p72_an_endpoint_has_one_owner_and_a_new_one_after_it(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "s")
    endpoint = Endpoint(path, wait_s=0.0)
    listener = endpoint.listen()
    with pytest.raises(ConfigError, match="Another store serves"):
        Endpoint(path, wait_s=5.0)
    listener.close()  # it drains
    with pytest.raises(ConfigError, match="Another store serves"):
        Endpoint(path, wait_s=0.1)
    endpoint.close()
    Endpoint(path, wait_s=0.0).close()


def test_p72_a_late_end_leaves_the_socket_of_a_successor_alone(tmp_path: Path) -> None:
    """Somebody has emptied the directory, so that the lock held nobody back."""
    path = str(tmp_path / "run" / "s")
    old = Endpoint(path, wait_s=0.0)
    old_listener = old.listen()
    shutil.rmtree(tmp_path / "run")
    new = Endpoint(path, wait_s=0.0)
    new_listener = new.listen()
    old_listener.close()
    old.close()
    assert answers(path)
    new_listener.close()
    new.close()
    assert not os.path.exists(path)


@pytest.mark.parametrize("name", ["s", "s.lock"])
def test_an_endpoint_follows_no_link(tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(ConfigError):
        _listen_once(str(tmp_path / "s"))
    assert target.read_text() == "precious"


def _listen_once(path: str) -> None:
    endpoint = Endpoint(path, wait_s=0.0)
    try:
        endpoint.listen().close()
    finally:
        endpoint.close()
