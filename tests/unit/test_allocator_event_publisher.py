"""The publisher of KV events, with real subscribers and replay clients."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from ebbtide.allocator import event_publisher
from ebbtide.allocator.event_publisher import EventPublisher, rank_endpoint
from ebbtide.allocator.events import AllBlocksCleared, BlockRemoved, Event, EventBatch
from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Socket = zmq.Socket[bytes]

WAIT_MS = 10_000
END = b"\xff" * 8
LOOPBACK = "127.0.0.1"


class Clients:
    """The subscribers' side: a context, and sockets that are closed with it."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self._sockets: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        self._sockets.append(self.context.socket(kind))
        return self._sockets[-1]

    def close(self) -> None:
        for one in self._sockets:
            one.close(linger=0)
        self.context.term()


@pytest.fixture
def clients() -> Iterator[Clients]:
    some = Clients()
    yield some
    some.close()


def batch(number: int) -> EventBatch:
    return EventBatch(float(number), [BlockRemoved([number], "GPU", 0)])


def receive(one: Socket) -> list[bytes]:
    assert one.poll(WAIT_MS), "nothing came"
    return one.recv_multipart()


def subscriber(clients: Clients, publisher: EventPublisher, hwm: int = 0) -> Socket:
    """A SUB socket that has joined. Batches go out until the first one is seen."""
    sub = clients.socket(zmq.SUB)
    sub.set_hwm(hwm)
    sub.subscribe(b"")
    sub.connect(publisher.endpoint)
    for _ in range(WAIT_MS // 20):
        last = publisher.publish(EventBatch(0.0, [AllBlocksCleared()]))
        if sub.poll(20):
            break
    assert last is not None
    while int.from_bytes(receive(sub)[1], "big") < last:
        pass
    return sub


def dealer(clients: Clients, publisher: EventPublisher) -> Socket:
    one = clients.socket(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    one.connect(publisher.replay_endpoint)
    return one


def replay(one: Socket, first: int) -> list[tuple[int, bytes]]:
    """What comes back for a replay request, checked for its form, up to the end."""
    one.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while True:
        delimiter, topic, sequence, payload = receive(one)
        assert delimiter == b""
        if sequence == END:
            assert (topic, payload) == (b"", b"")
            return found
        assert topic == b"kv"
        found.append((int.from_bytes(sequence, "big"), payload))


def sent(publisher: EventPublisher, count: int) -> None:
    """Wait until so many batches have gone out."""
    for _ in range(WAIT_MS // 10):
        if publisher.sent_batches >= count:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"only {publisher.sent_batches} of {count} batches were sent")


def number_of(payload: bytes) -> int:
    return int(msgspec.msgpack.Decoder(EventBatch).decode(payload).ts)


# Sending.


def test_a_subscriber_gets_topic_number_and_payload_over_tcp(
    clients: Clients,
) -> None:
    with EventPublisher("tcp://*:0", topic="kv", host=LOOPBACK, rank=3) as publisher:
        assert publisher.endpoint.startswith(f"tcp://{LOOPBACK}:")
        assert not publisher.endpoint.endswith(":0")
        sub = subscriber(clients, publisher)
        numbers = [publisher.publish(batch(each)) for each in (7, 8)]
        for expected, ts in zip(numbers, (7, 8), strict=True):
            topic, sequence, payload = receive(sub)
            assert topic == b"kv"
            assert int.from_bytes(sequence, "big") == expected
            assert msgspec.msgpack.decode(payload) == [
                float(ts),
                [{"type": "BlockRemoved", "block_hashes": [ts], "medium": "GPU", "group_idx": 0}],
                3,
            ]
        assert numbers[1] == (numbers[0] or 0) + 1


def test_a_rank_that_a_batch_has_stays(clients: Clients, tmp_path: Path) -> None:
    with EventPublisher(f"ipc://{tmp_path}/events") as publisher:
        sub = subscriber(clients, publisher)
        publisher.publish(EventBatch(1.0, [], 5))
        assert msgspec.msgpack.decode(receive(sub)[2]) == [1.0, [], 5]


def test_the_file_of_an_ipc_endpoint_is_private(tmp_path: Path) -> None:
    with EventPublisher(f"ipc://{tmp_path}/events"):
        assert os.stat(tmp_path / "events").st_mode & 0o777 == 0o600


def test_an_endpoint_without_a_wildcard_is_connected_to(clients: Clients) -> None:
    sub = clients.socket(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port(f"tcp://{LOOPBACK}")
    with EventPublisher(f"tcp://{LOOPBACK}:{port}") as publisher:
        for _ in range(WAIT_MS // 20):
            publisher.publish(batch(1))
            if sub.poll(20):
                break
        assert number_of(receive(sub)[2]) == 1


def test_an_inproc_endpoint_works_in_the_context_of_its_subscribers(
    clients: Clients,
) -> None:
    with EventPublisher("inproc://events", rank=1, context=clients.context) as publisher:
        assert publisher.endpoint == "inproc://events_dp1"
        sub = subscriber(clients, publisher)
        publisher.publish(batch(4))
        assert number_of(receive(sub)[2]) == 4
    assert not clients.context.closed


def test_this_machines_address_is_found_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ((socket.AF_INET6, "not an address"), (socket.AF_INET, LOOPBACK))
    monkeypatch.setattr(event_publisher, "_OUTSIDE", outside)
    with EventPublisher("tcp://*:0") as publisher:
        host, port = publisher.endpoint.removeprefix("tcp://").split(":")
        assert host == LOOPBACK
        assert int(port) > 0


def test_without_a_network_the_address_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "_OUTSIDE", ())
    with pytest.raises(ConfigError, match="Pass `host`"):
        EventPublisher("tcp://*:0")


# Bounds.


class Gate:
    """An encoder that waits: the fault that fills the queue."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, item: object) -> bytes:
        self.entered.set()
        assert self.open.wait(10)
        return self._encoder.encode(item)


def test_a_full_queue_drops_and_leaves_a_gap(
    tmp_path: Path, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    with EventPublisher(
        f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        max_queue_size=2,
        topic="kv",
    ) as publisher:
        gate: Any = Gate()
        publisher._encoder = gate
        assert publisher.publish(batch(0)) == 0
        assert gate.entered.wait(10)
        assert [publisher.publish(batch(number)) for number in (1, 2, 3, 4)] == [1, 2, None, None]
        gate.open.set()
        sent(publisher, 3)
        assert publisher.publish(batch(5)) == 5
        sent(publisher, 4)
        found = replay(dealer(clients, publisher), 0)
    assert [sequence for sequence, _ in found] == [0, 1, 2, 5]
    assert publisher.dropped_batches == 2
    assert "the queue is full. 1 so far" in caplog.text


def test_a_batch_that_cannot_be_encoded_costs_that_batch_alone(
    tmp_path: Path, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    with EventPublisher(f"ipc://{tmp_path}/events") as publisher:
        sub = subscriber(clients, publisher)
        first = publisher.publish(EventBatch(1.0, [BlockRemoved([1 << 70], "GPU")]))
        publisher.publish(EventBatch(1.0, [BlockRemoved([1], "\ud800")]))
        publisher.publish(batch(9))
        _, sequence, payload = receive(sub)
    assert number_of(payload) == 9
    assert int.from_bytes(sequence, "big") == (first or 0) + 2
    assert publisher.dropped_batches == 2
    assert "cannot be encoded" in caplog.text


def test_a_shutdown_sends_what_is_queued(tmp_path: Path, clients: Clients) -> None:
    with EventPublisher(f"ipc://{tmp_path}/events") as publisher:
        sub = subscriber(clients, publisher)
        gate: Any = Gate()
        publisher._encoder = gate
        for number in range(500):
            publisher.publish(batch(number))
        threading.Timer(0.05, gate.open.set).start()
    assert publisher.dropped_batches == 0
    assert [number_of(receive(sub)[2]) for _ in range(500)] == list(range(500))


def test_a_shutdown_waits_for_a_subscriber_that_reads(
    tmp_path: Path, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "SHUTDOWN_S", 30.0)  # the machine may be busy
    large: list[Event] = [BlockRemoved(list(range(1 << 40, (1 << 40) + 20_000)), "GPU", 0)]
    came: list[int] = []

    def read() -> None:
        while len(came) < 100 and sub.poll(WAIT_MS):
            came.append(number_of(sub.recv_multipart()[2]))

    with EventPublisher(f"ipc://{tmp_path}/events") as publisher:
        sub = subscriber(clients, publisher, hwm=1)
        before = publisher.sent_batches
        for number in range(100):
            publisher.publish(EventBatch(float(number), large))
        sent(publisher, before + 100)
        reader = threading.Timer(0.2, read)
        reader.start()
    reader.join()
    assert came == list(range(100))


def test_a_shutdown_gives_up_at_its_deadline_and_counts_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_publisher, "SHUTDOWN_S", 0.0)
    publisher = EventPublisher(f"ipc://{tmp_path}/events", max_queue_size=3)
    gate: Any = Gate()
    publisher._encoder = gate
    publisher.publish(batch(0))
    assert gate.entered.wait(10)
    for number in range(3):
        publisher.publish(batch(number))  # so that no wake-up fits into the queue
    threading.Timer(0.05, gate.open.set).start()
    publisher.shutdown()
    assert (publisher.sent_batches, publisher.dropped_batches) == (1, 3)
    assert "3 so far" in caplog.text


@pytest.mark.timeout(30)  # for ever, if it waited for the subscriber
def test_a_subscriber_that_does_not_read_does_not_hold_up_a_shutdown(
    tmp_path: Path, clients: Clients
) -> None:
    with EventPublisher(f"ipc://{tmp_path}/events") as publisher:
        large: list[Event] = [BlockRemoved(list(range(1 << 40, (1 << 40) + 10_000)), "GPU", 0)]
        subscriber(clients, publisher, hwm=1)
        before = publisher.sent_batches
        for number in range(300):
            publisher.publish(EventBatch(float(number), large))
        sent(publisher, before + 300)


@pytest.mark.parametrize("replay_endpoint", [None, "replay"])
def test_after_a_shutdown_nothing_is_published(tmp_path: Path, replay_endpoint: str | None) -> None:
    other = f"ipc://{tmp_path}/{replay_endpoint}" if replay_endpoint else None
    publisher = EventPublisher(f"ipc://{tmp_path}/events", replay_endpoint=other)
    publisher.shutdown()
    publisher.shutdown()
    with pytest.raises(MisuseError, match="shut down"):
        publisher.publish(batch(1))


# Replay.


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[EventPublisher]:
    """Ten batches were sent, the last six of them are kept."""
    with EventPublisher(
        f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=6,
        topic="kv",
    ) as publisher:
        for number in range(10):
            publisher.publish(batch(number))
        sent(publisher, 10)
        yield publisher


@pytest.mark.parametrize(
    ("first", "expected"), [(0, range(4, 10)), (7, range(7, 10)), (9, [9]), (10, []), (1 << 63, [])]
)
def test_a_replay_has_what_is_kept_from_the_wanted_number_on(
    kept: EventPublisher, clients: Clients, first: int, expected: Any
) -> None:
    found = replay(dealer(clients, kept), first)
    assert [sequence for sequence, _ in found] == list(expected)
    assert [number_of(payload) for _, payload in found] == list(expected)


def test_each_client_gets_its_own_replay(kept: EventPublisher, clients: Clients) -> None:
    several = [dealer(clients, kept) for _ in range(3)]
    for number, one in enumerate(several):
        one.send_multipart((b"", (7 + number).to_bytes(8, "big")))
    for number, one in enumerate(several):
        came = [receive(one)[2] for _ in range(4 - number)]
        assert [int.from_bytes(each, "big") for each in came[:-1]] == list(range(7 + number, 10))
        assert came[-1] == END


@pytest.mark.parametrize(
    "request_frames",
    [(b"",), (b"", b"1234567"), (b"", b"123456789"), (b"x", bytes(8)), (b"", bytes(8), b"")],
)
def test_malformed_requests_are_logged_and_ignored(
    kept: EventPublisher,
    clients: Clients,
    caplog: pytest.LogCaptureFixture,
    request_frames: tuple[bytes, ...],
) -> None:
    one = dealer(clients, kept)
    for _ in range(3):
        one.send_multipart(request_frames)
    assert [sequence for sequence, _ in replay(one, 9)] == [9]
    assert kept.malformed_requests == 3
    lines = [line for line in caplog.messages if "replay request was ignored" in line]
    assert [line.split(". ")[1] for line in lines] == ["1 so far.", "2 so far."]


def test_a_request_that_is_too_long_costs_its_sender_the_connection(
    kept: EventPublisher, clients: Clients
) -> None:
    dealer(clients, kept).send_multipart((b"", bytes(event_publisher.REQUEST_MAX_BYTES + 1)))
    assert [sequence for sequence, _ in replay(dealer(clients, kept), 9)] == [9]
    assert kept.malformed_requests == 0


def test_a_long_replay_is_whole_even_for_a_client_that_reads_late(
    tmp_path: Path, clients: Clients
) -> None:
    with EventPublisher(
        f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv"
    ) as publisher:
        large: list[Event] = [BlockRemoved(list(range(1 << 40, (1 << 40) + 100)), "GPU", 0)]
        for number in range(6000):
            publisher.publish(EventBatch(float(number), large))
        sent(publisher, 6000)
        one = clients.socket(zmq.DEALER)
        one.set_hwm(1)
        assert publisher.replay_endpoint is not None
        one.connect(publisher.replay_endpoint)
        one.send_multipart((b"", bytes(8)))
        assert one.poll(WAIT_MS)
        threading.Event().wait(0.3)  # long enough to fill the buffers on the way
        came = [receive(one)[2] for _ in range(6001)]
    assert [int.from_bytes(each, "big") for each in came[:-1]] == list(range(6000))
    assert came[-1] == END


# Endpoints and settings.


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///run/x", 0, "ipc:///run/x"),
    ],
)
def test_ranks_have_endpoints_of_their_own(endpoint: str, rank: int, expected: str) -> None:
    assert rank_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "rank"),
    [("ipc:///run/x", 1), ("tcp://host", 1), ("tcp://host:*", 1), ("tcp://*:65535", 1)],
)
def test_endpoints_without_ranks_are_refused(endpoint: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="data-parallel ranks"):
        rank_endpoint(endpoint, rank)


@pytest.mark.parametrize("bound", ["buffer_steps", "hwm", "max_queue_size"])
def test_bounds_below_1_are_refused(bound: str) -> None:
    bounds: dict[str, Any] = {bound: 0}
    with pytest.raises(ConfigError, match=bound):
        EventPublisher("tcp://*:0", host=LOOPBACK, **bounds)


def test_an_inproc_endpoint_without_a_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context"):
        EventPublisher("inproc://events")


def test_an_endpoint_that_is_taken_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    with EventPublisher("tcp://*:0", host=LOOPBACK) as publisher:
        port = publisher.endpoint.rpartition(":")[2]
        with pytest.raises(ConfigError, match="cannot use its endpoint"):
            EventPublisher(f"tcp://*:{port}")
        with pytest.raises(ConfigError, match="cannot use its endpoint"):
            EventPublisher(f"ipc://{tmp_path}/events", replay_endpoint=f"tcp://*:{port}")
    with pytest.raises(ConfigError, match="cannot use its endpoint"):
        EventPublisher("nonsense")


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'ebbtide\[events\]'"):
        EventPublisher("tcp://*:0", host=LOOPBACK)


def test_a_dropped_batch_is_logged_at_counts_that_double(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with EventPublisher(f"ipc://{tmp_path}/events") as publisher:
        for _ in range(9):
            publisher.publish(EventBatch(1.0, [BlockRemoved([1 << 70], "GPU")]))
    assert [line.split(". ")[-1] for line in caplog.messages] == [
        f"{count} so far." for count in (1, 2, 4, 8)
    ]
