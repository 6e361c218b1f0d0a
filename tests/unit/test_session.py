"""A session over a real store in this process: every verb, every refusal, streaming loads."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from ebbtide.connectors import protocol as wire
from ebbtide.connectors import session as session_module
from ebbtide.connectors.client import Completion, ask
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.local_client import LocalClient
from ebbtide.connectors.session import Session, failure_of
from ebbtide.errors import ConfigError, MisuseError, ProtocolError, TierUnavailableError
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.lookups import REASONS_MAX
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import ThreadRuntime
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
MEMORY_BYTES = 32 * MIB
WINDOW_BYTES = 2 * MIB
RECORD_BYTES = 256 << 10
DESCRIPTOR: list[list[object]] = [["model", "m"], ["block_size", 16]]


def _key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def _keys(count: int, start: int = 0) -> tuple[bytes, ...]:
    return tuple(_key(number) for number in range(start, start + count))


def _payload(key: bytes) -> bytes:
    return hashlib.sha256(key).digest() * (RECORD_BYTES // 32)


class Host(NamedTuple):
    """A store and one engine's client on it."""

    runtime: ThreadRuntime
    store: Store
    client: LocalClient
    namespace: int
    digest: bytes

    def put(self, keys: tuple[bytes, ...]) -> None:
        """Store the records of these keys, whole."""
        grants = self.reserve(keys)
        assert len(grants.grants) == len(keys), label_of(grants.reason)
        self.fill(keys, grants)
        sequences = tuple(sequence for _, sequence in grants.grants if sequence)
        settled = ask(self.client, wire.Commit(sequences))
        assert settled == wire.Settled(bytes(len(sequences)))

    def reserve(self, keys: tuple[bytes, ...]) -> wire.Grants:
        answer = ask(self.client, wire.Reserve(self.namespace, RECORD_BYTES, keys))
        assert isinstance(answer, wire.Grants)
        return answer

    def fill(self, keys: tuple[bytes, ...], grants: wire.Grants) -> None:
        for key, (offset, sequence) in zip(keys, grants.grants, strict=False):
            if sequence:
                self.store.arena.view(offset, RECORD_BYTES)[:] = _payload(key)

    def lookup(self, keys: tuple[bytes, ...]) -> list[int]:
        answer = ask(self.client, wire.Lookup(self.namespace, keys))
        assert isinstance(answer, wire.States)
        return list(answer.codes)

    def next(self, ticket: int) -> Completion:
        """The next answer to a ticket; others are an error here."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for completion in self.client.poll():
                assert completion.ticket == ticket
                self.held.append(completion)
            if self.held:
                return self.held.pop(0)
            self.client.wait(0.05)
        raise AssertionError("no answer")

    @property
    def held(self) -> list[Completion]:
        return _HELD.setdefault(id(self.client), [])


_HELD: dict[int, list[Completion]] = {}


def label_of(code: int) -> str:
    return Miss(code).name if code else "done"


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> bool:
    return getattr(request, "param", False) is True


@pytest.fixture
def host(tmp_path: Path, disk: bool) -> Iterator[Host]:
    runtime = ThreadRuntime()
    opened = OpenDisk(runtime, str(tmp_path / "disk"), 128 * MIB) if disk else None
    bounds = Bounds.for_capacity(MEMORY_BYTES, load_window_bytes=WINDOW_BYTES, write_after_s=0.05)
    tier = opened.tier if opened else None
    store = Store(runtime, Arena.create(MEMORY_BYTES), tier, bounds)
    client = LocalClient(store, runtime)
    opened_as = ask(client, wire.OpenNamespace(DESCRIPTOR))
    assert isinstance(opened_as, wire.NamespaceOpened)
    _HELD.clear()
    yield Host(runtime, store, client, opened_as.namespace, opened_as.digest)
    client.close()
    store.check_integrity()
    runtime.close()
    store.close(False)
    if opened is not None:
        opened.close()
    assert runtime.faults == 0


# -- namespaces, lookup ---------------------------------------------------------------------------


def test_equal_descriptors_open_one_namespace_and_others_another(host: Host) -> None:
    again = ask(host.client, wire.OpenNamespace(DESCRIPTOR))
    other = ask(host.client, wire.OpenNamespace([["model", "n"]]))
    assert isinstance(again, wire.NamespaceOpened)
    assert isinstance(other, wire.NamespaceOpened)
    assert again.namespace == host.namespace
    assert other.namespace != host.namespace
    assert len(other.digest) == 32


def test_opening_tells_what_the_store_holds_already(host: Host) -> None:
    host.put(_keys(3))
    again = ask(host.client, wire.OpenNamespace(DESCRIPTOR))
    assert isinstance(again, wire.NamespaceOpened)
    assert (again.records, again.bytes) == (3, 3 * RECORD_BYTES)


def test_a_key_is_never_seen_then_pending_then_in_memory(host: Host) -> None:
    keys = _keys(2)
    assert host.lookup(keys) == [Miss.NEVER_SEEN] * 2
    grants = host.reserve(keys[:1])
    assert host.lookup(keys) == [Place.PENDING, Miss.NEVER_SEEN]
    ask(host.client, wire.Commit((grants.grants[0][1],)))
    assert host.lookup(keys) == [Place.MEMORY, Miss.NEVER_SEEN]


def test_a_pending_namespace_answers_every_key_with_its_reason(host: Host) -> None:
    answer = ask(host.client, wire.OpenNamespace([["model", "later"]], pending=True))
    assert isinstance(answer, wire.NamespaceOpened)
    states = ask(host.client, wire.Lookup(answer.namespace, _keys(2)))
    assert states == wire.States(bytes([Miss.NAMESPACE_PENDING]) * 2)
    grants = ask(host.client, wire.Reserve(answer.namespace, 4096, _keys(2)))
    assert grants == wire.Grants(Miss.NAMESPACE_PENDING, ())


def test_an_empty_lookup_has_an_empty_answer(host: Host) -> None:
    assert host.lookup(()) == []


def test_a_lookup_of_65536_keys_is_answered(host: Host) -> None:
    """A chain is of use up to its first gap: only the first gaps' reasons are looked up."""
    behind = [Miss.BEHIND_MISS] * (wire.KEYS_MAX - REASONS_MAX)
    assert host.lookup(_keys(wire.KEYS_MAX)) == [Miss.NEVER_SEEN] * REASONS_MAX + behind


