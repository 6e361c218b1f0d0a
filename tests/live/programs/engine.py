"""An engine's worker process in small: obeys one command per line, answers with one line.

Usage: engine.py SOCKET ENGINE_ID_HEX [MODEL]. Its records have bytes that follow from their key, so
that whoever loads one can tell whether each byte is the right one.
"""

from __future__ import annotations

import hashlib
import sys
import time

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask

RECORD_BYTES = 128 << 10
HALF = RECORD_BYTES // 2
PATIENCE_S = 30.0


def key_of(number: int) -> bytes:
    """The key of a record."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def payload_of(key: bytes) -> bytes:
    """The only right bytes for a key."""
    return hashlib.sha256(key).digest() * (RECORD_BYTES // 32)


class Worker:
    """One process of an engine. Every method but `__init__` is a command."""

    def __init__(self, socket_path: str, engine: bytes, model: str = "m") -> None:
        self.client = SocketClient(socket_path, engine, "worker", arena=True)
        opened = ask(self.client, wire.OpenNamespace([["model", model]]))
        assert isinstance(opened, wire.NamespaceOpened)
        self.namespace = opened.namespace
        self.slots: dict[bytes, tuple[int, int]] = {}

    def reserve(self, start: int, count: int) -> str:
        """Take slots for records. Returns how many."""
        keys = tuple(key_of(number) for number in range(start, start + count))
        answer = ask(self.client, wire.Reserve(self.namespace, RECORD_BYTES, keys))
        assert isinstance(answer, wire.Grants)
        for key, slot in zip(keys, answer.grants, strict=False):
            if slot[1]:
                self.slots[key] = slot
        return str(len(answer.grants))

    def half(self) -> str:
        """Write the first half of every reserved slot."""
        return self._write(0, HALF)

    def rest(self) -> str:
        """Write the second half of every reserved slot."""
        return self._write(HALF, RECORD_BYTES)

    def commit(self) -> str:
        """Commit every reserved slot. Returns the codes in hex."""
        sequences = tuple(sequence for _, sequence in self.slots.values())
        self.slots.clear()
        answer = ask(self.client, wire.Commit(sequences))
        assert isinstance(answer, wire.Settled)
        return answer.codes.hex()

    def put(self, start: int, count: int) -> str:
        """Store records until all are in or the store has no slot for a second. Returns how many"""
        at, idle_since = start, time.monotonic()
        while at < start + count and time.monotonic() - idle_since < 1.0:
            taken = int(self.reserve(at, start + count - at))
            if taken:
                self.half(), self.rest(), self.commit()
                at, idle_since = at + taken, time.monotonic()
            else:
                time.sleep(0.01)
        return str(at - start)

    def load(self, start: int, count: int) -> str:
        """Load records and compare every byte. Returns "right wrong missing"."""
        keys = tuple(key_of(number) for number in range(start, start + count))
        ticket = self.client.submit(wire.LoadKeys(self.namespace, keys))
        right = wrong = missing = 0
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for completion in self.client.poll():
                match completion.message:
                    case wire.Batch(batch, granted):
                        for position, length, _, offset in granted:
                            same = self._arena(offset, length) == payload_of(keys[position])
                            right, wrong = right + same, wrong + (not same)
                        self.client.notify(wire.Ack(ticket, batch))
                    case wire.Failed(failures):
                        missing += len(failures)
                    case wire.Done():
                        return f"{right} {wrong} {missing}"
            self.client.wait(0.05)
        return "late"

    def hold(self, start: int, count: int) -> str:
        """Load records and never say that the copies have ended. Returns how many came."""
        keys = tuple(key_of(number) for number in range(start, start + count))
        self.client.submit(wire.LoadKeys(self.namespace, keys))
        granted = 0
        deadline = time.monotonic() + PATIENCE_S
        while not granted and time.monotonic() < deadline:
            for completion in self.client.poll():
                if isinstance(completion.message, wire.Batch):
                    granted += len(completion.message.granted)
            self.client.wait(0.05)
        return str(granted)

    def disconnect(self) -> str:
        """Close the connection and live on, still mapping the arena."""
        kept = self.client.arena
        self.client.arena = None
        self.client.close()
        return "gone" if kept is not None else "never had it"

    def _write(self, start: int, end: int) -> str:
        for key, (offset, _) in self.slots.items():
            self._arena(offset, RECORD_BYTES)[start:end] = payload_of(key)[start:end]
        return str(len(self.slots))

    def _arena(self, offset: int, length: int) -> memoryview:
        assert self.client.arena is not None
        return self.client.arena.view(offset, length)


def main() -> None:
    """Obey until standard input ends."""
    worker = Worker(sys.argv[1], bytes.fromhex(sys.argv[2]), *sys.argv[3:])
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        command, *numbers = line.split()
        print(getattr(worker, command)(*map(int, numbers)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
