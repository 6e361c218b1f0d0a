"""The client: `submit(message) -> ticket`, `poll() -> completions`. Never waits, never raises for a
lost store: requests that cannot be answered complete with a `Failure`.

`SocketClient` talks to a store's process, `LocalClient` to a store in this process; both are used
from one thread. Usable by a scheduler that has no event loop.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.session import Session
from ebbtide.errors import EbbtideError, ProtocolError, TierUnavailableError
from ebbtide.tiers.arena import Arena

if TYPE_CHECKING:
    from ebbtide.tiers.runtime import ThreadRuntime
    from ebbtide.tiers.store import Store

HANDSHAKE_TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
OUTBOX_BYTES_MAX = 2 * wire.FRAME_BYTES_MAX
RECEIVE_BYTES = 256 << 10
STREAMING = (wire.Batch, wire.Failed)  # answers that more answers follow

LOST = wire.Failure("TierUnavailableError", "The store is not reachable; this is a miss")
CROWDED = wire.Failure("NoSpaceError", "The store does not keep up; this is a miss")


class Completion(NamedTuple):
    """An answer. `final`: no more will come for the ticket."""

    ticket: int
    message: wire.Message
    final: bool


class Client(Protocol):
    """What the halves of a connector use. One thread; no call waits except `wait`."""

    @property
    def incarnation(self) -> int:
        """Rises with every store that was reached: handles and slots of an older one are void."""
        ...

    @property
    def arena_generation(self) -> int:
        """Which arena the offsets of this store belong to."""
        ...

    @property
    def arena(self) -> Arena | None:
        """The mapped arena of the present store; None while there is none."""
        ...

    @property
    def load_window_bytes(self) -> int:
        """How much one load may hold unacknowledged."""
        ...

    def submit(self, message: wire.Message) -> int:
        """Send a request. Answers come from `poll`, also when the store is away."""
        ...

    def notify(self, message: wire.Message) -> None:
        """Send a message that has no answer (touch, ack, release)."""
        ...

    def poll(self) -> list[Completion]:
        """Everything that has been answered since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` may have something. Not for scheduler hooks."""
        ...

    def close(self) -> None: ...


class LocalClient:
    """A client of a store in the same process, for tests, simulations and benchmarks."""

    def __init__(self, store: Store, runtime: ThreadRuntime, engine: bytes | None = None) -> None:
        self.incarnation = 1
        self.arena_generation = 1
        self.arena: Arena | None = store.arena
        self.load_window_bytes = store.bounds.load_window_bytes
        self._runtime = runtime
        self._completions: deque[Completion] = deque()
        self._tickets = itertools.count(1)
        self._session = Session(store, engine or os.urandom(16), self._receive)

    @property
    def engine(self) -> bytes:
        return self._session.engine

    def submit(self, message: wire.Message) -> int:
        ticket = next(self._tickets)
        self._session.handle(ticket, message)
        return ticket

    def notify(self, message: wire.Message) -> None:
        self._session.handle(0, message)

    def poll(self) -> list[Completion]:
        self._runtime.run_ready()
        completions, self._completions = self._completions, deque()
        return list(completions)

    def wait(self, timeout_s: float) -> None:
        if not self._completions:
            self._runtime.wait(timeout_s)

    def close(self) -> None:
        """The store stays open. What this client held is given back: no process of it lives on."""
        self._session.store.engine_gone(self.engine)
        self.arena = None

    def _receive(self, ticket: int, message: wire.Message) -> None:
        self._completions.append(Completion(ticket, message, not isinstance(message, STREAMING)))


class SocketClient:
    """A client of a store's process. Reconnects by itself, with backoff; misses meanwhile."""

    def __init__(self, path: str, engine: bytes, role: str, *, arena: bool) -> None:
        """Connects at once. Raises TierUnavailableError when nobody answers within 10 s."""
        self.path = path
        self.engine = engine
        self.incarnation = 0
        self.arena_generation = 0
        self.arena: Arena | None = None
        self.load_window_bytes = 0
        self._role = role
        self._wants_arena = arena
        self._socket: socket.socket | None = None
        self._decoder = wire.Decoder()
        self._outbox = bytearray()
        self._fds: list[int] = []
        self._greeted = False
        self._closed = False
        self._retry_at = 0.0
        self._backoff_s = BACKOFF_FIRST_S
        self._tickets = itertools.count(1)
        self._open: set[int] = set()
        self._completions: deque[Completion] = deque()
        self._greet(time.monotonic() + HANDSHAKE_TIMEOUT_S)

    @property
    def connected(self) -> bool:
        """A store has answered the greeting and not gone away since, as far as is known."""
        return self._greeted

    def submit(self, message: wire.Message) -> int:
        ticket = next(self._tickets)
        if not self._greeted:
            self._completions.append(Completion(ticket, LOST, True))
        elif len(self._outbox) > OUTBOX_BYTES_MAX:
            self._completions.append(Completion(ticket, CROWDED, True))
        else:
            self._open.add(ticket)
            self._send(ticket, message)
        return ticket

    def notify(self, message: wire.Message) -> None:
        if self._greeted:
            self._send(0, message)

    def poll(self) -> list[Completion]:
        if self._socket is None and not self._closed and time.monotonic() >= self._retry_at:
            self._connect()
        self._flush()
        self._receive()
        completions, self._completions = self._completions, deque()
        return list(completions)

    def wait(self, timeout_s: float) -> None:
        if self._completions:
            return
        if self._socket is None:
            time.sleep(min(timeout_s, BACKOFF_FIRST_S))
            return
        writing = [self._socket] if self._outbox else []
        select.select([self._socket], writing, [], timeout_s)

    def close(self) -> None:
        """Leave. The store takes back what this process held when the process exits."""
        self._closed = True
        self._lose()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    # -- inside ---------------------------------------------------------------------------------

    def _greet(self, deadline: float) -> None:
        self._connect()
        while not self._greeted:
            if time.monotonic() > deadline or (self._socket is None and self._refused):
                self.close()
                raise TierUnavailableError(
                    "No store answers on the socket",
                    next_step="Start one with `ebbtide serve`, or check its log.",
                    socket=self.path,
                )
            self.wait(0.05)
            self.poll()

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        self._refused = False
        try:
            connection.connect(self.path)
        except OSError as error:
            connection.close()
            # A full backlog (EAGAIN) is a store that is busy starting; anything else is no store.
            self._refused = not isinstance(error, BlockingIOError)
            self._retry_at = time.monotonic() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
            return
        self._socket = connection
        self._decoder = wire.Decoder()
        self._send(0, wire.Hello(self.engine, self._role, self._wants_arena))

    def _send(self, ticket: int, message: wire.Message) -> None:
        self._outbox += wire.encode(ticket, message)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._socket is not None:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            del self._outbox[:sent]

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, RECEIVE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            self._fds.extend(fds)
            if not data:
                self._lose()
                return
            try:
                messages = self._decoder.feed(data)
            except ProtocolError:
                self._lose()
                return
            for ticket, message in messages:
                self._take(ticket, message)

    def _take(self, ticket: int, message: wire.Message) -> None:
        if isinstance(message, wire.Welcome):
            self._welcomed(message)
        elif ticket in self._open:
            final = not isinstance(message, STREAMING)
            if final:
                self._open.discard(ticket)
            self._completions.append(Completion(ticket, message, final))
        elif isinstance(message, wire.Failure) and ticket == 0:
            self._lose()

    def _welcomed(self, welcome: wire.Welcome) -> None:
        """The lost arena is unmapped before the new one is attached: its offsets are void."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self._wants_arena:
            if not self._fds:
                self._lose()
                return
            self.arena = Arena.attach(self._fds.pop(0))
        self.arena_generation = welcome.arena_generation
        self.load_window_bytes = welcome.load_window_bytes
        self.incarnation += 1
        self._greeted = True
        self._backoff_s = BACKOFF_FIRST_S

    def _lose(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
        self._greeted = False
        self._outbox.clear()
        self._retry_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        lost, self._open = self._open, set()
        self._completions.extend(Completion(ticket, LOST, True) for ticket in sorted(lost))


def ask(client: Client, message: wire.Message, timeout_s: float = 10.0) -> wire.Message:
    """Submit and wait for the one answer: for tools and tests, never for a scheduler hook.

    Raises the error that a Failure carries, and TierUnavailableError after `timeout_s`. Other
    completions that arrive meanwhile are lost: use it on a client with nothing else open.
    """
    ticket = client.submit(message)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for completion in client.poll():
            if completion.ticket == ticket and completion.final:
                if isinstance(completion.message, wire.Failure):
                    raise error_of(completion.message)
                return completion.message
        client.wait(0.05)
    raise TierUnavailableError("The store did not answer in time", timeout_s=timeout_s)


def error_of(failure: wire.Failure) -> EbbtideError:
    """The error that a Failure carries."""
    kinds = {kind.__name__: kind for kind in _all_errors(EbbtideError)}
    return kinds.get(failure.error, EbbtideError)(failure.problem, next_step=failure.next_step)


def _all_errors(base: type[EbbtideError]) -> list[type[EbbtideError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in _all_errors(child))]
