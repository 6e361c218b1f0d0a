"""uvicorn on the store's own loop.

Not in a thread: the store's state changes on its control thread without a lock, so a thread would
have to come here for every number anyway. Nor would one be faster: lookups beside scrapes took the
same either way (`docs/operations.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ebbtide.connectors.http.app import build_app
from ebbtide.connectors.http.token import read_token
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ebbtide.config import HttpConfig
    from ebbtide.connectors.server import StoreServer

_log = logging.getLogger("ebbtide.http")

CONNECTIONS_MAX = 32
CONNECTION_LIFETIME_S = 60.0  # whoever sends a byte a minute keeps no descriptor
HEADER_BYTES_MAX = 16 << 10
STOP_TIMEOUT_S = 1


class _Connection(H11Protocol):
    """One of a bounded number of connections, each with a bounded life."""

    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._end = self.loop.call_later(CONNECTION_LIFETIME_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Leaves the signals to the store, which has a drain to do first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """A bound address, then a server on it. Built before the store opens: it may be refused."""

    def __init__(self, http: HttpConfig) -> None:
        """Raises ConfigError for an address that cannot be had, or that wants a token."""
        self._token = read_token(http)
        host = "127.0.0.1" if http.host == "localhost" else http.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, http.port), family=family)
        except OSError as error:
            raise ConfigError(
                "The HTTP address cannot be had",
                next_step="Choose another [http] port, or stop who has it.",
                host=http.host,
                port=http.port,
                reason=error.strerror,
            ) from error
        # Connections inherit it. asyncio sets it only on sockets that name their protocol, and
        # without it an answer's second packet waits 40 ms for the first one's acknowledgement.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name: tuple[Any, ...] = self._socket.getsockname()
        self.url = f"http://[{name[0]}]:{name[1]}" if ":" in host else f"http://{host}:{name[1]}"
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, server: StoreServer) -> None:
        """Serve from now on. Call on the store's loop."""
        config = uvicorn.Config(
            build_app(server, self._token),
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # whoever sends garbage fills no log
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        self._server = _Server(config)
        self._task = server.loop.create_task(self._server.serve([self._socket]))
        self._task.add_done_callback(_ended)

    async def stop(self) -> None:
        """Answer no more. Waits a second or two at most. Idempotent."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=2 * STOP_TIMEOUT_S)
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Give the address up. Idempotent."""
        self._socket.close()


def _ended(task: asyncio.Task[None]) -> None:
    """Without HTTP the store serves on."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("HTTP has ended: %s", task.exception())
