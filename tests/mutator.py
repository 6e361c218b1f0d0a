"""Frames that no honest client sends, reproducible by seed, and what a store makes of them."""

from __future__ import annotations

import os
import random

import cbor2

from ebbtide.connectors import protocol as wire
from ebbtide.errors import ProtocolError

KEYS = tuple(bytes([number]) * 36 for number in range(4))
FRAMES_MAX = 16  # of one connection
HUGE = (wire.FRAME_BYTES_MAX + 1, 2**31, 2**32 - 1)

HONEST: tuple[wire.Message, ...] = (
    wire.OpenNamespace([["model", "m"]]),
    wire.OpenNamespace([["model", "n"], ["layers", ["a", "b"]], ["block_size", 16]], True),
    wire.Lookup(0, KEYS),
    wire.Touch(0, KEYS),
    wire.Reserve(0, 4096, KEYS),
    wire.Commit((1, 2, 3)),
    wire.Abort((1, 2, 3)),
    wire.LoadKeys(0, KEYS),
    wire.Ack(1, 0),
    wire.Release(1),
    wire.Reset(1),
    wire.Pin(0, KEYS[:1]),
    wire.Unpin(0, KEYS[:1]),
    wire.Stats(),
    wire.Events(10**6),
    wire.Flush(),
    wire.Describe(),
    wire.Check(),
    wire.Purge(bytes(32)),
    wire.Find(bytes(32)),
    wire.PinRecords(bytes(32), KEYS),
    wire.UnpinRecords(bytes(32)),
    wire.CommitDigests(((1, bytes(16)), (2, bytes(16)))),
    wire.LoadToVerify(0, KEYS),
    wire.Dispute(1, 0, (0, 1, 70_000)),
    wire.Ok(1),
    wire.Done(),
)


class Mutator:
    """Streams of one connection each. Two of one seed make the same."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def stream(self) -> list[bytes]:
        """A greeting, honest but for one in ten, and a few frames."""
        chance = self._chance
        hello = wire.encode(0, wire.Hello(chance.randbytes(16), "tool", False))
        frames = [self._spoil(hello) if chance.random() < 0.1 else hello]
        for _ in range(chance.randint(1, FRAMES_MAX)):
            frame = wire.encode(chance.randint(1, 99), chance.choice(HONEST))
            frames.append(self._spoil(frame) if chance.random() < 0.4 else frame)
        return frames

    def _spoil(self, frame: bytes) -> bytes:
        chance, spoiled = self._chance, bytearray(frame)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(spoiled))
            match chance.randrange(9):
                case 0:
                    spoiled[at] ^= 1 << chance.randrange(8)
                case 1:
                    spoiled[at] = chance.randrange(256)
                case 2 if len(spoiled) > wire.HEADER.size:
                    del spoiled[at : at + chance.randint(1, 8)]
                case 3:
                    spoiled[at:at] = chance.randbytes(chance.randint(1, 40))
                case 4:
                    spoiled[4] = chance.randrange(24)  # another kind
                case 5:
                    spoiled[:4] = chance.choice(HUGE).to_bytes(4, "little")
                case 6:
                    spoiled[8:16] = bytes(8)  # a request without a ticket
                case 7:
                    spoiled = bytearray(self._odd_body(spoiled[4]))
                case _:
                    spoiled[:] = self._odd_body(chance.randrange(256))
            if not spoiled:
                return chance.randbytes(1)
        return bytes(spoiled)

    def _odd_body(self, kind: int) -> bytes:
        """A frame of the right length whose body is not."""
        chance = self._chance
        body = chance.choice(
            (
                chance.randbytes(chance.randrange(200)),
                b"\x81" * chance.randint(1, 2000),  # arrays in arrays
                b"\x9a\x00\xff\xff\xff" + b"\x80" * 5000,  # a swarm of empty ones
                cbor2.dumps({"descriptor": [["model", chance.randbytes(9)]], "pending": False}),
                cbor2.dumps({"namespace": chance.randbytes(32), "keys": [chance.randbytes(36)]}),
                cbor2.dumps({"start": chance.getrandbits(70) - 2**69}),
                bytes(chance.randrange(5000)),
            )
        )
        return wire.HEADER.pack(len(body), kind, 0, 0, chance.randint(1, 99)) + body


def refused_at(frames: list[bytes]) -> int | None:
    """How many frames arrive, the one included that ends the connection; None: none does.

    By the rules of docs/protocol.md, on what a stream reader makes of the joined frames.
    """
    decoder, first = wire.Decoder(), True
    for number, frame in enumerate(frames, start=1):
        try:
            messages = decoder.feed(frame)
        except ProtocolError:
            return number
        for ticket, message in messages:
            if first:
                wrong = not isinstance(message, wire.Hello) or message.protocol[0] != 1
            else:
                wrong = not isinstance(message, wire.REQUESTS) or isinstance(message, wire.Hello)
                wrong = wrong or (message.answered and not ticket)
            if wrong:
                return number
            first = False
    return None


def frames_wanted(default: int) -> int:
    """How many frames a test sends: EBBTIDE_TEST_FUZZ_FRAMES for the long form."""
    return int(os.environ.get("EBBTIDE_TEST_FUZZ_FRAMES", default))