@pytest.mark.parametrize(
    "message",
    [
        wire.Lookup(99, _keys(1)),
        wire.Reserve(99, 4096, _keys(1)),
        wire.LoadKeys(99, _keys(1)),
        wire.Pin(99, _keys(1)),
        wire.Unpin(99, _keys(1)),
        wire.Reset(99),
    ],
)
def test_an_unknown_namespace_is_a_failure_that_says_what_to_do(
    host: Host, message: wire.Message
) -> None:
    completion = host.next(host.client.submit(message))
    assert completion.final
    assert isinstance(completion.message, wire.Failure)
    assert completion.message.error == "MisuseError"
    assert "Open the namespace" in completion.message.next_step


def test_a_descriptor_that_names_a_property_of_the_process_is_refused(host: Host) -> None:
    with pytest.raises(MisuseError, match="process"):
        ask(host.client, wire.OpenNamespace([["port", 8000]]))


# -- reserve, commit, abort -----------------------------------------------------------------------


@pytest.mark.parametrize(("size", "error"), [(0, MisuseError), (MEMORY_BYTES, ConfigError)])
def test_a_record_that_no_slot_can_hold_is_refused(
    host: Host, size: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(host.client, wire.Reserve(host.namespace, size, _keys(1)))


def test_a_held_or_pending_key_needs_nothing(host: Host) -> None:
    host.put(_keys(1))
    grants = host.reserve((_key(0), _key(1), _key(1)))
    assert [sequence != 0 for _, sequence in grants.grants] == [False, True, False]
    ask(host.client, wire.Abort((grants.grants[1][1],)))


def test_a_full_arena_grants_a_prefix_and_says_why_it_stopped(host: Host) -> None:
    keys = _keys(MEMORY_BYTES // RECORD_BYTES + 8)
    grants = host.reserve(keys)
    assert grants.reason == Miss.BUSY
    assert 0 < len(grants.grants) < len(keys)
    assert all(sequence for _, sequence in grants.grants)


def test_only_the_engine_that_reserved_can_commit_or_abort(host: Host) -> None:
    sequence = host.reserve(_keys(1)).grants[0][1]
    stranger = LocalClient(host.store, host.runtime)
    unknown = wire.Settled(bytes([Miss.UNKNOWN]))
    assert ask(stranger, wire.Commit((sequence,))) == unknown
    assert ask(stranger, wire.Abort((sequence,))) == unknown
    stranger.close()
    assert host.lookup(_keys(1)) == [Place.PENDING]
    sibling = LocalClient(host.store, host.runtime, host.client.engine)
    assert ask(sibling, wire.Commit((sequence,))) == wire.Settled(b"\0")
    assert host.lookup(_keys(1)) == [Place.MEMORY]


def test_an_aborted_slot_was_never_there(host: Host) -> None:
    sequence = host.reserve(_keys(1)).grants[0][1]
    assert ask(host.client, wire.Abort((sequence, 77))) == wire.Settled(bytes([0, Miss.UNKNOWN]))
    assert host.lookup(_keys(1)) == [Miss.NEVER_SEEN]
    assert ask(host.client, wire.Commit((sequence,))) == wire.Settled(bytes([Miss.UNKNOWN]))


def test_a_slot_is_committed_once(host: Host) -> None:
    grants = host.reserve(_keys(1))
    sequence = grants.grants[0][1]
    answer = ask(host.client, wire.Commit((sequence, sequence)))
    assert answer == wire.Settled(bytes([0, Miss.UNKNOWN]))


def test_digests_of_the_client_are_committed_in_their_order(host: Host) -> None:
    keys = _keys(3)
    grants = host.reserve(keys)
    host.fill(keys, grants)
    rows = [
        (sequence, record_digest(_payload(key), record_seed(host.digest, key)))
        for key, (_, sequence) in zip(keys, grants.grants, strict=True)
    ]
    many = [(2**40 + number, bytes(16)) for number in range(session_module.PIECE)]
    answer = ask(host.client, wire.CommitDigests((*rows, rows[0], *many)))
    assert answer == wire.Settled(bytes(3) + bytes([Miss.UNKNOWN]) * (1 + len(many)))
    ticket = host.client.submit(wire.LoadKeys(host.namespace, keys))
    granted = host.next(ticket).message  # verified by the store: the digests are right
    assert isinstance(granted, wire.Batch)
    assert [row[0] for row in granted.granted] == [0, 1, 2]
    assert ask(host.client, wire.CommitDigests(())) == wire.Settled(b"")


# -- the rarer verbs ------------------------------------------------------------------------------


def test_pin_and_unpin_count_what_they_did(host: Host) -> None:
    host.put(_keys(2))
    assert ask(host.client, wire.Pin(host.namespace, _keys(3))) == wire.Ok(2)
    assert ask(host.client, wire.Unpin(host.namespace, _keys(3))) == wire.Ok(2)
    assert ask(host.client, wire.Unpin(host.namespace, _keys(3))) == wire.Ok(0)


@pytest.mark.parametrize("disk", [False, True], indirect=True)
@pytest.mark.parametrize("every", [False, True])
def test_after_a_reset_no_old_key_is_served(host: Host, every: bool) -> None:
    host.put(_keys(2))
    target = wire.ALL_NAMESPACES if every else host.namespace
    assert ask(host.client, wire.Reset(target)) == wire.Ok()
    assert host.lookup(_keys(2)) == [Miss.RESET] * 2


@pytest.mark.parametrize("disk", [False, True], indirect=True)
def test_flush_answers_when_everything_is_durable(host: Host) -> None:
    host.put(_keys(2))
    assert ask(host.client, wire.Flush()) == wire.Ok()


@pytest.mark.parametrize(("verb", "message"), [("flush", wire.Flush()), ("reset", wire.Reset())])
def test_what_was_not_made_durable_is_a_failure(
    host: Host, monkeypatch: pytest.MonkeyPatch, verb: str, message: wire.Message
) -> None:
    monkeypatch.setattr(host.store, verb, lambda *args: args[-1](False))
    with pytest.raises(TierUnavailableError, match="durable"):
        ask(host.client, message)


@pytest.mark.parametrize("disk", [False, True], indirect=True)
def test_stats_fit_the_wire(host: Host) -> None:
    host.put(_keys(2))
    report = ask(host.client, wire.Stats())
    assert isinstance(report, wire.Report)
    assert report.report["memory"]["records"] == 2
    assert wire.Decoder().feed(wire.encode(1, report)) == [(1, report)]


def test_events_come_in_order_from_where_the_client_stopped(host: Host) -> None:
    host.put(_keys(3))
    report = ask(host.client, wire.Events(0))
    assert isinstance(report, wire.Report)
    rows = report.report["events"]
    assert [row[1:] for row in rows] == [["stored", 1, key, "memory"] for key in _keys(3)]
    assert wire.Decoder().feed(wire.encode(1, report)) == [(1, report)]
    rest = ask(host.client, wire.Events(rows[1][0]))
    assert isinstance(rest, wire.Report)
    assert rest.report["events"] == rows[2:]


def test_one_answer_has_a_bounded_number_of_events(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "EVENTS_MAX", 2)
    host.put(_keys(3))
    report = ask(host.client, wire.Events(0))
    assert isinstance(report, wire.Report)
    assert len(report.report["events"]) == 2


# -- messages that end a connection, and those without an answer ----------------------------------


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        (0, wire.Lookup(0, ())),
        (0, wire.Stats()),
        (1, wire.Hello(bytes(16), "worker", False)),
        (1, wire.Ok()),
        (1, wire.Done()),
    ],
)
def test_what_a_client_may_not_send_is_a_protocol_error(
    host: Host, ticket: int, message: wire.Message
) -> None:
    session = Session(host.store, bytes(16), lambda ticket, message: None)
    with pytest.raises(ProtocolError):
        session.handle(ticket, message)


