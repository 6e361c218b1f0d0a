"""`ebbtide.Client`: records by key in a namespace, from plain Python. Needs no tensor library.

A cache and no database: what cannot be stored or found now is `False` or `None`, and a store that
goes away is no error but a time of misses; the client finds the next one by itself.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient
from ebbtide.connectors.record_steps import Space, get_steps, give_back, key_of, put_steps
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ebbtide.connectors.record_steps import Exchange, Result, Steps

ROLE = "client"
TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
WAIT_S = 0.05


def socket_path(named: str | None) -> str:
    """Where the store of this host listens."""
    return named or os.environ.get("EBBTIDE_SOCKET") or "/run/ebbtide/store.sock"


@cache
def _engine_of(process: int) -> bytes:
    """All clients of a process are one engine: the store watches a process once, until it ends,
    and keeps nothing more of each client that came and went meanwhile.
    """
    return os.urandom(16)


def connect(path: str, allow_uids: Collection[int]) -> SocketClient:
    """A connection that maps the arena. Raises TierUnavailableError when no store answers."""
    engine = _engine_of(os.getpid())  # a forked child is another one
    return SocketClient(path, engine, ROLE, arena=True, allow_uids=allow_uids)


def descriptor_of(fields: Mapping[str, str | int | bytes]) -> list[list[object]]:
    """What the bytes of records depend on, in this order: another order is another namespace."""
    if not fields:
        raise MisuseError("A namespace needs a field", next_step='As in namespace(model="m").')
    return [[name, value] for name, value in fields.items()]


class Namespace:
    """Records of one namespace. Made by `Client.namespace`; used from its thread."""

    def __init__(self, client: Client, descriptor: list[list[object]]) -> None:
        self._client = client
        self._space = Space(descriptor)

    def put(self, block_hash: bytes, payload: bytes, group: int = 0) -> bool:
        """Whether the record is held now. Blocks until it can be read. Raises MisuseError for a
        hash that is none, ConfigError for a payload that no tier can hold.
        """
        return self.put_many({block_hash: payload}, group) == 1

    def put_many(self, records: Mapping[bytes, bytes], group: int = 0) -> int:
        """The same for records of one size. Returns how many of them, from the first, are held."""
        keyed = {key_of(name, group): payload for name, payload in records.items()}
        link = self._client.link
        return self._client.run(put_steps(link, self._space, keyed), 0)

    def get(self, block_hash: bytes, group: int = 0) -> bytes | None:
        """The record's bytes, verified against their digest; None: it is not held."""
        return self.get_many([block_hash], group).get(block_hash)

    def get_many(self, block_hashes: Iterable[bytes], group: int = 0) -> dict[bytes, bytes]:
        """Those of the records that are held, by block hash."""
        keys = {key_of(name, group): name for name in block_hashes}
        found = self._client.run(get_steps(self._client.link, self._space, [*keys]), {})
        return {keys[key]: payload for key, payload in found.items()}


class Client:
    """A connection to the store of this host. One thread; a context manager."""

    def __init__(
        self,
        socket: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        allow_uids: Collection[int] = (),
    ) -> None:
        """`socket`: None: what EBBTIDE_SOCKET names, else /run/ebbtide/store.sock. `timeout_s`: of
        one call, after which it is a miss. `allow_uids`: whose store is trusted,
        besides this user's and root's. Raises TierUnavailableError when no store answers.
        """
        self.link = connect(socket_path(socket), allow_uids)
        self._timeout_s = timeout_s
        self._given_up: set[int] = set()

    def namespace(self, **fields: str | int | bytes) -> Namespace:
        """Records that are only good for one content: name everything that changes their bytes."""
        return Namespace(self, descriptor_of(fields))

    def close(self) -> None:
        """Leave. Waits a moment for answers to calls that were given up: what they grant would
        else be the store's again only when this process ends.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._given_up and self.link.connected and time.monotonic() < deadline:
            self._poll(0)
            self.link.wait(WAIT_S)
        self.link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, steps: Steps[Result], missed: Result) -> Result:
        """Drive steps to their end; `missed` when the store does not answer in time."""
        deadline = time.monotonic() + self._timeout_s
        try:
            exchange = next(steps)
            while True:
                answer = self._exchange(exchange, deadline)
                if answer is None:
                    return missed
                exchange = steps.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _exchange(self, exchange: Exchange, deadline: float) -> wire.Message | None:
        ticket = self.link.submit(exchange.message)
        while True:
            for message, final in self._poll(ticket):
                if final:
                    return message
                if exchange.part is not None:
                    exchange.part(ticket, message)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._given_up.add(ticket)
                if exchange.part is not None:
                    self.link.notify(wire.Release(ticket))
                return None
            self.link.wait(min(left_s, WAIT_S))

    def _poll(self, ticket: int) -> list[tuple[wire.Message, bool]]:
        """The answers to one ticket. What comes for calls that were given up is given back."""
        found = []
        for completion in self.link.poll():
            if completion.ticket == ticket:
                found.append((completion.message, completion.final))
                continue
            give_back(self.link, completion.message, completion.ticket)
            if completion.final:
                self._given_up.discard(completion.ticket)
        return found
