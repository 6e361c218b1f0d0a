"""One client process of `ebbtide bench daemon`: obeys a line of JSON, answers with one.

Every measure has a twin, `raw_...`: the same bytes over a raw socket, and the same copies within
the same arena, in slots that this process has reserved and never commits.

Digests are this client's own work, as they are of `ebbtide.Client`; or, as with the engines'
connectors, the store's.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec import json as msgspec_json

from ebbtide.bench.daemon_raw import RawClient
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.errors import EbbtideError
from ebbtide.tiers.digest import copy_and_digest, record_seed
from ebbtide.tiers.reasons import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STORED = 32  # records that one turn stores
RAW_SLOTS = 128  # that the raw copies go round: a store's slots are not in the cache either
KEPT = 64  # of its latest records, which a turn loads from
STAMP_BYTES = 8
PATIENCE_S = 30.0
LOAD_REQUEST_BYTES = 16 + 6 + 36  # of one key
LOAD_ANSWER_BYTES = 16 + 4 + 20  # a batch of one record


class Start(Struct):
    """What a worker is told before anything else."""

    socket: str
    raw_socket: str
    number: int  # of the worker: its keys are its own
    record_bytes: int


class Order(Struct):
    """Do this for so many seconds, or so many times."""

    verb: str
    seconds: float = 0.0
    keys: int = 0
    count: int = 0
    digests_by_store: bool = False


class Answer(Struct):
    """What was done."""

    loaded: int = 0  # records, all right ones and from memory
    stored: int = 0
    wrong: int = 0  # other bytes than were stored, or not verified, or from elsewhere
    missing: int = 0
    refused: int = 0  # reservations that got fewer slots than they asked for
    seconds: float = 0.0
    times_ms: list[float] = []


class Worker:
    """The client, its records, and a buffer that stands for a device."""

    def __init__(self, start: Start) -> None:
        self._number, self._record_bytes = start.number, start.record_bytes
        self._client = SocketClient(start.socket, os.urandom(16), "bench", arena=True)
        opened = ask(self._client, wire.OpenNamespace([["bench", "daemon"]]))
        assert isinstance(opened, wire.NamespaceOpened)
        self._namespace, self._namespace_digest = opened.namespace, opened.digest
        self._raw = RawClient(start.raw_socket)
        self._device = memoryview(bytearray(os.urandom(start.record_bytes) * STORED))
        self._finals: dict[int, wire.Message] = {}  # last answers that nobody has asked for yet
        self._next = 0  # number of the next record
        self._digests_by_store = False
        self._slots = self._reserve_slots()

    def _reserve_slots(self) -> list[int]:
        """Slots of the arena for the raw copies."""
        keys = tuple(self._key(2**40 + n) for n in range(RAW_SLOTS))
        answer = ask(self._client, wire.Reserve(self._namespace, self._record_bytes, keys))
        assert isinstance(answer, wire.Grants)
        if len(answer.grants) < RAW_SLOTS:
            raise EbbtideError("The store has too few slots for this benchmark")
        return [offset for offset, _ in answer.grants]

    # -- orders ---------------------------------------------------------------------------------

    def obey(self, order: Order) -> Answer:
        """Do it."""
        self._digests_by_store = order.digests_by_store
        began, answer = time.perf_counter(), Answer()
        getattr(self, order.verb)(order, answer, began + order.seconds)
        answer.seconds = time.perf_counter() - began
        return answer

    def fill(self, order: Order, answer: Answer, until: float) -> None:
        """Store records until there are `count` more."""
        while answer.stored < order.count:
            self._await(self._commit(self._copy_in(self._reserve(STORED), answer)), answer)

    def mixed(self, order: Order, answer: Answer, until: float) -> None:
        """Store some, load as many of the latest, again and again."""
        while time.perf_counter() < until:
            committing = self._commit(self._copy_in(self._reserve(STORED), answer))
            first = self._next - KEPT - STORED  # those being committed are not asked for
            self._load(range(first, first + STORED), answer)
            self._await(committing, answer)

    def raw_mixed(
        self, order: Order, answer: Answer, until: float, *, verified: bool = False
    ) -> None:
        """The same copies in as much memory, and nobody to ask."""
        turn = 0
        while time.perf_counter() < until:
            turn += 1
            for position in range(STORED):
                slot = self._slot(self._slots[(turn * STORED + position) % RAW_SLOTS])
                part = self._part(position)
                if verified:
                    copy_and_digest(slot, part, part, position)
                else:
                    slot[:] = part
            for position in range(STORED):
                slot = self._slot(self._slots[((turn - 2) * STORED + position) % RAW_SLOTS])
                part = self._part(position)
                if verified:
                    copy_and_digest(part, slot, part, position)
                else:
                    part[:] = slot
            answer.stored += STORED
            answer.loaded += STORED

    def raw_verified(self, order: Order, answer: Answer, until: float) -> None:
        """The same, and of each record the digest: stored, and loaded."""
        self.raw_mixed(order, answer, until, verified=True)

    def flood(self, order: Order, answer: Answer, until: float) -> None:
        """Store as fast as the store takes it, two commits under way."""
        committing: list[int] = []
        while time.perf_counter() < until:
            committing.append(self._commit(self._copy_in(self._reserve(STORED), answer)))
            if len(committing) > 1:
                self._await(committing.pop(0), answer)
        for ticket in committing:
            self._await(ticket, answer)

    def loads(self, order: Order, answer: Answer, until: float) -> None:
        """One record after the other, of some that nobody else's stores evict meanwhile."""
        latest = range(self._next - KEPT, self._next)
        keys = tuple(map(self._key, latest))
        self._await(self._client.submit(wire.Pin(self._namespace, keys)), answer)
        self._timed(order, answer, until, lambda number: self._load((number,), answer))
        self._await(self._client.submit(wire.Unpin(self._namespace, keys)), answer)

    def raw_loads(self, order: Order, answer: Answer, until: float) -> None:
        """The same bytes over a raw socket, and the same copy."""
        self._raw.sizes(LOAD_REQUEST_BYTES, LOAD_ANSWER_BYTES)
        request = bytes(LOAD_REQUEST_BYTES)

        def load(number: int) -> None:
            self._raw.ask(request)
            self._part(0)[:] = self._slot(self._slots[number % KEPT])
            answer.loaded += 1

        self._timed(order, answer, until, load)
        self._raw.done()

    def lookups(self, order: Order, answer: Answer, until: float) -> None:
        """Ask for this many keys, all of them held, so many times."""
        keys = tuple(self._key(number) for number in range(order.keys))
        message = wire.Lookup(self._namespace, keys)

        def look_up(_: int) -> None:
            states = self._await(self._client.submit(message), answer)
            assert isinstance(states, wire.States)
            answer.loaded += states.codes.count(Place.MEMORY)

        self._timed(order, answer, until, look_up)

    def raw_lookups(self, order: Order, answer: Answer, until: float) -> None:
        """As many bytes each way."""
        keys = tuple(self._key(number) for number in range(order.keys))
        request = bytes(len(wire.encode(1, wire.Lookup(self._namespace, keys))))
        self._raw.sizes(len(request), len(wire.encode(1, wire.States(bytes(order.keys)))))
        self._timed(order, answer, until, lambda _: self._raw.ask(request))
        self._raw.done()
        answer.loaded = order.keys * order.count

    # -- inside ---------------------------------------------------------------------------------

    def _timed(
        self, order: Order, answer: Answer, until: float, work: Callable[[int], None]
    ) -> None:
        numbers = self._latest()
        while time.perf_counter() < until or len(answer.times_ms) < order.count:
            number = next(numbers)
            began = time.perf_counter()
            work(number)
            answer.times_ms.append((time.perf_counter() - began) * 1e3)

    def _latest(self) -> Iterator[int]:
        while True:
            yield from range(max(0, self._next - KEPT), max(1, self._next))

    def _reserve(self, count: int) -> tuple[Sequence[int], Sequence[tuple[int, int]], int]:
        numbers = range(self._next, self._next + count)
        keys = tuple(map(self._key, numbers))
        ticket = self._client.submit(wire.Reserve(self._namespace, self._record_bytes, keys))
        grants = self._await(ticket, Answer())
        assert isinstance(grants, wire.Grants)
        self._next += len(grants.grants)
        return numbers, grants.grants, count - len(grants.grants)

    def _copy_in(
        self, reserved: tuple[Sequence[int], Sequence[tuple[int, int]], int], answer: Answer
    ) -> list[tuple[int, bytes]]:
        """The sequences of what was copied, and the digests, if they are this client's work."""
        numbers, grants, missing = reserved
        answer.refused += bool(missing)
        rows = []
        for position, (number, (offset, sequence)) in enumerate(zip(numbers, grants, strict=False)):
            part = self._part(position)
            part[:STAMP_BYTES] = number.to_bytes(STAMP_BYTES, "little")
            rows.append((sequence, self._copy(self._slot(offset), part, part, number)))
        answer.stored += len(grants)
        return rows

    def _commit(self, rows: Sequence[tuple[int, bytes]]) -> int:
        if self._digests_by_store:
            return self._client.submit(wire.Commit(tuple(sequence for sequence, _ in rows)))
        return self._client.submit(wire.CommitDigests(tuple(rows)))

    def _copy(self, target: memoryview, source: memoryview, mine: memoryview, number: int) -> bytes:
        """Returns the record's digest, if that is this client's work."""
        if self._digests_by_store:
            target[:] = source
            return b""
        seed = record_seed(self._namespace_digest, self._key(number))
        return copy_and_digest(target, source, mine, seed)

    def _load(self, numbers: Sequence[int], answer: Answer) -> None:
        keys = tuple(map(self._key, numbers))
        kind = wire.LoadKeys if self._digests_by_store else wire.LoadToVerify
        self._await(self._client.submit(kind(self._namespace, keys)), answer, numbers)

    def _await(self, ticket: int, answer: Answer, numbers: Sequence[int] = ()) -> wire.Message:
        """The last answer to a ticket. What others bring meanwhile is kept."""
        deadline = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < deadline:
            if ticket in self._finals:
                final = self._finals.pop(ticket)
                if isinstance(final, wire.Failure):
                    raise EbbtideError("The store failed", reason=final.problem)
                return final
            for completion in self._client.poll():
                message = completion.message
                if isinstance(message, wire.Batch | wire.BatchToVerify):
                    self._copy_out(message, numbers, answer)
                    self._client.notify(wire.Ack(completion.ticket, message.batch))
                elif isinstance(message, wire.Failed):
                    answer.missing += len(message.failures)
                if completion.final:
                    self._finals[completion.ticket] = message
            if ticket not in self._finals:
                self._client.wait(0.05)
        raise EbbtideError("The store did not answer in time", ticket=ticket)

    def _copy_out(
        self, batch: wire.Batch | wire.BatchToVerify, numbers: Sequence[int], answer: Answer
    ) -> None:
        for position, _, source, offset, *digest in batch.granted:
            part, number = self._part(position % STORED), numbers[position]
            found = self._copy(part, self._slot(offset), part, number)
            stamp = int.from_bytes(part[:STAMP_BYTES], "little")
            right = stamp == number and source == Place.MEMORY
            right = right and (self._digests_by_store or digest == [found])
            answer.loaded += right
            answer.wrong += not right

    def _slot(self, offset: int) -> memoryview:
        assert self._client.arena is not None
        return self._client.arena.view(offset, self._record_bytes)

    def _part(self, position: int) -> memoryview:
        return self._device[position * self._record_bytes : (position + 1) * self._record_bytes]

    def _key(self, number: int) -> bytes:
        return self._number.to_bytes(8, "big") + number.to_bytes(24, "big") + bytes(4)

    def close(self) -> None:
        self._raw.close()
        self._client.close()


def main(start: str) -> None:
    """Obey until standard input ends."""
    worker = Worker(msgspec_json.decode(start, type=Start))
    print("ready", flush=True)
    for line in sys.stdin:
        answer = worker.obey(msgspec_json.decode(line, type=Order))
        sys.stdout.buffer.write(msgspec_json.encode(answer) + b"\n")
        sys.stdout.flush()
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1])
