"""One client's messages against the store: the same code behind a socket and in-process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ebbtide.connectors import protocol as wire
from ebbtide.errors import EbbtideError, MisuseError, ProtocolError
from ebbtide.tiers.reasons import Miss, label

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ebbtide.tiers.load import Granted, Load
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.reservations import Grant
    from ebbtide.tiers.store import Store

T = TypeVar("T")

PIECE = 64  # keys or sequences that are dealt with in one go: a millisecond or two
LOADS_MAX = 1024  # open loads of one client; more are answered BUSY
EVENTS_MAX = 4096  # events in one answer
PROBLEM_CHARACTERS_MAX = 1000  # of a failure's text: it may quote what the client sent


class _LoadReplies:
    """Turns what a load reports into messages with the load's ticket."""

    def __init__(self, session: Session, ticket: int, *, to_verify: bool) -> None:
        self._session = session
        self._ticket = ticket
        self._to_verify = to_verify

    def batch(self, batch: int, granted: list[Granted]) -> None:
        message: wire.Message
        if self._to_verify:
            message = wire.BatchToVerify(batch, tuple(granted))
        else:
            message = wire.Batch(batch, tuple(row[:-1] for row in granted))
        self._session.send(self._ticket, message)

    def failed(self, failures: list[tuple[int, Miss]]) -> None:
        rows = tuple((position, int(reason)) for position, reason in failures)
        self._session.send(self._ticket, wire.Failed(rows))

    def done(self) -> None:
        self._session.send(self._ticket, wire.Done())

    def over(self) -> None:
        self._session.load_over(self._ticket)


