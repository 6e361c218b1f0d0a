"""The store's process: sockets, pidfds and signals around one store on one asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.session import Session, failure_of
from ebbtide.errors import ConfigError, ProtocolError
from ebbtide.tiers.runtime import ThreadRuntime, Timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.tiers.opening import OpenStore

_log = logging.getLogger("ebbtide.server")

RECEIVE_BYTES = 256 << 10
OUTBOX_BYTES_MAX = 16 * wire.FRAME_BYTES_MAX  # a client that does not read is cut off
SOCKET_PATH_MAX = 107  # sun_path
SO_PEERPIDFD = 77  # Linux 6.5; not named in Python 3.11
FIRST_ENGINE_TIMEOUT_S = 60.0
_CREDENTIALS = struct.Struct("3i")


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
        self.mapping: set[int] = set()  # pidfds of live processes that were given the arena
        self.connections: set[_Connection] = set()


class _Connection:
    """One client's socket. Frames in, frames out, bounded both ways."""

    def __init__(self, server: StoreServer, peer: socket.socket) -> None:
        self._server = server
        self._peer = peer
        self._loop = server.loop
        self._decoder = wire.Decoder()
        self._outbox = bytearray()
        self.session: Session | None = None
        self._loop.add_reader(peer, self._readable)

    def send(self, ticket: int, message: wire.Message) -> None:
        if self._peer.fileno() < 0:
            return
        self._outbox += wire.encode(ticket, message)
        self._writable()
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            _log.warning("A client does not read its answers; its connection ends")
            self.close()

    def close(self) -> None:
        if self._peer.fileno() < 0:
            return
        self._loop.remove_reader(self._peer)
        self._loop.remove_writer(self._peer)
        self._peer.close()
        if self.session is not None:
            self.session.disconnected()
        self._server.connection_closed(self)

    def _readable(self) -> None:
        try:
            data = self._peer.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for ticket, message in self._decoder.feed(data):
                self._handle(ticket, message)
        except ProtocolError as error:
            _log.warning("A connection ends: %s", error)
            self.send(0, failure_of(error))
            self.close()

    def _handle(self, ticket: int, message: wire.Message) -> None:
        if self.session is not None:
            self.session.handle(ticket, message)
            return
        if not isinstance(message, wire.Hello):
            raise ProtocolError("The first frame must be HELLO", kind=message.kind)
        if message.protocol[0] != wire.VERSION[0]:
            raise ProtocolError(
                "The client speaks another protocol",
                next_step="Use the same ebbtide on both sides.",
                client=message.protocol,
                store=wire.VERSION,
            )
        self.session = Session(self._server.store, message.engine, self.send)
        self._welcome(message)

    def _welcome(self, hello: wire.Hello) -> None:
        server = self._server
        frame = wire.encode(0, server.welcome)
        self._outbox += frame
        if not hello.arena:
            server.engine_connected(hello.engine, self, None)
            self._writable()
            return
        server.engine_connected(hello.engine, self, _pidfd_of(self._peer))
        # The fd rides with the frame's first byte; a fresh socket's buffer has room for both.
        sent = socket.send_fds(self._peer, [self._outbox], [server.store.arena.fd])
        del self._outbox[:sent]
        self._writable()

    def _writable(self) -> None:
        while self._outbox:
            try:
                sent = self._peer.send(self._outbox)
            except BlockingIOError:
                self._loop.add_writer(self._peer, self._writable)
                return
            except OSError:
                self._loop.call_soon(self.close)
                return
            del self._outbox[:sent]
        self._loop.remove_writer(self._peer)


