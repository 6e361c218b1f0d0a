"""A store under mutated frames: a connection ends as the protocol says, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S
from tests.mutator import Mutator, frames_wanted, refused_at

import ebbtide
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

FRAMES = frames_wanted(20_000)
SEED = int(os.environ.get("EBBTIDE_TEST_FUZZ_SEED", "1"))
GROWTH_BYTES_MAX = 48 << 20
LOOK_EVERY = 2_000  # frames
NAME, PAYLOAD = b"n" * 32, b"the right bytes " * 256


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        found = next(line.split()[1] for line in file if line.startswith("VmRSS"))
    return int(found) << 10


def send(path: str, stream: bytes) -> list[tuple[int, wire.Message]]:
    """What the store says to a stream until it ends the connection. Its own frames are sound."""
    decoder, found = wire.Decoder(), []
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(PATIENCE_S)
        peer.connect(path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(stream)
            peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while data := peer.recv(1 << 16):
                found += decoder.feed(data)
    assert not decoder.buffered_bytes
    return found


@pytest.mark.timeout(120 if FRAMES <= 20_000 else 7200)
def test_p80_mutated_frames_end_their_own_connection_with_a_typed_error_and_nothing_else(
    house: House,
) -> None:
    store = house.start(disk=True, memory="16MiB")
    mutator, outcomes = Mutator(SEED), Counter[str]()
    sent, looked_at, warm_bytes = 0, 0, 0
    with ebbtide.Client(house.socket) as bystander:
        space = bystander.namespace(model="bystander")
        assert space.put(NAME, PAYLOAD)
        while sent < FRAMES:
            frames = mutator.stream()
            refused = refused_at(frames)
            answers = send(house.socket, b"".join(frames))
            sent += refused or len(frames)
            last = answers[-1] if answers else None
            ended = last is not None and last[0] == 0 and isinstance(last[1], wire.Failure)
            assert ended == (refused is not None), (sent, frames, answers)
            if ended:
                assert last is not None
                assert isinstance(last[1], wire.Failure)
                assert last[1].error == "ProtocolError", (sent, frames)
            outcomes["refused" if ended else "served"] += 1
            if sent - looked_at >= LOOK_EVERY:
                looked_at = sent
                assert store.poll() is None
                warm_bytes = warm_bytes or resident_bytes(store.pid)
        assert outcomes["refused"] > FRAMES // 100 < outcomes["served"]
        assert bystander.link.incarnation == 1
        assert space.get(NAME) in (PAYLOAD, None)  # a RESET of all may have been among them
        assert space.put(NAME, PAYLOAD)
        assert space.get(NAME) == PAYLOAD
        report = ask(bystander.link, wire.Stats())
        assert isinstance(report, wire.Report)
        assert "faults" not in report.report["counts"]
    grown_bytes = resident_bytes(store.pid) - warm_bytes
    assert grown_bytes < GROWTH_BYTES_MAX
    print(f"{sent} frames, {dict(outcomes)}, grown by {grown_bytes >> 10} KiB")  # noqa: T201
    store.terminate()
    assert store.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("claim", [wire.FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_p80_an_oversized_frame_is_refused_at_its_header_and_takes_no_memory(
    house: House, claim: int
) -> None:
    store = house.start()
    before = resident_bytes(store.pid)
    hello = wire.encode(0, wire.Hello(bytes(16), "tool", False))
    for _ in range(20):
        answers = send(house.socket, hello + wire.HEADER.pack(claim, 3, 0, 0, 1) + bytes(8 << 20))
        ticket, failure = answers[-1]
        assert ticket == 0
        assert isinstance(failure, wire.Failure)
        assert failure.error == "ProtocolError"
    # Of 160 MiB: what a first connection needs once, and what the collector has not seen yet.
    assert resident_bytes(store.pid) - before < 32 << 20


def test_namespaces_are_bounded_and_known_ones_stay_open(house: House) -> None:
    house.start(disk=True)
    client = house.client()
    first = ask(client, wire.OpenNamespace([["model", 0]]))
    assert isinstance(first, wire.NamespaceOpened)
    tickets = [client.submit(wire.OpenNamespace([["model", n]])) for n in range(1, 4200)]
    answers: dict[int, wire.Message] = {}
    while len(answers) < len(tickets):
        answers |= {found.ticket: found.message for found in client.poll()}
        client.wait(0.05)
    refused = [answer for answer in answers.values() if isinstance(answer, wire.Failure)]
    assert len(refused) == 4200 - 4096
    assert {answer.error for answer in refused} == {"NoSpaceError"}
    again = ask(client, wire.OpenNamespace([["model", 0]]))
    assert isinstance(again, wire.NamespaceOpened)
    assert again.namespace == first.namespace
    with pytest.raises(ebbtide.errors.MisuseError, match="too large"):
        ask(client, wire.OpenNamespace([["model", "m" * (65 << 10)]]))


def test_two_mutators_of_one_seed_make_the_same() -> None:
    one, two, three = Mutator(5), Mutator(5), Mutator(6)
    assert [one.stream() for _ in range(50)] == [two.stream() for _ in range(50)]
    assert one.stream() != three.stream()
