"""The client that talks to a store's process, over its socket. Used from one thread."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import select
import socket
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import (
    CROWDED,
    LOST,
    STREAMING,
    Client,
    Completion,
    ask,
    error_of,
)
from ebbtide.connectors.endpoint import peer_uid, receive_with_fds, trusted
from ebbtide.connectors.session import failure_of
from ebbtide.errors import MisuseError, ProtocolError, TierUnavailableError
from ebbtide.tiers.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Client", "Completion", "SocketClient", "ask", "error_of"]

_log = logging.getLogger("ebbtide.client")

HANDSHAKE_TIMEOUT_S = 10.0
HANDSHAKE_BYTES = 4096
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
OUTBOX_BYTES_MAX = 2 * wire.FRAME_BYTES_MAX
RECEIVE_BYTES = 64 << 10


class SocketClient:
    """A client of a store's process. Reconnects by itself, with backoff; misses meanwhile.

    It belongs to the process that made it. A forked child inherits one that is closed: two
    processes on one connection would send halves of each other's frames, and the store watches
    over the slots of a process, not over those of its children.
    """

    def __init__(
        self,
        path: str,
        engine: bytes,
        role: str,
        *,
        arena: bool,
        required: bool = True,
        allow_uids: Collection[int] = (),
    ) -> None:
        """`allow_uids`: whose store is trusted, besides this user's and root's.

        Connects at once. Raises TierUnavailableError when nobody answers within 10 s, or with
        the store's own words when it refuses this client. Not `required`: it is then tried again
        by `poll`, and everything is a miss until a store answers.
        """
        self.path = path
        self.engine = engine
        self.incarnation = 0
        self.arena_generation = 0
        self.arena: Arena | None = None
        self.load_window_bytes = 0
        self.protocol = (0, 0)  # that the store speaks
        self._hello = wire.encode(0, wire.Hello(engine, role, arena))
        self._wants_arena = arena
        self._allow_uids = frozenset(allow_uids)
        self._frame_bytes_max = wire.FRAME_BYTES_MAX
        self._socket: socket.socket | None = None
        self._poller = select.poll()
        self._decoder = wire.Decoder()
        self._outbox = bytearray()
        self._inbox = memoryview(bytearray(RECEIVE_BYTES))
        self._fds: list[int] = []
        self._greeted = False
        self._closed = False
        self._goodbye = ""  # why the last connection ended, in the store's words
        self._retry_at = 0.0
        self._backoff_s = BACKOFF_FIRST_S
        self._tickets = itertools.count(1)
        self._open: set[int] = set()
        self._completions: deque[Completion] = deque()
        _of_this_process.add(self)
        if required:
            self._greet(time.monotonic() + HANDSHAKE_TIMEOUT_S)
        else:
            self._connect()

    @property
    def connected(self) -> bool:
        """A store has answered the greeting and not gone away since, as far as is known."""
        return self._greeted

    def fileno(self) -> int | None:
        """Of the connection, for an event loop that waits until it can be read. None: there is
        none now.
        """
        return None if self._socket is None else self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Something waits for the store to read: `poll` sends it on."""
        return bool(self._outbox)

    def submit(self, message: wire.Message) -> int:
        ticket = next(self._tickets)
        refusal = self._refusal()
        if refusal is None:
            try:
                frame = wire.encode(ticket, message, self._frame_bytes_max)
            except MisuseError as error:
                refusal = failure_of(error)
            else:
                self._open.add(ticket)
                self._send(frame)
        if refusal is not None:
            self._completions.append(Completion(ticket, refusal, True))
        return ticket

    def notify(self, message: wire.Message) -> None:
        # Acks and releases are few and small and free the store's slots; a touch can be spared.
        if self._refusal() is None or (self._greeted and not isinstance(message, wire.Touch)):
            try:
                frame = wire.encode(0, message, self._frame_bytes_max)
            except MisuseError as error:
                _log.warning("A message was not sent: %s", error)
            else:
                self._send(frame)

    def poll(self) -> list[Completion]:
        if self._socket is None and not self._closed and time.monotonic() >= self._retry_at:
            self._connect()
        if self._outbox:
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
        events = select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN
        self._poller.modify(self._socket, events)
        self._poller.poll(timeout_s * 1000)

    def close(self) -> None:
        """Leave. The store takes back what this process held when the process exits. Idempotent."""
        self._closed = True
        self._lose()
        self._unmap()

    def leave_to_parent(self) -> None:
        """In a forked child: the connection and the arena are the parent's."""
        self._closed = True
        self._lose()
        self.arena = None  # unmapped with the process: views of it may be in use

    # -- inside ---------------------------------------------------------------------------------

    def _refusal(self) -> wire.Failure | None:
        if not self._greeted:
            return LOST
        return CROWDED if len(self._outbox) > OUTBOX_BYTES_MAX else None

    def _greet(self, deadline: float) -> None:
        self._connect()
        while not self._greeted:
            if self._goodbye or time.monotonic() > deadline:
                self.close()
                raise TierUnavailableError(
                    self._goodbye or "No store answers on the socket",
                    next_step="Start one with `ebbtide serve`, or read its log.",
                    socket=self.path,
                )
            self.wait(0.05)
            self.poll()

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(self.path)
        except BlockingIOError:  # its backlog is full: a store that is busy
            connection.close()
            self._retry_later()
            return
        except OSError as error:
            connection.close()
            self._part(f"No store listens on the socket ({error.strerror})")
            return
        if not trusted(connection, self._allow_uids):
            uid = peer_uid(connection)
            connection.close()
            self._part(f"The store is of another user ({uid}), who is not in [server] allow_uids")
            return
        self._socket = connection
        self._poller.register(connection, select.POLLIN)
        self._decoder = wire.Decoder()
        self._send(self._hello)

    def _send(self, frame: bytes) -> None:
        self._outbox += frame
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._socket is not None:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                self._receive()  # a store that ends a connection says why
                if self._socket is not None:
                    self._part(f"The connection broke ({error.strerror})")
                return
            del self._outbox[:sent]

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._read(self._socket)
            except BlockingIOError:
                return
            except OSError as error:
                self._part(f"The connection broke ({error.strerror})")
                return
            if not data:
                self._part("The store closed the connection")
                return
            try:
                messages = self._decoder.feed(data)
            except ProtocolError as error:
                self._part(f"The store does not keep to the protocol: {error}")
                return
            for ticket, message in messages:
                self._take(ticket, message)
            if self._greeted and len(data) < RECEIVE_BYTES:
                return  # a short read of a stream has emptied it

    def _read(self, connection: socket.socket) -> bytes | memoryview:
        if self._greeted:
            return self._inbox[: connection.recv_into(self._inbox)]
        data, fds = receive_with_fds(connection, HANDSHAKE_BYTES)
        self._fds.extend(fds)
        return data

    def _take(self, ticket: int, message: wire.Message) -> None:
        if self._socket is None:
            return
        if isinstance(message, wire.Welcome):
            self._welcomed(message)
        elif ticket in self._open:
            final = not isinstance(message, STREAMING)
            if final:
                self._open.discard(ticket)
            self._completions.append(Completion(ticket, message, final))
        elif isinstance(message, wire.Failure) and ticket == 0:
            self._part(f"The store ended the connection: {error_of(message)}")

    def _welcomed(self, welcome: wire.Welcome) -> None:
        """The lost arena is unmapped before the new one is attached: its offsets are void."""
        if self._greeted:
            return
        self._unmap()
        if self._wants_arena:
            self.arena = _attach(self._fds, welcome.arena_bytes)
            if self.arena is None:
                self._part("The store's arena could not be mapped")
                return
        self.arena_generation = welcome.arena_generation
        self.load_window_bytes = welcome.load_window_bytes
        self.protocol = welcome.protocol
        self._frame_bytes_max = min(welcome.frame_bytes_max, wire.FRAME_BYTES_MAX)
        self.incarnation += 1
        self._greeted = True
        self._goodbye = ""
        self._backoff_s = BACKOFF_FIRST_S

    def _unmap(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _part(self, reason: str) -> None:
        """The connection ended, or there was none to have."""
        if reason != self._goodbye:
            _log.warning("No store at %s for now: %s", self.path, reason)
        self._goodbye = reason
        self._lose()

    def _lose(self) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
            self._socket = None
        while self._fds:
            os.close(self._fds.pop())
        self._greeted = False
        self._outbox.clear()
        self._retry_later()
        lost, self._open = self._open, set()
        self._completions.extend(Completion(ticket, LOST, True) for ticket in sorted(lost))

    def _retry_later(self) -> None:
        self._retry_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)


_of_this_process: weakref.WeakSet[SocketClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in _of_this_process:
        client.leave_to_parent()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_after_fork)


def _attach(fds: list[int], arena_bytes: int) -> Arena | None:
    """Map the arena that came with WELCOME; only one that nobody can shrink under the mapping."""
    if not fds:
        return None
    fd = fds.pop(0)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & fcntl.F_SEAL_SHRINK and os.fstat(fd).st_size == arena_bytes:
            return Arena.attach(fd)
    except (OSError, ValueError) as error:
        _log.warning("The arena could not be mapped: %s", error)
    os.close(fd)
    return None