class StoreServer:
    """Serves one open store on a Unix socket until it is told to stop.

    `private`: stop by itself when the last engine has gone, or when none came within a minute.
    """

    def __init__(
        self,
        opened: OpenStore,
        socket_path: str,
        *,
        private: bool,
        drain_timeout_s: float,
        connections_max: int = 256,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.opened = opened
        self.store = opened.store
        self.welcome = wire.Welcome(
            store=os.urandom(16),
            arena_generation=int.from_bytes(os.urandom(6), "little"),
            arena_bytes=self.store.arena.capacity_bytes,
            alignment=self.store.memory.space.alignment,
            load_window_bytes=self.store.bounds.load_window_bytes,
        )
        self._path = socket_path
        self._private = private
        self._drain_timeout_s = drain_timeout_s
        self._connections_max = connections_max
        self._engines: dict[bytes, _Engine] = {}
        self._connections: set[_Connection] = set()
        self._stopping = self.loop.create_future()
        self._lock_fd, self._listener = _listen(socket_path)
        self.loop.add_reader(self._listener, self._accept)

    async def run(self) -> bool:
        """Serve until SIGTERM, SIGINT or the private end; drain. True when everything is durable.

        A second signal ends the drain at once.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop)
        if self._private:
            self.loop.call_later(FIRST_ENGINE_TIMEOUT_S, self._stop_if_deserted)
        await self._stopping
        self.loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        drained: asyncio.Future[bool] = self.loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.remove_signal_handler(number)
            self.loop.add_signal_handler(number, lambda: _set(drained, False))
        self.store.drain(self._drain_timeout_s, lambda ok: _set(drained, ok))
        clean = await drained
        self._unlisten()
        return clean

    def stop(self) -> None:
        """Stop serving and drain. Idempotent."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    def engine_connected(self, engine: bytes, connection: _Connection, pidfd: int | None) -> None:
        """A client has said which engine it belongs to; `pidfd` when it gets the arena."""
        known = self._engines.setdefault(engine, _Engine())
        known.connections.add(connection)
        if pidfd is not None:
            known.mapping.add(pidfd)
            self.loop.add_reader(pidfd, self._process_exited, engine, pidfd)

    def connection_closed(self, connection: _Connection) -> None:
        """Nothing is freed by this alone: the process may live on and copy."""
        self._connections.discard(connection)
        if connection.session is not None:
            engine = self._engines.get(connection.session.engine)
            if engine is not None:
                engine.connections.discard(connection)
                self._check_gone(connection.session.engine)

    def _process_exited(self, engine: bytes, pidfd: int) -> None:
        self.loop.remove_reader(pidfd)
        os.close(pidfd)
        self._engines[engine].mapping.discard(pidfd)
        self._check_gone(engine)

    def _check_gone(self, engine: bytes) -> None:
        known = self._engines.get(engine)
        if known is None or known.mapping or known.connections:
            return
        del self._engines[engine]
        self.store.engine_gone(engine)
        self._stop_if_deserted()

    def _stop_if_deserted(self) -> None:
        if self._private and not self._engines:
            self.stop()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        peer.setblocking(False)
        if _peer_uid(peer) not in (os.geteuid(), 0):
            _log.warning("A connection of another user was refused")
            peer.close()
        elif len(self._connections) >= self._connections_max:
            _log.warning("Too many connections: one was refused")
            peer.close()
        else:
            self._connections.add(_Connection(self, peer))

    def _unlisten(self) -> None:
        for engine in self._engines.values():
            for pidfd in engine.mapping:
                self.loop.remove_reader(pidfd)
                os.close(pidfd)
        self._engines.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._lock_fd)


def _listen(path: str) -> tuple[int, socket.socket]:
    """Own the socket path: a lock beside it decides, not the file itself, which a kill leaves
    behind.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise ConfigError(
            "The socket path is too long for a Unix socket",
            next_step="Choose a shorter `socket`.",
            path=path,
            bytes_max=SOCKET_PATH_MAX,
        )
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    lock_fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise ConfigError(
            "Another store serves this socket",
            next_step="Connect to it, stop it, or choose another `socket`.",
            socket=path,
        ) from None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setblocking(False)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
    listener.listen(128)
    return lock_fd, listener


def _peer_uid(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _pidfd_of(peer: socket.socket) -> int:
    """A pidfd of the connecting process; free of pid reuse where the kernel offers it."""
    try:
        return peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return os.pidfd_open(_CREDENTIALS.unpack(packed)[0])


def _set(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
