"""The store's process: sockets, pidfds and signals around one store on one asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.endpoint import Process, has_exited, peer_process, trusted
from ebbtide.connectors.session import Session, failure_of
from ebbtide.connectors.turns import Turns
from ebbtide.errors import ProtocolError
from ebbtide.tiers.runtime import ThreadRuntime, Timer
from ebbtide.tiers.supervisor import supervised

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.connectors.turns import Pieces
    from ebbtide.tiers.store import Store

_log = logging.getLogger("ebbtide.server")

RECEIVE_BYTES = 64 << 10
OUTBOX_BYTES_MAX = 4 * wire.FRAME_BYTES_MAX  # a client that does not read is cut off
FIRST_ENGINE_TIMEOUT_S = 60.0
DRAIN_GRACE_S = 1.0
ACCEPT_PAUSE_S = 1.0  # after this process has run out of descriptors
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

FAULT = wire.Failure("EbbtideError", "The store met a fault of its own; its log has the trace")


class AsyncioRuntime(ThreadRuntime):
    """The store's runtime on an asyncio loop: threads wake the loop, timers are the loop's."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pool_threads: dict[str, int] | None = None
    ) -> None:
        super().__init__(pool_threads)
        self._loop = loop

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = super().call_later(delay_s, call)
        if delay_s <= 0:
            self._loop.call_soon(self.run_ready)
        else:
            self._loop.call_later(delay_s, self.run_ready)
        return timer

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody is left to tell
            self._loop.call_soon_threadsafe(self.run_ready)


class _Engine:
    """The processes of one engine: whoever maps the arena, and every open connection."""

    def __init__(self) -> None:
        self.mapping: dict[object, int] = {}  # pidfds of processes that were given the arena
        self.connections: set[_Connection] = set()
        self.works = False  # not a command that only visits


class _Connection:
    """One client's socket. Frames in, frames out, bounded both ways."""

    def __init__(self, server: StoreServer, peer: socket.socket) -> None:
        self._server = server
        self._peer = peer
        self._loop = server.loop
        self._decoder = wire.Decoder(server.welcome.frame_bytes_max)
        self._outbox = bytearray()
        self._arena_fd: int | None = None  # to ride with the next byte
        self._waiting = False  # for the peer to read
        self._closed = False
        self.session: Session | None = None
        self._lane = server.turns.lane(self._pieces, self._met_fault)
        self._reading = True
        self._loop.add_reader(peer, self._readable)

    def send(self, ticket: int, message: wire.Message) -> None:
        if self._closed:
            return
        self._outbox += wire.encode(ticket, message)
        if not self._waiting:
            self._writable()
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            _log.warning("A client does not read its answers; its connection ends")
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._peer)
        self._loop.remove_writer(self._peer)
        self._peer.close()
        self._outbox.clear()
        self._lane.close()
        if self.session is not None:
            self.session.disconnected()
        self._server.connection_closed(self)

    def _readable(self) -> None:
        inbox = self._server.inbox
        try:
            size = self._peer.recv_into(inbox)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        try:
            messages = self._decoder.feed(inbox[:size])
        except ProtocolError as error:
            self._refuse(error)
            return
        for ticket, message in messages:
            if self._closed:
                return
            if not supervised(self._take, ticket, message):
                self._met_fault(ticket, message)
        if self._lane.is_full and not self._closed:
            self._reading = False  # its own stores first; whoever else has sent something goes on
            self._loop.remove_reader(self._peer)

    def _take(self, ticket: int, message: wire.Message) -> None:
        try:
            if self.session is None:
                self._greet(message)
            elif self._lane.takes(message):
                self._lane.put(ticket, message)
            else:
                self.session.handle(ticket, message)
        except ProtocolError as error:
            self._refuse(error)

    def _pieces(self, ticket: int, message: wire.Message) -> Pieces:
        """Deal with a message that has waited for its turn."""
        assert self.session is not None
        if not (self._reading or self._closed or self._lane.is_full):
            self._reading = True
            self._loop.add_reader(self._peer, self._readable)
        try:
            yield from self.session.pieces(ticket, message)
        except ProtocolError as error:
            self._refuse(error)

    def _met_fault(self, ticket: int, message: wire.Message) -> None:
        self._server.count_fault()
        if message.answered:
            self.send(ticket, FAULT)

    def _refuse(self, error: ProtocolError) -> None:
        _log.warning("A connection ends: %s", error)
        self.send(0, failure_of(error))
        self.close()

    def _greet(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Hello):
            raise ProtocolError("The first frame must be HELLO", kind=message.kind)
        if message.protocol[0] != wire.VERSION[0]:
            raise ProtocolError(
                "The client speaks another protocol",
                next_step="Use the same ebbtide on both sides.",
                client=message.protocol,
                store=wire.VERSION,
            )
        process = None
        if message.arena:
            try:
                process = peer_process(self._peer)
            except OSError as error:
                raise ProtocolError(
                    "The store cannot watch this process, so it cannot lend it the arena",
                    reason=error.strerror,
                ) from error
            self._arena_fd = self._server.store.arena.fd
        _log.info("engine %s: a %r connects", message.engine.hex(), message.role)
        self.session = Session(self._server.store, message.engine, self.send)
        works = message.role != wire.COMMAND_ROLE
        self._server.engine_connected(message.engine, self, process, works=works)
        self.send(0, self._server.welcome)

    def _writable(self) -> None:
        while self._outbox and not self._closed:
            try:
                sent = self._transmit()
            except BlockingIOError:
                if not self._waiting:
                    self._waiting = True
                    self._loop.add_writer(self._peer, self._writable)
                return
            except OSError:
                # Not at once: whoever sends may be in the middle of its own bookkeeping.
                self._outbox.clear()
                self._loop.call_soon(self.close)
                return
            del self._outbox[:sent]
        if self._waiting and not self._closed:
            self._waiting = False
            self._loop.remove_writer(self._peer)

    def _transmit(self) -> int:
        if self._arena_fd is None:
            return self._peer.send(self._outbox)
        sent = socket.send_fds(self._peer, [self._outbox], [self._arena_fd])
        self._arena_fd = None
        return sent


