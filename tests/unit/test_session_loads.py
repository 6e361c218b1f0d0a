"""Loads over a session: they stream within a window, and name every key exactly once."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import pytest

from ebbtide.connectors import protocol as wire
from ebbtide.connectors import session as session_module
from ebbtide.connectors.client import ask
from ebbtide.connectors.local_client import LocalClient
from ebbtide.connectors.session import Session
from ebbtide.errors import MisuseError
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import ThreadRuntime
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
MEMORY_BYTES = 16 * MIB
WINDOW_BYTES = 2 * MIB
RECORD_BYTES = 256 << 10
WINDOW_RECORDS = WINDOW_BYTES // RECORD_BYTES


def _key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def _keys(count: int, start: int = 0) -> tuple[bytes, ...]:
    return tuple(_key(number) for number in range(start, start + count))


def _payload(key: bytes) -> bytes:
    return hashlib.sha256(key).digest() * (RECORD_BYTES // 32)


class Host:
    """A store with a disk tier, and one session whose answers pile up in `answers`."""

    def __init__(self, directory: Path) -> None:
        self.runtime = ThreadRuntime()
        self.opened = OpenDisk(self.runtime, str(directory), 128 * MIB)
        bounds = Bounds.for_capacity(
            MEMORY_BYTES, load_window_bytes=WINDOW_BYTES, write_after_s=0.0
        )
        self.store = Store(self.runtime, Arena.create(MEMORY_BYTES), self.opened.tier, bounds)
        self.answers: list[tuple[int, wire.Message]] = []
        self.session = Session(self.store, bytes(16), self._answered)
        client = LocalClient(self.store, self.runtime)
        opened = ask(client, wire.OpenNamespace([["model", "m"]]))
        assert isinstance(opened, wire.NamespaceOpened)
        self.namespace = opened.namespace
        self.writer = client

    def _answered(self, ticket: int, message: wire.Message) -> None:
        self.answers.append((ticket, message))

    def put(self, keys: tuple[bytes, ...]) -> None:
        """Store records, in whatever tiers they end up."""
        at = 0
        deadline = time.monotonic() + 20
        while at < len(keys) and time.monotonic() < deadline:
            reserve = wire.Reserve(self.namespace, RECORD_BYTES, keys[at:])
            grants = ask(self.writer, reserve)
            assert isinstance(grants, wire.Grants)
            for key, (offset, _) in zip(keys[at:], grants.grants, strict=False):
                self.store.arena.view(offset, RECORD_BYTES)[:] = _payload(key)
            ask(self.writer, wire.Commit(tuple(sequence for _, sequence in grants.grants)))
            at += len(grants.grants)
        assert at == len(keys)

    def turn_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come to be"
            self.runtime.wait(0.02)
            self.runtime.run_ready()

    def settle(self) -> None:
        """Let everything run that can run without another message."""
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < 0.1:
            self.runtime.wait(0.02)
            if self.runtime.run_ready():
                idle_since = time.monotonic()

    def batches(self, ticket: int) -> list[wire.Batch]:
        return [m for t, m in self.answers if t == ticket and isinstance(m, wire.Batch)]

    def failures(self, ticket: int) -> dict[int, int]:
        found = [m for t, m in self.answers if t == ticket and isinstance(m, wire.Failed)]
        return dict(row for message in found for row in message.failures)

    def done(self, ticket: int) -> bool:
        return (ticket, wire.Done()) in self.answers

    def check(self, keys: tuple[bytes, ...], batch: wire.Batch) -> None:
        """Every granted slot holds the bytes of its key."""
        for position, length, _, offset in batch.granted:
            assert self.store.arena.view(offset, length) == _payload(keys[position])

    def close(self) -> None:
        self.store.engine_gone(self.session.engine)
        self.writer.close()
        self.settle()
        self.store.check_integrity()
        assert self.store.memory.pinned_bytes == 0
        self.runtime.close()
        self.store.close(False)
        self.opened.close()
        assert self.runtime.faults == 0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "disk")
    yield host
    host.close()


def _load(host: Host, ticket: int, keys: tuple[bytes, ...]) -> None:
    host.session.handle(ticket, wire.LoadKeys(host.namespace, keys))


def test_a_load_streams_beyond_its_window_and_names_each_key_once(host: Host) -> None:
    keys = _keys(96)  # 24 MiB through an arena of 16 and a window of 2
    host.put(keys)
    _load(host, 5, keys)
    named: list[int] = []
    sources = set()
    acked = 0
    while not host.done(5):
        host.turn_until(lambda seen=acked: host.done(5) or len(host.batches(5)) > seen)  # type: ignore[misc]
        for batch in host.batches(5)[acked:]:
            host.check(keys, batch)
            named += [row[0] for row in batch.granted]
            sources |= {row[2] for row in batch.granted}
        unacked = sum(len(batch.granted) for batch in host.batches(5)[acked:])
        assert unacked * RECORD_BYTES <= WINDOW_BYTES
        for batch in host.batches(5)[acked:]:
            host.session.handle(0, wire.Ack(5, batch.batch))
            acked += 1
    assert sorted(named) == list(range(96))
    assert host.failures(5) == {}
    assert Place.DISK in sources


def test_without_acks_a_load_holds_its_window_and_no_more(host: Host) -> None:
    keys = _keys(3 * WINDOW_RECORDS)
    host.put(keys)
    _load(host, 1, keys)
    host.settle()
    assert sum(len(batch.granted) for batch in host.batches(1)) == WINDOW_RECORDS
    assert not host.done(1)
    host.session.handle(0, wire.Ack(1, host.batches(1)[0].batch))
    host.settle()
    assert sum(len(batch.granted) for batch in host.batches(1)) > WINDOW_RECORDS


def test_a_key_that_nobody_holds_fails_with_its_reason(host: Host) -> None:
    host.put(_keys(1))
    _load(host, 1, (_key(0), _key(500)))
    host.turn_until(lambda: host.done(1))
    assert host.failures(1) == {1: Miss.NEVER_SEEN}
    assert [row[0] for batch in host.batches(1) for row in batch.granted] == [0]


def test_a_load_of_nothing_is_done_at_once(host: Host) -> None:
    _load(host, 1, ())
    assert host.answers == [(1, wire.Done())]


def test_release_ends_a_load_but_not_the_copies_under_way(host: Host) -> None:
    keys = _keys(3 * WINDOW_RECORDS)
    host.put(keys)
    _load(host, 1, keys)
    host.settle()
    granted = [row[0] for batch in host.batches(1) for row in batch.granted]
    host.session.handle(0, wire.Release(1))
    host.settle()
    assert host.done(1)
    assert set(host.failures(1)) == set(range(len(keys))) - set(granted)
    assert set(host.failures(1).values()) == {Miss.CANCELLED}
    assert host.store.memory.pinned_bytes == WINDOW_BYTES
    for batch in host.batches(1):
        host.session.handle(0, wire.Ack(1, batch.batch))
    assert host.store.memory.pinned_bytes == 0
    _load(host, 1, keys[:1])  # the ticket is free again
    host.turn_until(lambda: host.answers.count((1, wire.Done())) == 2)


def test_a_lost_connection_frees_nothing_until_its_engine_is_gone(host: Host) -> None:
    keys = _keys(3 * WINDOW_RECORDS)
    host.put(keys)
    _load(host, 1, keys)
    host.settle()
    host.session.disconnected()
    host.settle()
    assert host.store.memory.pinned_bytes == WINDOW_BYTES
    host.store.engine_gone(host.session.engine)
    host.settle()
    assert host.store.memory.pinned_bytes == 0


def test_a_load_whose_answers_end_the_connection_is_released(host: Host) -> None:
    keys = _keys(3 * WINDOW_RECORDS)
    host.put(keys)
    session = Session(host.store, b"e" * 16, lambda ticket, message: session.disconnected())
    session.handle(1, wire.LoadKeys(host.namespace, (_key(900), *keys)))
    host.settle()
    assert host.store.stats()["loads"] == 0
    assert host.store.memory.pinned_bytes == 0


def test_a_ticket_with_an_open_load_cannot_load_again(host: Host) -> None:
    host.put(_keys(1))
    _load(host, 1, _keys(1))
    host.turn_until(lambda: host.done(1))
    _load(host, 1, _keys(1))
    failure = host.answers[-1][1]
    assert isinstance(failure, wire.Failure)
    assert failure.error == MisuseError.__name__


def test_more_open_loads_than_the_bound_are_answered_busy(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LOADS_MAX", 2)
    host.put(_keys(1))
    for ticket in (1, 2, 3):
        _load(host, ticket, _keys(1))
    host.turn_until(lambda: host.done(1) and host.done(2))
    assert host.failures(3) == {0: Miss.BUSY}
    assert host.done(3)
    host.session.handle(0, wire.Ack(1, 0))
    _load(host, 4, _keys(1))
    host.turn_until(lambda: host.done(4))
    assert host.failures(4) == {}
    host.session.handle(0, wire.Ack(2, 0))
    host.session.handle(0, wire.Ack(4, 0))
    host.settle()
    epoch = host.store.namespace(0).epoch  # type: ignore[union-attr]  # it is open
    tally = host.store.ledger.tallies.of(epoch)
    assert (tally.asked, tally.hits.total(), tally.failed_loads) == (4, 3, {Miss.BUSY: 1})


def test_an_ack_comes_twice_without_harm(host: Host) -> None:
    host.put(_keys(1))
    _load(host, 1, _keys(1))
    host.turn_until(lambda: host.done(1))
    for _ in range(2):
        host.session.handle(0, wire.Ack(1, 0))
    host.settle()  # the mover pins what it writes
    assert host.store.memory.pinned_bytes == 0


def test_a_load_to_verify_brings_the_digests_and_a_dispute_ends_its_batch(host: Host) -> None:
    keys = _keys(2)
    host.put(keys)
    host.session.handle(1, wire.LoadToVerify(host.namespace, keys))
    assert host.done(1), "nothing is waited for: memory holds them"
    (batch,) = [m for t, m in host.answers if t == 1 and isinstance(m, wire.BatchToVerify)]
    space = host.store.namespace(host.namespace)
    assert space is not None
    for position, length, source, offset, digest in batch.granted:
        view = host.store.arena.view(offset, length)
        assert source == Place.MEMORY
        assert digest == record_digest(view, record_seed(space.digest, keys[position]))
    for _ in range(2):
        host.session.handle(0, wire.Dispute(1, batch.batch, (1, 1, 9)))
    host.session.handle(0, wire.Dispute(77, 0, (0,)))
    host.settle()
    assert host.store.memory.pinned_bytes == 0
    assert host.store.ledger.counts["disputed"] == 1
    assert host.store.ledger.counts["memory_corrupt"] == 0, "its bytes are right"


def test_bytes_that_rotted_in_memory_are_not_granted(host: Host) -> None:
    host.put(_keys(1))
    _load(host, 1, _keys(1))
    host.turn_until(lambda: host.done(1))
    offset = host.batches(1)[0].granted[0][3]
    host.session.handle(0, wire.Ack(1, 0))
    host.store.arena.view(offset, 1)[0] ^= 1
    _load(host, 2, _keys(1))
    host.turn_until(lambda: host.done(2))
    served = [row[2] for batch in host.batches(2) for row in batch.granted]
    assert served == [Place.DISK] or host.failures(2) == {0: Miss.CORRUPT}
    for batch in host.batches(2):
        host.check(_keys(1), batch)