class Session:
    """`handle` each message of a client; answers go to `send(ticket, message)`, some later.

    Control thread only. Errors of a request become its FAILURE answer; only a ProtocolError is
    raised, because it ends the connection.
    """

    def __init__(
        self, store: Store, engine: bytes, send: Callable[[int, wire.Message], None]
    ) -> None:
        self.store = store
        self.engine = engine
        self.send = send
        self._loads: dict[int, Load] = {}
        self._gone = False

    def handle(self, ticket: int, message: wire.Message) -> None:
        """Act on one message."""
        for _ in self.pieces(ticket, message):
            pass

    def pieces(self, ticket: int, message: wire.Message) -> Generator[None, None, None]:
        """Act on one message, in pieces of about a millisecond. A half-done one can be closed."""
        check_request(ticket, message)
        try:
            if isinstance(message, wire.Reserve):
                yield from self._reserve(ticket, message)
            elif isinstance(message, wire.Commit):
                yield from self._commit(ticket, message)
            elif isinstance(message, wire.CommitDigests):
                yield from self._commit_digests(ticket, message)
            else:
                self._dispatch(ticket, message)
        except ProtocolError:
            raise
        except EbbtideError as error:
            if message.answered:  # a message without an answer has no failure either
                self.send(ticket, failure_of(error))

    def disconnected(self) -> None:
        """The connection is gone. What it was granted stays pinned: its process may copy."""
        self._gone = True
        for load in list(self._loads.values()):
            load.release()

    def _dispatch(self, ticket: int, message: wire.Message) -> None:
        store, reply = self.store, self.send
        match message:
            case wire.Lookup():
                states = store.lookup(self._namespace(message.namespace), message.keys)
                reply(ticket, wire.States(states))
            case wire.Touch():
                store.touch(self._namespace(message.namespace), message.keys)
            case wire.Abort():
                reply(ticket, wire.Settled(store.abort(self.engine, message.sequences)))
            case wire.LoadKeys():
                self._load(ticket, message, to_verify=False)
            case wire.LoadToVerify():
                self._load(ticket, message, to_verify=True)
            case wire.Ack():
                load = self._loads.get(message.load_ticket)
                if load is not None:
                    load.ack(message.batch)
            case wire.Dispute():
                load = self._loads.get(message.load_ticket)
                if load is not None:
                    load.dispute(message.batch, message.rows)
            case wire.Release():
                load = self._loads.get(message.load_ticket)
                if load is not None:
                    load.release()
            case wire.OpenNamespace():
                self._open_namespace(ticket, message)
            case _:
                self._rare(ticket, message)

    def _rare(self, ticket: int, message: wire.Message) -> None:
        store, reply = self.store, self.send
        match message:
            case wire.Reset():
                every = message.namespace == wire.ALL_NAMESPACES
                target = None if every else self._namespace(message.namespace)
                store.reset(target, lambda ok: reply(ticket, _done_or_down(ok)))
            case wire.Pin():
                count = store.pin(self.engine, self._namespace(message.namespace), message.keys)
                reply(ticket, wire.Ok(count))
            case wire.Unpin():
                count = store.unpin(self.engine, self._namespace(message.namespace), message.keys)
                reply(ticket, wire.Ok(count))
            case wire.Stats():
                reply(ticket, wire.Report(store.stats()))
            case wire.Events():
                self._events(ticket, message.since)
            case wire.Flush():
                store.flush(lambda ok: reply(ticket, _done_or_down(ok)))
            case wire.Describe():
                store.care.surveys.describe(message.start, self._report_to(ticket))
            case wire.Purge():
                store.care.purges.purge(message.namespace, self._report_to(ticket))
            case wire.Check():
                store.care.checks.check(message.start, self._report_to(ticket))
            case wire.Find():
                self._find(ticket, message)
            case wire.PinRecords():
                store.care.keeps.keep(message.namespace, message.keys, self._report_to(ticket))
            case wire.UnpinRecords():
                store.care.keeps.let_go(message.namespace, message.keys, self._report_to(ticket))
            case _:
                raise AssertionError(message)  # `check_request` lets no other kind in

    def _namespace(self, handle: int) -> Namespace:
        namespace = self.store.namespace(handle)
        if namespace is None:
            raise MisuseError(
                "The namespace handle is unknown to this store",
                next_step="Open the namespace on every new connection.",
                handle=handle,
            )
        return namespace

    def _open_namespace(self, ticket: int, message: wire.OpenNamespace) -> None:
        namespace = self.store.open_namespace(message.descriptor, pending=message.pending)
        self._opened(ticket, namespace)

    def _find(self, ticket: int, message: wire.Find) -> None:
        self._opened(ticket, self.store.find_namespace(message.namespace))

    def _opened(self, ticket: int, namespace: Namespace) -> None:
        records, held_bytes = self.store.held(namespace)
        opened = wire.NamespaceOpened(namespace.handle, namespace.digest, records, held_bytes)
        self.send(ticket, opened)

    def _reserve(self, ticket: int, message: wire.Reserve) -> Generator[None, None, None]:
        grants: list[Grant] = []
        reason: Miss | None = None
        try:
            for keys in _pieces(message.keys):
                namespace = self._namespace(message.namespace)
                some, reason = self.store.reserve(
                    self.engine, namespace, keys, message.record_bytes
                )
                grants += some
                if reason is not None:
                    break
                if len(grants) < len(message.keys):
                    yield
        except GeneratorExit:  # nobody will ever hear of these
            self.store.abort(self.engine, [grant.sequence for grant in grants if grant.sequence])
            raise
        self.send(ticket, wire.Grants(int(reason or 0), tuple(grants)))

    def _commit(self, ticket: int, message: wire.Commit) -> Generator[None, None, None]:
        parts = _pieces(message.sequences)
        answers, outstanding = [b""] * len(parts), len(parts)

        def settle(number: int) -> Callable[[bytes], None]:
            def settled(codes: bytes) -> None:
                nonlocal outstanding
                answers[number] = codes
                outstanding -= 1
                if not outstanding:
                    self.send(ticket, wire.Settled(b"".join(answers)))

            return settled

        for number, sequences in enumerate(parts):
            self.store.commit(self.engine, sequences, settle(number))
            if number + 1 < len(parts):
                yield

    def _commit_digests(
        self, ticket: int, message: wire.CommitDigests
    ) -> Generator[None, None, None]:
        codes = b""
        for rows in _pieces(message.digests):
            codes += self.store.commit_digests(self.engine, rows)
            if len(codes) < len(message.digests):
                yield
        self.send(ticket, wire.Settled(codes))

    def _load(
        self, ticket: int, message: wire.LoadKeys | wire.LoadToVerify, *, to_verify: bool
    ) -> None:
        namespace = self._namespace(message.namespace)
        replies = _LoadReplies(self, ticket, to_verify=to_verify)
        if ticket in self._loads:
            raise MisuseError("A load with this ticket is still open", ticket=ticket)
        if len(self._loads) >= LOADS_MAX:
            self.store.loads.refused(namespace, message.keys)
            replies.failed([(position, Miss.BUSY) for position in range(len(message.keys))])
            replies.done()
            return
        load = self.store.load(self.engine, namespace, message.keys, replies, to_verify=to_verify)
        if not load.over:
            self._loads[ticket] = load
        if self._gone:  # its first answers were too many for a client that does not read
            load.release()

    def load_over(self, ticket: int) -> None:
        """A load holds nothing any more."""
        self._loads.pop(ticket, None)

    def _report_to(self, ticket: int) -> Callable[[dict[str, Any] | EbbtideError], None]:
        """Whoever calls it answers the ticket."""

        def report(found: dict[str, Any] | EbbtideError) -> None:
            if isinstance(found, EbbtideError):
                self.send(ticket, failure_of(found))
            else:
                self.send(ticket, wire.Report(found))

        return report

    def _events(self, ticket: int, since: int) -> None:
        events = self.store.ledger.events_since(since)[:EVENTS_MAX]
        rows = [[e.sequence, e.kind, e.epoch, e.key, label(e.place)] for e in events]
        self.send(ticket, wire.Report({"events": rows}))


def _pieces(items: tuple[T, ...]) -> list[tuple[T, ...]]:
    """At least one, which may be empty."""
    return [items[at : at + PIECE] for at in range(0, len(items) or 1, PIECE)]


def check_request(ticket: int, message: wire.Message) -> None:
    """Raise ProtocolError for what no client may send in a session, and for a request whose answer
    nobody could tell from another.
    """
    if isinstance(message, wire.Hello) or not isinstance(message, wire.REQUESTS):
        raise ProtocolError("A client may not send this kind", kind=message.kind)
    if message.answered and not ticket:
        raise ProtocolError("A request needs a ticket for its answer", kind=message.kind)


def failure_of(error: EbbtideError) -> wire.Failure:
    """The FAILURE message that carries an error to the peer."""
    context = ", ".join(f"{name}={value}" for name, value in error.context.items())
    problem = f"{error.problem} ({context})" if context else error.problem
    return wire.Failure(type(error).__name__, problem[:PROBLEM_CHARACTERS_MAX], error.next_step)


def _done_or_down(ok: bool) -> wire.Message:
    if ok:
        return wire.Ok()
    return wire.Failure("TierUnavailableError", "The disk tier is down; nothing was made durable")
