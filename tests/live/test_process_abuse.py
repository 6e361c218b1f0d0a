"""Clients that misbehave: their connection ends, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S, eventually

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.errors import MisuseError, TierUnavailableError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.live.conftest import House

pytestmark = pytest.mark.live


@pytest.fixture
def store(shared: House) -> subprocess.Popen[bytes]:
    assert shared.store is not None
    return shared.store


@pytest.fixture
def bystander(shared: House) -> Iterator[SocketClient]:
    """An honest client that must notice nothing."""
    client = shared.client()
    yield client
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    assert client.incarnation == 1
    report = ask(client, wire.Stats())
    assert isinstance(report, wire.Report)
    assert "faults" not in report.report["counts"]


def _connect(house: House) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(house.socket)
    peer.settimeout(PATIENCE_S)
    return peer


def _greeted(house: House, *, arena: bool = False) -> socket.socket:
    peer = _connect(house)
    peer.sendall(wire.encode(0, wire.Hello(os.urandom(16), "tool", arena)))
    messages = wire.Decoder().feed(peer.recv(4096))
    assert isinstance(messages[0][1], wire.Welcome)
    return peer


def _last_words(peer: socket.socket) -> list[tuple[int, wire.Message]]:
    """What the store still says until it closes the connection."""
    decoder, found = wire.Decoder(), []
    try:
        while data := peer.recv(1 << 16):
            found += decoder.feed(data)
    except ConnectionResetError:
        pass
    peer.close()
    return found


def _failure(found: list[tuple[int, wire.Message]]) -> wire.Failure:
    ticket, message = found[-1]
    assert ticket == 0
    assert isinstance(message, wire.Failure)
    assert message.error == "ProtocolError"
    return message


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "header"),
        (b"\xff" * 64, "header"),
        (wire.HEADER.pack(0, 99, 0, 0, 1), "header"),
        (wire.HEADER.pack(9, 3, 0, 0, 1) + bytes(9), "width"),
        (wire.encode(0, wire.Stats()), "ticket"),
        (wire.encode(1, wire.Ok()), "may not send"),
        (wire.encode(1, wire.Hello(bytes(16), "again", False)), "may not send"),
    ],
)
def test_a_broken_frame_ends_its_connection_with_a_reason(
    shared: House, bystander: SocketClient, stream: bytes, words: str
) -> None:
    peer = _greeted(shared)
    peer.sendall(stream)
    assert words in _failure(_last_words(peer)).problem


def test_the_first_frame_must_be_hello(shared: House, bystander: SocketClient) -> None:
    peer = _connect(shared)
    peer.sendall(wire.encode(1, wire.Stats()))
    assert "HELLO" in _failure(_last_words(peer)).problem


def test_p76_another_major_version_is_refused_and_told_what_to_do(
    shared: House, bystander: SocketClient
) -> None:
    peer = _connect(shared)
    peer.sendall(wire.encode(0, wire.Hello(bytes(16), "tool", True, (2, 0))))
    failure = _failure(_last_words(peer))
    assert "another protocol" in failure.problem
    assert "same ebbtide" in failure.next_step


def test_p76_a_higher_minor_version_is_welcome(shared: House, bystander: SocketClient) -> None:
    peer = _connect(shared)
    peer.sendall(wire.encode(0, wire.Hello(bytes(16), "tool", False, (1, 9))))
    ((_, message),) = wire.Decoder().feed(peer.recv(4096))
    assert isinstance(message, wire.Welcome)
    assert message.protocol == wire.VERSION
    peer.close()


def test_a_client_that_vanishes_in_the_middle_of_a_frame_is_forgotten(
    shared: House, store: subprocess.Popen[bytes], bystander: SocketClient
) -> None:
    def held() -> int:
        return len(os.listdir(f"/proc/{store.pid}/fd"))

    before = held()
    for greeted in (False, True):
        peer = _greeted(shared) if greeted else _connect(shared)
        peer.sendall(wire.encode(1, wire.Lookup(0, (bytes(36),) * 100))[:1000])
        peer.close()
    eventually(lambda: held() == before)


def test_500_mutated_streams_end_nothing_but_their_connections(
    shared: House, bystander: SocketClient
) -> None:
    chance = random.Random(80)
    honest = [
        wire.encode(0, wire.Hello(bytes(16), "tool", False)),
        wire.encode(1, wire.OpenNamespace([["model", "m"]])),
        wire.encode(2, wire.Reserve(0, 4096, (bytes(36), bytes(35) + b"1"))),
        wire.encode(3, wire.Commit((1, 2, 3))),
        wire.encode(4, wire.LoadKeys(0, (bytes(36),))),
        wire.encode(0, wire.Ack(4, 0)),
        wire.encode(5, wire.Events()),
    ]
    for _ in range(500):
        stream = bytearray(b"".join(honest))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(stream))
            if chance.random() < 0.7:
                stream[at] ^= 1 << chance.randrange(8)
            else:
                del stream[at : at + chance.randint(1, 30)]
        peer = _connect(shared)
        with contextlib.suppress(BrokenPipeError):
            peer.send(stream)
        peer.close()


def test_a_client_that_never_reads_is_cut_off(
    shared: House, store: subprocess.Popen[bytes], bystander: SocketClient
) -> None:
    peer = _greeted(shared)
    flood = wire.encode(1, wire.Stats()) * 400_000  # answers are many times larger
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        peer.sendall(flood)
    peer.close()
    assert int(_status(store.pid, "VmHWM")) << 10 < 400 << 20
    assert "does not read" in shared.log_text()


def _status(pid: int, field: str) -> str:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(line.split()[1] for line in file if line.startswith(field))


def test_more_connections_than_the_bound_are_closed_and_later_ones_served(house: House) -> None:
    house.start(limits={"connections_max": 2})
    first, second = _greeted(house), _greeted(house)
    ((ticket, failure),) = _last_words(_connect(house))
    assert ticket == 0
    assert isinstance(failure, wire.Failure)
    assert failure.error == "NoSpaceError"
    assert "connections_max=2" in failure.problem
    second.close()
    eventually(lambda: _serves(house))
    first.close()


def _serves(house: House) -> bool:
    try:
        SocketClient(house.socket, os.urandom(16), "tool", arena=False).close()
    except TierUnavailableError:
        return False
    return True


def test_a_store_out_of_descriptors_serves_again_when_it_has_some(
    shared: House, store: subprocess.Popen[bytes], bystander: SocketClient
) -> None:
    used = len(os.listdir(f"/proc/{store.pid}/fd"))
    hard = resource.prlimit(store.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(store.pid, resource.RLIMIT_NOFILE, (used, hard))
    peer = _connect(shared)
    eventually(lambda: "No connection can be accepted" in shared.log_text())
    assert isinstance(ask(bystander, wire.Stats()), wire.Report)
    resource.prlimit(store.pid, resource.RLIMIT_NOFILE, (1024, hard))
    peer.sendall(wire.encode(0, wire.Hello(os.urandom(16), "tool", False)))
    assert isinstance(wire.Decoder().feed(peer.recv(4096))[0][1], wire.Welcome)
    peer.close()
    assert shared.log_text().count("No connection can be accepted") < 5


def test_the_arena_comes_sealed_and_once(shared: House, bystander: SocketClient) -> None:
    import fcntl

    peer = _connect(shared)
    peer.sendall(wire.encode(0, wire.Hello(os.urandom(16), "tool", True)))
    data, fds, _, _ = socket.recv_fds(peer, 4096, 4)
    try:
        assert isinstance(wire.Decoder().feed(data)[0][1], wire.Welcome)
        (fd,) = fds
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert seals & wanted == wanted
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        for fd in fds:
            os.close(fd)
        peer.close()


def test_very_many_keys_and_large_frames_make_the_round_trip(
    shared: House, bystander: SocketClient
) -> None:
    opened = ask(bystander, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    keys = tuple(number.to_bytes(36, "big") for number in range(wire.KEYS_MAX))
    states = ask(bystander, wire.Lookup(opened.namespace, keys))
    assert isinstance(states, wire.States)
    assert len(states.codes) == wire.KEYS_MAX
    settled = ask(bystander, wire.Commit(tuple(range(wire.KEYS_MAX))))
    assert isinstance(settled, wire.Settled)
    assert len(settled.codes) == wire.KEYS_MAX
    with pytest.raises(MisuseError, match="Too many keys"):
        ask(bystander, wire.Lookup(opened.namespace, (*keys, bytes(36))))


def test_a_smaller_frame_bound_is_told_to_the_client_and_kept(house: House) -> None:
    house.start(limits={"frame_max": "4KiB"})
    client = house.client()
    with pytest.raises(MisuseError, match="too large"):
        ask(client, wire.Lookup(0, (bytes(36),) * 200))
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    peer = _greeted(house)
    peer.sendall(wire.encode(1, wire.Lookup(0, (bytes(36),) * 200)))
    assert "header" in _failure(_last_words(peer)).problem
