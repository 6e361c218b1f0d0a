"""A client of a store for as long as it is left alone: puts, gets, pins, vanishes, tears frames.

Usage: soak_client.py SOCKET LEDGER ROW SEED KIND, KIND being "plain" or "asynchronous". What it did
is counted in its row of the ledger, a file that all processes of a soak share; whatever is not
right is counted there too, and told on standard error. It ends when the ledger says so.

Bytes follow from namespace and name. Some names are the process's own: nobody else puts them, so
it knows which reset they must not outlive.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import socket
import sys
import time
from random import Random
from typing import TYPE_CHECKING

import ebbtide
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.record_steps import key_of
from ebbtide.testing import keyed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ebbtide.tiers.arena import Arena

SPACES = {"quiet": 12_000, "loud": 20_480, "wide": 300_000, "small": 700}  # bytes of a record
KINDS = ("plain", "asynchronous")
COUNTS = (
    "put", "refused", "got", "missed", "looked_up", "pinned", "unpinned", "abandoned", "held",
    "acked", "given_up", "torn", "reconnected", "wrong", "stale",
)  # fmt: skip
ROWS = 16
SHARED_NAMES, OWN_NAMES = 600, 40  # of each namespace, and of each process
BATCH_MAX = 8
HELD_MAX = 3  # loads, and sets of reserved slots, that are left lying at the same time
PAUSE_S = 0.004
GIVEN_UP_S = 0.002
UNSURE = 1 << 62  # no reset is known to have come behind the put
PATIENCE_S = 30.0


class Ledger:
    """What the processes of a soak know of each other: resets, who did what, when to end."""

    def __init__(self, path: str) -> None:
        size = 8 * (1 + 2 * len(SPACES) + ROWS * len(COUNTS))
        with open(path, "a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("Q")

    def close(self) -> None:
        self._numbers.release()
        self._map.close()

    @property
    def is_over(self) -> bool:
        return bool(self._numbers[0])

    def end(self) -> None:
        self._numbers[0] = 1

    def resets_begun(self, space: str) -> int:
        """How many resets of a namespace were asked for."""
        return self._numbers[self._reset(space)]

    def resets_ended(self, space: str) -> int:
        """How many of them were answered."""
        return self._numbers[self._reset(space) + 1]

    def begin_reset(self, spaces: Iterable[str]) -> None:
        """Before it is asked for. One at a time."""
        for space in spaces:
            self._numbers[self._reset(space)] += 1

    def end_reset(self, spaces: Iterable[str]) -> None:
        for space in spaces:
            self._numbers[self._reset(space) + 1] += 1

    def count(self, row: int, what: str, more: int = 1) -> None:
        """By the one process that has the row."""
        self._numbers[self._place(row, what)] += more

    def total(self, what: str) -> int:
        """Of all rows."""
        return sum(self._numbers[self._place(row, what)] for row in range(ROWS))

    def work(self) -> int:
        """All that was done, by all."""
        return sum(self._numbers[self._place(0, COUNTS[0]) :])

    @staticmethod
    def _reset(space: str) -> int:
        return 1 + 2 * [*SPACES].index(space)

    @staticmethod
    def _place(row: int, what: str) -> int:
        return 1 + 2 * len(SPACES) + row * len(COUNTS) + COUNTS.index(what)


def payload_of(space: str, name: bytes) -> bytes:
    """The only right bytes of a record."""
    return keyed_bytes(space.encode() + name, SPACES[space])


class Soaker:
    """One process's knowledge, and what it does with a raw connection of its own."""

    def __init__(self, path: str, ledger: Ledger, row: int, seed: str) -> None:
        self.path = path
        self.ledger = ledger
        self.draw = Random(seed)
        self._row = row
        self._engine = seed.encode().rjust(16, b".")
        self._own = [
            hashlib.sha256(b"%s %d" % (self._engine, n)).digest() for n in range(OWN_NAMES)
        ]
        self._shared = [hashlib.sha256(b"%d" % n).digest() for n in range(SHARED_NAMES)]
        # Of own names: how many resets had been asked for when the latest put of it had ended.
        self._resets_at_put: dict[tuple[str, bytes], int] = {}
        self._pins: list[tuple[str, tuple[bytes, ...]]] = []
        self._held: list[tuple[int, int, str, list[tuple[bytes, int, int]]]] = []
        self._connect()

    def count(self, what: str, more: int = 1) -> None:
        self.ledger.count(self._row, what, more)

    def close(self) -> None:
        while self._held:
            self.ack()
        while self._pins:
            self.unpin()
        self._link.close()

    # -- names and bytes ------------------------------------------------------------------------

    def choose(self) -> tuple[str, list[bytes]]:
        """A namespace and some names in it, most of them known to all."""
        space = self.draw.choice([*SPACES])
        most = 2 if SPACES[space] > 100_000 else BATCH_MAX
        return space, [self._name() for _ in range(self.draw.randint(1, most))]

    def _name(self) -> bytes:
        return self.draw.choice(self._own if self.draw.random() < 0.3 else self._shared)

    def is_own(self, name: bytes) -> bool:
        return name in self._own

    def begin_put(self, space: str, names: Iterable[bytes]) -> None:
        """From now on until it has ended nobody knows when they are stored."""
        for name in names:
            self._resets_at_put[space, name] = UNSURE

    def was_put(self, space: str, names: Sequence[bytes], held: int) -> None:
        """A put has ended: the first so many are held, the others may be, if it got no answer."""
        self.count("put", held)
        self.count("refused", len(names) - held)
        for name in names[:held]:
            self._resets_at_put[space, name] = self.ledger.resets_begun(space)

    def check(self, space: str, name: bytes, found: bytes | memoryview, resets: int) -> None:
        """A record was served, by a request that began when so many resets had been answered."""
        if found != payload_of(space, name):
            self._complain("wrong", space, name)
        if self.is_own(name) and resets > self._resets_at_put.get((space, name), -1):
            self._complain("stale", space, name)

    def got(self, space: str, names: list[bytes], found: dict[bytes, bytes], resets: int) -> None:
        """A call has ended that asked for names."""
        self.count("got", len(found))
        self.count("missed", len({*names}) - len(found))
        for name, payload in found.items():
            self.check(space, name, payload, resets)

    def _complain(self, what: str, space: str, name: bytes) -> None:
        self.count(what)
        print(f"{what}: {space} {name.hex()}", file=sys.stderr, flush=True)  # noqa: T201

    # -- by hand --------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._link = SocketClient(self.path, self._engine, "worker", arena=True)
        self._handles = {}
        for space in SPACES:
            opened = ask(self._link, wire.OpenNamespace([["model", space]]))
            assert isinstance(opened, wire.NamespaceOpened)
            self._handles[space] = opened.namespace

    @property
    def _arena(self) -> Arena:
        assert self._link.arena is not None
        return self._link.arena

    def look_up(self) -> None:
        space, names = self.choose()
        keys = tuple(key_of(name) for name in names)
        states = ask(self._link, wire.Lookup(self._handles[space], keys))
        assert isinstance(states, wire.States)
        assert len(states.codes) == len(keys)
        self._link.notify(wire.Touch(self._handles[space], keys))
        self.count("looked_up", len(keys))

    def pin(self) -> None:
        space, names = self.choose()
        keys = tuple(key_of(name) for name in names)
        done = ask(self._link, wire.Pin(self._handles[space], keys))
        assert isinstance(done, wire.Ok)
        self.count("pinned", done.count)
        self._pins.append((space, keys))
        if len(self._pins) > HELD_MAX:
            self.unpin()

    def unpin(self) -> None:
        if self._pins:
            space, keys = self._pins.pop(0)
            done = ask(self._link, wire.Unpin(self._handles[space], keys))
            assert isinstance(done, wire.Ok)
            self.count("unpinned", done.count)

    def abandon(self) -> None:
        """Reserve, write rubbish, and give up; or say nothing more, and leave it to the end."""
        space, names = self.choose()
        keys = tuple(key_of(name) for name in dict.fromkeys(names))
        grants = ask(self._link, wire.Reserve(self._handles[space], SPACES[space], keys))
        assert isinstance(grants, wire.Grants)
        mine = tuple(sequence for _, sequence in grants.grants if sequence)
        for offset, sequence in grants.grants:
            if sequence:
                self._arena.view(offset, SPACES[space])[:] = bytes(SPACES[space])
        self.count("abandoned", len(mine))
        if self.draw.random() < 0.97:
            ask(self._link, wire.Abort(mine))

    def hold(self) -> None:
        """Have records granted, and let the copy take its time."""
        space, names = self.choose()
        names = [*dict.fromkeys(names)]
        resets = self.ledger.resets_ended(space)
        keys = tuple(key_of(name) for name in names)
        ticket = self._link.submit(wire.LoadKeys(self._handles[space], keys))
        if self.draw.random() < 0.2:
            self._link.notify(wire.Release(ticket))
        done, deadline = False, time.monotonic() + PATIENCE_S
        while not done:
            assert time.monotonic() < deadline, "a load is not answered"
            for completion in self._link.poll():
                done = done or isinstance(completion.message, wire.Done)
                if isinstance(completion.message, wire.Batch):
                    self._granted(ticket, completion.message, space, names, resets)
            self._link.wait(0.0 if done else 0.05)
        while len(self._held) > HELD_MAX:
            self.ack()

    def _granted(
        self, ticket: int, batch: wire.Batch, space: str, names: list[bytes], resets: int
    ) -> None:
        rows = [(names[at], offset, length) for at, length, _, offset in batch.granted]
        for name, offset, length in rows:
            self.check(space, name, self._arena.view(offset, length), resets)
        self._held.append((ticket, batch.batch, space, rows))
        self.count("held", len(rows))

    def ack(self) -> None:
        """The copy has ended: until now the bytes were what they were."""
        if self._held:
            ticket, batch, space, rows = self._held.pop(0)
            for name, offset, length in rows:
                self.check(space, name, self._arena.view(offset, length), 0)
            self._link.notify(wire.Ack(ticket, batch))
            self.count("acked", len(rows))

    def tear(self) -> None:
        """Another connection that ends in the middle of a frame."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(self.path)
            stream = wire.encode(0, wire.Hello(self.draw.randbytes(16), "torn", False))
            stream += wire.encode(1, wire.OpenNamespace([["model", "loud"]]))
            stream += wire.encode(2, wire.Lookup(0, (key_of(bytes(32)),) * 64))
            peer.sendall(stream[: self.draw.randrange(1, len(stream))])
        self.count("torn")

    def reconnect(self) -> None:
        """Hold nothing, and come back on a new connection."""
        while self._held:
            self.ack()
        while self._pins:
            self.unpin()
        self._link.close()
        self._connect()
        self.count("reconnected")

    def meddle(self) -> None:
        """One of these."""
        acts = {
            self.look_up: 20, self.pin: 6, self.unpin: 4, self.abandon: 8, self.hold: 10,
            self.ack: 8, self.tear: 3, self.reconnect: 2,
        }  # fmt: skip
        self.draw.choices([*acts], [*acts.values()])[0]()


def run_plain(soaker: Soaker) -> None:
    """Through `ebbtide.Client`."""
    with ebbtide.Client(soaker.path) as client:
        spaces = {space: client.namespace(model=space) for space in SPACES}
        while not soaker.ledger.is_over:
            space, names = soaker.choose()
            if soaker.draw.random() < 0.5:
                records = {name: payload_of(space, name) for name in names}
                soaker.begin_put(space, records)
                soaker.was_put(space, [*records], spaces[space].put_many(records))
            else:
                resets = soaker.ledger.resets_ended(space)
                soaker.got(space, names, spaces[space].get_many(names), resets)
            if soaker.draw.random() < 0.5:
                soaker.meddle()
            time.sleep(soaker.draw.random() * PAUSE_S)


async def run_asynchronous(soaker: Soaker) -> None:
    """Through `ebbtide.AsyncClient`: calls at the same time, some of them given up."""

    putting: set[tuple[str, bytes]] = set()  # own names: one put of each at a time

    async def put(space: str, names: list[bytes]) -> None:
        mine = [name for name in dict.fromkeys(names) if (space, name) not in putting]
        marks = {(space, name) for name in mine if soaker.is_own(name)}
        putting.update(marks)
        soaker.begin_put(space, mine)
        held = await spaces[space].put_many({name: payload_of(space, name) for name in mine})
        soaker.was_put(space, mine, held)
        putting.difference_update(marks)

    async def get(space: str, names: list[bytes]) -> None:
        resets = soaker.ledger.resets_ended(space)
        soaker.got(space, names, await spaces[space].get_many(names), resets)

    async def act() -> None:
        space, names = soaker.choose()
        storing = soaker.draw.random() < 0.5
        impatient = not storing and soaker.draw.random() < 0.2
        try:
            async with asyncio.timeout(GIVEN_UP_S if impatient else PATIENCE_S):
                await (put if storing else get)(space, names)
        except TimeoutError:
            soaker.count("given_up")

    async with ebbtide.AsyncClient(soaker.path) as client:
        spaces = {space: client.namespace(model=space) for space in SPACES}
        while not soaker.ledger.is_over:
            await asyncio.gather(*(act() for _ in range(soaker.draw.randint(1, 4))))
            if soaker.draw.random() < 0.3:
                soaker.meddle()
            await asyncio.sleep(soaker.draw.random() * PAUSE_S)


def main() -> None:
    """Until the ledger says that it is over."""
    path, ledger_path, row, seed, kind = sys.argv[1:]
    ledger = Ledger(ledger_path)
    soaker = Soaker(path, ledger, int(row), seed)
    if kind == "plain":
        run_plain(soaker)
    else:
        asyncio.run(run_asynchronous(soaker))
    soaker.close()
    ledger.close()


if __name__ == "__main__":
    main()
