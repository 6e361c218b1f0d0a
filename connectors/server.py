"""The store's process: sockets, pidfds and signals around one store on one asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.connection import Connection
from ebbtide.connectors.endpoint import Process, has_exited, peer_uid, trusted
from ebbtide.connectors.session import failure_of
from ebbtide.connectors.traffic import Traffic
from ebbtide.connectors.turns import Turns
from ebbtide.errors import AccessDeniedError, EbbtideError, NoSpaceError
from ebbtide.tiers.runtime import ThreadRuntime, Timer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection

    from ebbtide.tiers.store import Store

_log = logging.getLogger("ebbtide.server")

RECEIVE_BYTES = 64 << 10
FIRST_ENGINE_TIMEOUT_S = 60.0
DRAIN_GRACE_S = 1.0
REFUSALS_LOG_INTERVAL_S = 1.0
ACCEPT_PAUSE_S = 1.0  # after this process has run out of descriptors
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
        self.connections: set[Connection] = set()
        self.works = False  # not a command that only visits


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
        allow_uids: Collection[int] = (),
        connections_max: int = 256,
        frame_bytes_max: int = wire.FRAME_BYTES_MAX,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.store = store
        self.traffic = Traffic()
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
        self._allow_uids = frozenset(allow_uids)
        self._connections_max = connections_max
        self._engines: dict[bytes, _Engine] = {}
        self._connections: set[Connection] = set()
        self._stopping = self.loop.create_future()
        self._listener = listener
        self._silent_until = 0.0
        self._on_stopping = on_stopping  # called once, before the drain
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
        self._on_stopping()
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

    @property
    def is_stopping(self) -> bool:
        """No connection is accepted any more."""
        return self._stopping.done()

    @property
    def connections(self) -> int:
        """Open ones, greeted or not."""
        return len(self._connections)

    @property
    def engines(self) -> int:
        """Engines with a connection, or with a process that maps the arena."""
        return len(self._engines)

    @property
    def runtime_faults(self) -> int:
        """Completions of the store that raised."""
        return getattr(self.store.runtime, "faults", 0)

    def stats(self) -> dict[str, object]:
        """The store's numbers, and those of its socket."""
        traffic = self.traffic
        return {
            **self.store.stats(),
            "server": {
                "connections": self.connections,
                "engines": self.engines,
                "accepted": traffic.connections,
                "refused": dict(traffic.refused),
                "requests": dict(traffic.requests),
            },
        }

    def stop(self) -> None:
        """Stop serving and drain. Idempotent."""
        _set(self._stopping, True)

    def count_fault(self) -> None:
        """A callback raised: a bug, logged with its trace. The store goes on."""
        self.store.ledger.counts["faults"] += 1

    def engine_connected(
        self, engine: bytes, connection: Connection, process: Process | None, *, works: bool
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

    def connection_closed(self, connection: Connection) -> None:
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
        if not trusted(peer, self._allow_uids):
            uid = peer_uid(peer)
            self.traffic.refused["user"] += 1
            self._turn_away(
                peer,
                AccessDeniedError(
                    "The store does not serve this user",
                    next_step=f"Add {uid} to [server] allow_uids of the store, and restart it.",
                    uid=uid,
                ),
            )
        elif len(self._connections) >= self._connections_max:
            self.traffic.refused["full"] += 1
            self._turn_away(
                peer,
                NoSpaceError(
                    "The store has as many connections as it may",
                    next_step="Raise [limits] connections_max of the store.",
                    connections_max=self._connections_max,
                ),
            )
        else:
            self.traffic.connections += 1
            self._connections.add(Connection(self, peer))

    def _turn_away(self, peer: socket.socket, error: EbbtideError) -> None:
        """Say why, as far as it can be said without waiting, and close."""
        if self.loop.time() >= self._silent_until:  # whoever is refused may try very often
            self._silent_until = self.loop.time() + REFUSALS_LOG_INTERVAL_S
            _log.warning("A connection was refused: %s", error)
        with contextlib.suppress(OSError):
            peer.send(wire.encode(0, failure_of(error)))
        peer.close()

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.count_fault()
        loop.default_exception_handler(context)


def _set(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