@pytest.mark.parametrize(
    "message", [wire.Touch(99, _keys(1)), wire.Ack(99, 0), wire.Release(99), wire.Touch(0, ())]
)
def test_messages_without_an_answer_have_no_failure_either(
    host: Host, message: wire.Message
) -> None:
    host.client.notify(message)
    assert host.client.poll() == []


def test_a_failure_quotes_the_client_only_so_far() -> None:
    failure = failure_of(MisuseError("No", next_step="Stop.", got="x" * 100_000))
    assert failure.error == "MisuseError"
    assert failure.next_step == "Stop."
    assert len(failure.problem) == session_module.PROBLEM_CHARACTERS_MAX


# -- the client in this process -------------------------------------------------------------------


@pytest.mark.parametrize("key", [bytes(33), 5, "text"])
def test_the_local_client_refuses_what_no_socket_would_carry(host: Host, key: object) -> None:
    message = wire.Lookup(host.namespace, (key,))  # type: ignore[arg-type]
    with pytest.raises(MisuseError):
        ask(host.client, message)
    host.client.notify(wire.Touch(host.namespace, (key,)))  # type: ignore[arg-type]
    assert host.lookup(_keys(1)) == [Miss.NEVER_SEEN]


def test_a_closed_local_client_gave_back_what_it_held_and_only_misses(host: Host) -> None:
    leaver = LocalClient(host.store, host.runtime)
    ask(leaver, wire.Reserve(host.namespace, RECORD_BYTES, _keys(4)))
    assert host.lookup(_keys(4)) == [Place.PENDING] * 4
    leaver.close()
    leaver.close()
    assert host.lookup(_keys(4)) == [Miss.NEVER_SEEN] * 4
    assert host.store.memory.reserved_bytes == 0
    leaver.notify(wire.Touch(host.namespace, _keys(1)))
    ticket = leaver.submit(wire.Lookup(host.namespace, _keys(1)))
    assert leaver.poll() == [Completion(ticket, LOST, True)]