class StoreServer:
    """Serves one open store on a listening socket until it is told to stop.

    `private`: stop by itself when the last engine has gone, or when none came within a minute.
    """

    def __init__(
        self,
        store: Store,
        listener: socket.socket,
        *,
        private: bool,
        drain_timeout_s: float,
        connections_max: int = 256,
        frame_bytes_max: int = wire.FRAME_BYTES_MAX,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.store = store
        self.turns = Turns(self.loop.call_soon)
        self.inbox = memoryview(bytearray(RECEIVE_BYTES))
        self.welcome = wire.Welcome(
            store=os.urandom(16),
            arena_generation=int.from_bytes(os.urandom(6), "little"),
            arena_bytes=store.arena.capacity_bytes,
            alignment=store.memory.space.alignment,
            load_window_bytes=store.bounds.load_window_bytes,
            frame_bytes_max=frame_bytes_max,
        )
        self._private = private
        self._drain_timeout_s = drain_timeout_s
        self._connections_max = connections_max
        self._engines: dict[bytes, _Engine] = {}
        self._connections: set[_Connection] = set()
        self._stopping = self.loop.create_future()
        self._listener = listener
        self.loop.set_exception_handler(self._callback_failed)
        for number in _STOP_SIGNALS:
            self.loop.add_signal_handler(number, self.stop)
        self._listen()

    async def run(self) -> bool:
        """Serve until SIGTERM, SIGINT or the private end; drain. True when everything is durable.

        A second signal ends the drain at once.
        """
        if self._private:
            self.loop.call_later(FIRST_ENGINE_TIMEOUT_S, self._stop_if_deserted)
        await self._stopping
        self.loop.remove_reader(self._listener)
        self._listener.close()
        drained: asyncio.Future[bool] = self.loop.create_future()
        for number in _STOP_SIGNALS:
            self.loop.add_signal_handler(number, _set, drained, False)
        for connection in list(self._connections):
            connection.close()
        self.store.drain(self._drain_timeout_s, lambda ok: _set(drained, ok))
        # The store keeps to the deadline itself, unless it waits for a disk that hangs.
        self.loop.call_later(self._drain_timeout_s + DRAIN_GRACE_S, _set, drained, False)
        clean = await drained
        for engine in self._engines.values():
            for pidfd in engine.mapping.values():
                self.loop.remove_reader(pidfd)
                os.close(pidfd)
        self._engines.clear()
        return clean

    def stop(self) -> None:
        """Stop serving and drain. Idempotent."""
        _set(self._stopping, True)

    def count_fault(self) -> None:
        """A callback raised: a bug, logged with its trace. The store goes on."""
        self.store.counts["faults"] += 1

    def engine_connected(
        self, engine: bytes, connection: _Connection, process: Process | None, *, works: bool
    ) -> None:
        """A client has said which engine it belongs to; `process` when it gets the arena."""
        known = self._engines.setdefault(engine, _Engine())
        known.works = known.works or works
        known.connections.add(connection)
        if process is None:
            return
        watched = known.mapping.get(process.identity)
        if watched is not None and not has_exited(watched):
            os.close(process.pidfd)  # it has connected before
            return
        if watched is not None:
            self._process_exited(engine, process.identity)
        known.mapping[process.identity] = process.pidfd
        self.loop.add_reader(process.pidfd, self._process_exited, engine, process.identity)

    def connection_closed(self, connection: _Connection) -> None:
        """Nothing is freed by this alone: the process may live on and copy."""
        self._connections.discard(connection)
        if connection.session is not None:
            engine = self._engines.get(connection.session.engine)
            if engine is not None:
                engine.connections.discard(connection)
                self._check_gone(connection.session.engine)

    def _process_exited(self, engine: bytes, identity: object) -> None:
        pidfd = self._engines[engine].mapping.pop(identity)
        self.loop.remove_reader(pidfd)
        os.close(pidfd)
        self._check_gone(engine)

    def _check_gone(self, engine: bytes) -> None:
        known = self._engines.get(engine)
        if known is None or known.mapping or known.connections:
            return
        del self._engines[engine]
        self.store.engine_gone(engine)
        if known.works:
            self._stop_if_deserted()

    def _stop_if_deserted(self) -> None:
        if self._private and not any(engine.works for engine in self._engines.values()):
            self.stop()

    def _listen(self) -> None:
        if not self._stopping.done():
            self.loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                _log.error("No connection can be accepted: %s", error.strerror)
                self.loop.remove_reader(self._listener)
                self.loop.call_later(ACCEPT_PAUSE_S, self._listen)
            return
        peer.setblocking(False)
        if not trusted(peer):
            _log.warning("A connection of another user was refused")
            peer.close()
        elif len(self._connections) >= self._connections_max:
            _log.warning("Too many connections: one was refused")
            peer.close()
        else:
            self._connections.add(_Connection(self, peer))

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.count_fault()
        loop.default_exception_handler(context)


def _set(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
