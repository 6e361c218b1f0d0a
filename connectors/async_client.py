"""`ebbtide.AsyncClient`: the same as `ebbtide.Client` on an asyncio loop, which it never blocks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.record_client import (
    CLOSE_TIMEOUT_S,
    TIMEOUT_S,
    connect,
    descriptor_of,
    socket_path,
)
from ebbtide.connectors.record_steps import Space, get_steps, give_back, key_of, put_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ebbtide.connectors.client import SocketClient
    from ebbtide.connectors.record_steps import Exchange, Result, Steps

LOOK_S = 0.02  # between two looks at a connection that is being made or that is full


class AsyncNamespace:
    """Records of one namespace. Made by `AsyncClient.namespace`; calls may run at the same time."""

    def __init__(self, client: AsyncClient, descriptor: list[list[object]]) -> None:
        self._client = client
        self._space = Space(descriptor)

    async def put(self, block_hash: bytes, payload: bytes, group: int = 0) -> bool:
        """As `ebbtide.Client`'s."""
        return await self.put_many({block_hash: payload}, group) == 1

    async def put_many(self, records: Mapping[bytes, bytes], group: int = 0) -> int:
        """As `ebbtide.Client`'s."""
        keyed = {key_of(name, group): payload for name, payload in records.items()}
        return await self._client.run(put_steps(self._client.link, self._space, keyed), 0)

    async def get(self, block_hash: bytes, group: int = 0) -> bytes | None:
        """As `ebbtide.Client`'s."""
        return (await self.get_many([block_hash], group)).get(block_hash)

    async def get_many(self, block_hashes: Iterable[bytes], group: int = 0) -> dict[bytes, bytes]:
        """As `ebbtide.Client`'s."""
        keys = {key_of(name, group): name for name in block_hashes}
        found = await self._client.run(get_steps(self._client.link, self._space, [*keys]), {})
        return {keys[key]: payload for key, payload in found.items()}


class AsyncClient:
    """A connection to the store of this host, for one loop. An asynchronous context manager."""

    link: SocketClient

    def __init__(
        self,
        socket: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        allow_uids: Collection[int] = (),
    ) -> None:
        """As `ebbtide.Client`, but it connects in `connect` or `async with`."""
        self._path = socket_path(socket)
        self._allow_uids = allow_uids
        self._timeout_s = timeout_s
        self._open: dict[int, tuple[Exchange, asyncio.Future[wire.Message]]] = {}
        self._given_up: set[int] = set()
        self._settled = asyncio.Event()  # no call that was given up is unanswered
        self._settled.set()
        self._reader: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()

    async def connect(self) -> None:
        """Raises TierUnavailableError when no store answers."""
        self.link = await asyncio.to_thread(connect, self._path, self._allow_uids)
        self._reader = asyncio.create_task(self._read(), name="ebbtide-client")

    def namespace(self, **fields: str | int | bytes) -> AsyncNamespace:
        """As `ebbtide.Client`'s."""
        return AsyncNamespace(self, descriptor_of(fields))

    async def close(self) -> None:
        """Leave. Waits a moment for answers to calls that were given up. Not while a call runs."""
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._settled.wait()
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None
            self.link.close()

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, steps: Steps[Result], missed: Result) -> Result:
        """Drive steps to their end; `missed` when the store does not answer in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                exchange = next(steps)
                while True:
                    answer = await self._exchange(exchange)
                    try:
                        exchange = steps.send(answer)
                    except StopIteration as end:
                        result: Result = end.value
                        return result
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # typed as above
        except TimeoutError:
            return missed

    async def _exchange(self, exchange: Exchange) -> wire.Message:
        ticket = self.link.submit(exchange.message)
        answer: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._open[ticket] = exchange, answer
        self._wanted.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():  # it came in the same moment
                give_back(self.link, answer.result(), ticket)
            else:
                self._given_up.add(ticket)
                self._settled.clear()
            if exchange.part is not None:
                self.link.notify(wire.Release(ticket))
            raise
        finally:
            del self._open[ticket]

    async def _read(self) -> None:
        """Sleeps while nothing is open."""
        while True:
            await self._wanted.wait()
            self._take_answers()
            if self._open or self._given_up:
                await self._readable()
            else:
                self._wanted.clear()

    def _take_answers(self) -> None:
        for completion in self.link.poll():
            exchange, answer = self._open.get(completion.ticket, (None, None))
            if exchange is None or answer is None or answer.done():
                give_back(self.link, completion.message, completion.ticket)
                if completion.final:
                    self._given_up.discard(completion.ticket)
                    if not self._given_up:
                        self._settled.set()
            elif completion.final:
                answer.set_result(completion.message)
            elif exchange.part is not None:
                exchange.part(completion.ticket, completion.message)

    async def _readable(self) -> None:
        """Until the socket may have something, or for a moment where there is none to wait for."""
        fd = self.link.fileno()
        if fd is None:
            await asyncio.sleep(LOOK_S)
            return
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, _set, ready)
        try:
            async with asyncio.timeout(LOOK_S if self.link.is_sending else 1.0):
                await ready
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
