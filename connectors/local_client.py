"""The client of a store in the same process. Used from one thread."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import LOST, STREAMING, Completion
from ebbtide.connectors.session import Session, failure_of
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from ebbtide.tiers.arena import Arena
    from ebbtide.tiers.runtime import ThreadRuntime
    from ebbtide.tiers.store import Store


class LocalClient:
    """For tests, simulations and benchmarks: the same messages, and no socket."""

    def __init__(self, store: Store, runtime: ThreadRuntime, engine: bytes | None = None) -> None:
        self.incarnation = 1
        self.arena_generation = 1
        self.arena: Arena | None = store.arena
        self.load_window_bytes = store.bounds.load_window_bytes
        self._runtime = runtime
        self._completions: deque[Completion] = deque()
        self._tickets = itertools.count(1)
        self._closed = False
        self._session = Session(store, engine or os.urandom(16), self._receive)

    @property
    def engine(self) -> bytes:
        return self._session.engine

    def submit(self, message: wire.Message) -> int:
        ticket = next(self._tickets)
        refusal = LOST if self._closed else self._refusal(ticket, message)
        if refusal is None:
            self._session.handle(ticket, message)
        else:
            self._receive(ticket, refusal)
        return ticket

    def notify(self, message: wire.Message) -> None:
        if not self._closed and self._refusal(0, message) is None:
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
        if self._closed:
            return
        self._closed = True
        self._session.disconnected()
        self._session.store.engine_gone(self.engine)
        self.arena = None

    def _receive(self, ticket: int, message: wire.Message) -> None:
        self._completions.append(Completion(ticket, message, not isinstance(message, STREAMING)))

    def _refusal(self, ticket: int, message: wire.Message) -> wire.Failure | None:
        """What no socket would carry is refused here too."""
        try:
            wire.encode(ticket, message)
        except MisuseError as error:
            return failure_of(error)
        return None
