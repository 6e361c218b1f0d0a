"""The socket client against stores that are absent, refuse, lie, stall or die."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.fake_store import ARENA_BYTES, FakeStore, welcome

from ebbtide.connectors import client as client_module
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion, SocketClient, ask
from ebbtide.connectors.client_interface import CROWDED, LOST
from ebbtide.errors import MisuseError, TierUnavailableError
from ebbtide.tiers.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY = bytes(36)
PATIENCE_S = 10.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FakeStore]:
    found = FakeStore(str(tmp_path / "s"))
    yield found
    found.close()


@pytest.fixture
def client(store: FakeStore) -> Iterator[SocketClient]:
    found = SocketClient(store.path, bytes(16), "scheduler", arena=False)
    yield found
    found.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    found = Arena.create(ARENA_BYTES)
    yield found
    found.close()


def _poll(client: SocketClient, count: int = 1) -> list[Completion]:
    found: list[Completion] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        client.wait(0.05)
        found += client.poll()
    return found


def _connect(store: FakeStore, *, arena: bool = True) -> SocketClient:
    return SocketClient(store.path, bytes(16), "worker", arena=arena)


# -- answers --------------------------------------------------------------------------------------


def test_answers_find_their_requests(store: FakeStore, client: SocketClient) -> None:
    first, second = client.submit(wire.Lookup(0, (KEY,))), client.submit(wire.Stats())
    assert store.read(2) == [(first, wire.Lookup(0, (KEY,))), (second, wire.Stats())]
    store.say(second, wire.Report({}))
    store.say(first, wire.States(b"\x01"))
    assert _poll(client, 2) == [
        Completion(second, wire.Report({}), True),
        Completion(first, wire.States(b"\x01"), True),
    ]


def test_a_load_is_answered_until_done(store: FakeStore, client: SocketClient) -> None:
    ticket = client.submit(wire.LoadKeys(0, (KEY,)))
    answers = [wire.Batch(0, ((0, 1, 1, 0),)), wire.Failed(((1, 16),)), wire.Done()]
    for answer in answers:
        store.say(ticket, answer)
    found = _poll(client, 3)
    assert [completion.message for completion in found] == answers
    assert [completion.final for completion in found] == [False, False, True]


def test_answers_to_nobody_are_dropped(store: FakeStore, client: SocketClient) -> None:
    ticket = client.submit(wire.Stats())
    store.say(ticket, wire.Report({}))
    store.say(ticket, wire.Report({}))
    store.say(999, wire.Ok())
    store.say(0, welcome(generation=99))  # a second greeting
    assert _poll(client) == [Completion(ticket, wire.Report({}), True)]
    assert client.poll() == []
    assert (client.incarnation, client.arena_generation) == (1, 1)


def test_what_cannot_be_sent_completes_as_misuse(store: FakeStore, client: SocketClient) -> None:
    ticket = client.submit(wire.Lookup(0, (bytes(33),)))
    client.notify(wire.Touch(0, (bytes(33),)))
    ((found, message, final),) = client.poll()
    assert (found, final) == (ticket, True)
    assert isinstance(message, wire.Failure)
    assert message.error == MisuseError.__name__
    store.drop()
    time.sleep(0.05)
    assert client.poll() == []  # it was not open


def test_asking_raises_what_a_failure_carries(store: FakeStore, client: SocketClient) -> None:
    def answer() -> None:
        ((ticket, _),) = store.read()
        store.say(ticket, wire.Failure("MisuseError", "wrong", "right"))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(MisuseError, match=r"wrong\. right"):
        ask(client, wire.Stats())
    thread.join()
    with pytest.raises(TierUnavailableError, match="in time"):
        ask(client, wire.Stats(), timeout_s=0.05)


# -- greetings that fail --------------------------------------------------------------------------


def _goodbye(peer: socket.socket) -> None:
    peer.sendall(wire.encode(0, wire.Failure("ProtocolError", "another protocol", "Update.")))


@pytest.mark.parametrize(
    ("greet", "words"),
    [
        (_goodbye, "another protocol"),
        (lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "keep to the protocol"),
        (lambda peer: peer.shutdown(socket.SHUT_RDWR), "closed the connection"),
        (lambda peer: peer.sendall(wire.encode(0, welcome())), "could not be mapped"),
    ],
)
def test_a_greeting_that_fails_says_why(
    store: FakeStore, greet: Callable[[socket.socket], None], words: str
) -> None:
    store.greet = greet
    begun = time.monotonic()
    with pytest.raises(TierUnavailableError, match=words):
        _connect(store)
    assert time.monotonic() - begun < 1.0


def test_an_arena_that_could_shrink_under_the_mapping_is_refused(store: FakeStore) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ARENA_BYTES)
    store.greet = store.welcome_with(fd)
    with pytest.raises(TierUnavailableError, match="could not be mapped"):
        _connect(store)
    os.close(fd)


@pytest.mark.parametrize("told", [0, ARENA_BYTES - 1, 2 * ARENA_BYTES])
def test_an_arena_of_another_size_than_told_is_refused(
    store: FakeStore, arena: Arena, told: int
) -> None:
    store.greet = store.welcome_with(arena.fd, told)
    with pytest.raises(TierUnavailableError, match="could not be mapped"):
        _connect(store)


def test_a_descriptor_that_is_no_memory_is_refused(store: FakeStore) -> None:
    read_fd, write_fd = os.pipe()
    store.greet = store.welcome_with(read_fd)
    with pytest.raises(TierUnavailableError, match="could not be mapped"):
        _connect(store)
    os.close(read_fd)
    os.close(write_fd)


def test_a_socket_of_another_user_is_refused(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "trusted", lambda peer, uids: False)
    with pytest.raises(TierUnavailableError, match="another user"):
        _connect(store)


@pytest.mark.parametrize("engine", [b"", bytes(15), bytes(17)])
def test_an_engine_id_of_another_length_is_misuse(store: FakeStore, engine: bytes) -> None:
    with pytest.raises(MisuseError, match="16 bytes"):
        SocketClient(store.path, engine, "worker", arena=False)


# -- stores that go away --------------------------------------------------------------------------


def test_a_lost_store_completes_every_open_request_as_lost(
    store: FakeStore, client: SocketClient
) -> None:
    tickets = [client.submit(wire.Stats()) for _ in range(3)]
    store.drop()
    assert _poll(client, 3) == [Completion(ticket, LOST, True) for ticket in tickets]
    assert not client.connected
    later = client.submit(wire.Stats())
    client.notify(wire.Ack(1, 1))
    assert client.poll() == [Completion(later, LOST, True)]


def test_a_client_reconnects_and_unmaps_the_old_arena_before_the_new_one_comes(
    store: FakeStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.greet = store.welcome_with(arena.fd)
    client = _connect(store)
    old = client.arena
    assert old is not None
    seen: list[tuple[Arena | None, int]] = []
    attach = client_module._attach

    def spy(fds: list[int], arena_bytes: int) -> Arena | None:
        seen.append((client.arena, old.fd))
        return attach(fds, arena_bytes)

    monkeypatch.setattr(client_module, "_attach", spy)
    store.drop()
    deadline = time.monotonic() + PATIENCE_S
    while client.incarnation < 2 and time.monotonic() < deadline:
        client.poll()
        client.wait(0.01)
    assert seen == [(None, -1)]
    assert client.arena is not None
    assert client.arena is not old
    assert (client.incarnation, client.arena_generation) == (2, 2)
    client.close()


def test_a_client_without_a_store_tries_seldom_and_never_for_long(
    store: FakeStore, client: SocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    connect = client._connect

    def counted() -> None:
        nonlocal tries
        tries += 1
        connect()

    monkeypatch.setattr(client, "_connect", counted)
    store.greet = lambda peer: peer.shutdown(socket.SHUT_RDWR)
    store.drop()
    slowest, until = 0.0, time.monotonic() + 1.0
    while time.monotonic() < until:
        begun = time.monotonic()
        client.submit(wire.Stats())
        client.notify(wire.Touch(0, (KEY,)))
        client.poll()
        slowest = max(slowest, time.monotonic() - begun)
        time.sleep(0.001)
    assert 1 <= tries <= 6
    assert slowest < 0.25  # the thread of the other side has the interpreter now and then


def test_a_store_that_does_not_read_crowds_the_client_but_never_stops_it(
    store: FakeStore, client: SocketClient
) -> None:
    big = wire.Lookup(0, (KEY,) * 20_000)
    begun = time.monotonic()
    tickets = [client.submit(big) for _ in range(40)]
    for _ in range(100):
        client.notify(wire.Touch(0, (KEY,) * 20_000))
    client.notify(wire.Ack(1, 2))
    assert time.monotonic() - begun < 5.0
    assert len(client._outbox) < client_module.OUTBOX_BYTES_MAX + wire.FRAME_BYTES_MAX
    assert bytes(client._outbox).endswith(wire.encode(0, wire.Ack(1, 2)))
    crowded = client.poll()
    assert crowded
    assert crowded == [Completion(ticket, CROWDED, True) for ticket in tickets[-len(crowded) :]]


def test_a_large_frame_goes_out_in_pieces_as_the_store_reads(
    store: FakeStore, client: SocketClient
) -> None:
    ticket = client.submit(wire.Lookup(0, (KEY,) * wire.KEYS_MAX))
    found: list[tuple[int, wire.Message]] = []
    reader = threading.Thread(target=lambda: found.extend(store.read()))
    reader.start()
    while reader.is_alive():
        client.wait(0.01)
        client.poll()
    reader.join()
    assert found == [(ticket, wire.Lookup(0, (KEY,) * wire.KEYS_MAX))]


def test_closing_twice_is_closing_once_and_leaves_only_misses(
    store: FakeStore, arena: Arena
) -> None:
    store.greet = store.welcome_with(arena.fd)
    client = _connect(store)
    open_ticket = client.submit(wire.Stats())
    client.close()
    client.close()
    assert client.arena is None
    later = client.submit(wire.Stats())
    client.notify(wire.Ack(1, 1))
    assert client.poll() == [Completion(t, LOST, True) for t in (open_ticket, later)]
    time.sleep(0.1)
    client.wait(0.0)
    assert client.poll() == []
    assert client.incarnation == 1


# -- the process around it ------------------------------------------------------------------------


def test_a_client_works_in_a_process_with_more_than_1024_descriptors(store: FakeStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("FEW DESCRIPTORS: this process may not open 2048")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    crowd: list[int] = []
    try:
        while not crowd or crowd[-1] < 1100:
            crowd.append(os.open("/dev/null", os.O_RDONLY))
        client = _connect(store, arena=False)
        client.submit(wire.Stats())
        store.say(1, wire.Report({}))
        assert len(_poll(client)) == 1
        client.close()
    finally:
        for fd in crowd:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_signal_does_not_disturb_a_wait(store: FakeStore, client: SocketClient) -> None:
    rang = 0

    def ring(number: int, frame: object) -> None:
        nonlocal rang
        rang += 1

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        begun = time.monotonic()
        client.wait(0.1)
        assert time.monotonic() - begun >= 0.09
        ticket = client.submit(wire.Stats())
        store.say(ticket, wire.Report({}))
        assert len(_poll(client)) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert rang > 3


def test_no_descriptor_of_a_client_is_inherited(store: FakeStore, arena: Arena) -> None:
    store.greet = store.welcome_with(arena.fd)
    client = _connect(store)
    assert client.arena is not None
    assert client._socket is not None
    for fd in (client.arena.fd, client._socket.fileno()):
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    client.close()


def test_why_a_store_turns_a_client_away_is_heard_also_when_it_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have spoken and closed before the greeting goes out: the send then fails first."""
    path, send = str(tmp_path / "s"), SocketClient._send
    failure = wire.Failure("AccessDeniedError", "The store does not serve this user")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def send_late(client: SocketClient, frame: bytes) -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(wire.encode(0, failure))
            send(client, frame)

        monkeypatch.setattr(SocketClient, "_send", send_late)
        with pytest.raises(TierUnavailableError, match="does not serve this user"):
            SocketClient(path, bytes(16), "worker", arena=False)
