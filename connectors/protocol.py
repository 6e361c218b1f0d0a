"""The wire protocol's frames: encode and feed, without any I/O. `docs/protocol.md` is the
specification.

A message is a frozen dataclass; the same objects travel between an in-process client and its
session, unencoded. `Decoder.feed` accepts bytes as they come and never holds more than one frame.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cbor2
import numpy as np

from ebbtide.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = (1, 0)
HEADER = struct.Struct("<IBBHQ")
FRAME_BYTES_MAX = 4 << 20
ALL_NAMESPACES = 2**32 - 1
KEY_WIDTHS = (36, 20)  # 32- or 16-byte block hash + 4-byte KV group
KEYS_MAX = 65_536

_KEYS_HEAD = struct.Struct("<IH")
_RESERVE_HEAD = struct.Struct("<IHI")
_GRANTED = np.dtype([("position", "<u4"), ("length", "<u4"), ("source", "<u4"), ("offset", "<u8")])
_GRANT = np.dtype([("offset", "<u8"), ("sequence", "<u8")])
_FAILURE = np.dtype([("position", "<u4"), ("reason", "<u4")])


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. `kind` is the frame's, in both directions unique."""

    kind: ClassVar[int]

    def body(self) -> bytes:
        """The frame's body."""
        return b""

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        """The message of a body. Raises ProtocolError."""
        if len(body):
            raise ProtocolError("A frame without body has one", kind=cls.kind)
        return cls()


def _cbor(body: memoryview, wanted: Mapping[str, type]) -> dict[str, Any]:
    try:
        fields = cbor2.loads(bytes(body))
    except (cbor2.CBORDecodeError, ValueError, RecursionError) as error:
        raise ProtocolError("A control frame is not CBOR", reason=error) from error
    if not isinstance(fields, dict):
        raise ProtocolError("A control frame is not a CBOR map")
    for name, kinds in wanted.items():
        if not isinstance(fields.get(name), kinds):
            raise ProtocolError("A control frame lacks a field or has the wrong type", field=name)
    return {name: fields[name] for name in wanted}


# -- messages with a list of keys -----------------------------------------------------------------


def _join_keys(namespace: int, keys: Sequence[bytes]) -> bytes:
    width = len(keys[0]) if keys else KEY_WIDTHS[0]
    return _KEYS_HEAD.pack(namespace, width) + b"".join(keys)


def _split_keys(body: memoryview, width: int, kind: int) -> tuple[bytes, ...]:
    """Never pads or cuts: a width that is no key's, or a ragged end, is an error."""
    if width not in KEY_WIDTHS or len(body) % width or len(body) // width > KEYS_MAX:
        raise ProtocolError("Keys of the wrong width", kind=kind, width=width, bytes=len(body))
    packed = bytes(body)
    return tuple(packed[at : at + width] for at in range(0, len(packed), width))


@dataclass(frozen=True, slots=True)
class _Keyed(Message):
    namespace: int
    keys: tuple[bytes, ...]

    def body(self) -> bytes:
        return _join_keys(self.namespace, self.keys)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        if len(body) < _KEYS_HEAD.size:
            raise ProtocolError("A frame is too short", kind=cls.kind)
        namespace, width = _KEYS_HEAD.unpack_from(body)
        return cls(namespace, _split_keys(body[_KEYS_HEAD.size :], width, cls.kind))


@dataclass(frozen=True, slots=True)
class Lookup(_Keyed):
    kind: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Touch(_Keyed):
    kind: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class LoadKeys(_Keyed):
    kind: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Pin(_Keyed):
    kind: ClassVar[int] = 12


@dataclass(frozen=True, slots=True)
class Unpin(_Keyed):
    kind: ClassVar[int] = 13


@dataclass(frozen=True, slots=True)
class Reserve(Message):
    kind: ClassVar[int] = 5
    namespace: int
    record_bytes: int
    keys: tuple[bytes, ...]

    def body(self) -> bytes:
        width = len(self.keys[0]) if self.keys else KEY_WIDTHS[0]
        return _RESERVE_HEAD.pack(self.namespace, width, self.record_bytes) + b"".join(self.keys)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        if len(body) < _RESERVE_HEAD.size:
            raise ProtocolError("A frame is too short", kind=cls.kind)
        namespace, width, record_bytes = _RESERVE_HEAD.unpack_from(body)
        return cls(
            namespace, record_bytes, _split_keys(body[_RESERVE_HEAD.size :], width, cls.kind)
        )


# -- messages with a list of sequences ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sequenced(Message):
    sequences: tuple[int, ...]

    def body(self) -> bytes:
        return struct.pack(f"<{len(self.sequences)}Q", *self.sequences)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        if len(body) % 8:
            raise ProtocolError("A list of sequences has a ragged end", kind=cls.kind)
        return cls(struct.unpack(f"<{len(body) // 8}Q", body))


@dataclass(frozen=True, slots=True)
class Commit(_Sequenced):
    kind: ClassVar[int] = 6


@dataclass(frozen=True, slots=True)
class Abort(_Sequenced):
    kind: ClassVar[int] = 7


# -- messages of fixed integers -------------------------------------------------------------------


def _unpack(kind: int, layout: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    if len(body) != layout.size:
        raise ProtocolError("A frame has the wrong size", kind=kind, bytes=len(body))
    return layout.unpack(body)


_ACK = struct.Struct("<QI")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Ack(Message):
    kind: ClassVar[int] = 9
    load_ticket: int
    batch: int

    def body(self) -> bytes:
        return _ACK.pack(self.load_ticket, self.batch)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*_unpack(cls.kind, _ACK, body))


@dataclass(frozen=True, slots=True)
class Release(Message):
    kind: ClassVar[int] = 10
    load_ticket: int

    def body(self) -> bytes:
        return _U64.pack(self.load_ticket)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*_unpack(cls.kind, _U64, body))


@dataclass(frozen=True, slots=True)
class Reset(Message):
    kind: ClassVar[int] = 11
    namespace: int = ALL_NAMESPACES

    def body(self) -> bytes:
        return _U32.pack(self.namespace)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*_unpack(cls.kind, _U32, body))


@dataclass(frozen=True, slots=True)
class Stats(Message):
    kind: ClassVar[int] = 14


@dataclass(frozen=True, slots=True)
class Events(Message):
    kind: ClassVar[int] = 15
    since: int = 0

    def body(self) -> bytes:
        return _U64.pack(self.since)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*_unpack(cls.kind, _U64, body))


@dataclass(frozen=True, slots=True)
class Flush(Message):
    kind: ClassVar[int] = 16


@dataclass(frozen=True, slots=True)
class Ok(Message):
    kind: ClassVar[int] = 75
    count: int = 0

    def body(self) -> bytes:
        return _U64.pack(self.count)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*_unpack(cls.kind, _U64, body))


@dataclass(frozen=True, slots=True)
class Done(Message):
    kind: ClassVar[int] = 74


# -- control messages in CBOR ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    kind: ClassVar[int] = 1
    engine: bytes  # 16 bytes; the processes of one engine share it
    role: str  # "scheduler", "worker", "tool": for humans
    arena: bool  # whether this process will map the arena
    protocol: tuple[int, int] = VERSION

    def body(self) -> bytes:
        fields = {"engine": self.engine, "role": self.role, "arena": self.arena}
        return cbor2.dumps({"protocol": list(self.protocol), **fields})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        fields = _cbor(body, {"engine": bytes, "role": str, "arena": bool, "protocol": list})
        if len(fields["engine"]) != 16:
            raise ProtocolError("An engine id has 16 bytes", got=len(fields["engine"]))
        version = fields["protocol"]
        if len(version) != 2 or not all(isinstance(part, int) for part in version):
            raise ProtocolError("A protocol version is two integers")
        return cls(fields["engine"], fields["role"], fields["arena"], (version[0], version[1]))


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    kind: ClassVar[int] = 65
    store: bytes
    arena_generation: int
    arena_bytes: int
    alignment: int
    load_window_bytes: int
    protocol: tuple[int, int] = VERSION

    def body(self) -> bytes:
        return cbor2.dumps(
            {
                "protocol": list(self.protocol),
                "store": self.store,
                "arena_generation": self.arena_generation,
                "arena_bytes": self.arena_bytes,
                "alignment": self.alignment,
                "load_window_bytes": self.load_window_bytes,
            }
        )

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        numbers = ("arena_generation", "arena_bytes", "alignment", "load_window_bytes")
        fields = _cbor(body, {"protocol": list, "store": bytes, **dict.fromkeys(numbers, int)})
        version = fields.pop("protocol")
        return cls(**fields, protocol=(version[0], version[1]))


@dataclass(frozen=True, slots=True)
class OpenNamespace(Message):
    kind: ClassVar[int] = 2
    descriptor: list[list[object]]
    pending: bool = False

    def body(self) -> bytes:
        return cbor2.dumps({"descriptor": self.descriptor, "pending": self.pending})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(**_cbor(body, {"descriptor": list, "pending": bool}))


@dataclass(frozen=True, slots=True)
class NamespaceOpened(Message):
    kind: ClassVar[int] = 66
    namespace: int
    digest: bytes
    records: int
    bytes: int

    def body(self) -> bytes:  # type: ignore[valid-type]  # the field is named as the wire names it
        fields = {"namespace": self.namespace, "digest": self.digest}
        return cbor2.dumps({**fields, "records": self.records, "bytes": self.bytes})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        fields = _cbor(body, {"namespace": int, "digest": bytes, "records": int, "bytes": int})
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Report(Message):
    kind: ClassVar[int] = 76
    report: dict[str, Any]

    def body(self) -> bytes:
        return cbor2.dumps({"report": self.report})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(**_cbor(body, {"report": dict}))


@dataclass(frozen=True, slots=True)
class Failure(Message):
    """An ERROR frame: `error` is the class name of `ebbtide.errors`."""

    kind: ClassVar[int] = 127
    error: str
    problem: str
    next_step: str = ""

    def body(self) -> bytes:
        fields = {"error": self.error, "problem": self.problem}
        return cbor2.dumps({**fields, "next_step": self.next_step})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(**_cbor(body, {"error": str, "problem": str, "next_step": str}))


# -- packed replies -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Codes(Message):
    codes: bytes

    def body(self) -> bytes:
        return self.codes

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(bytes(body))


@dataclass(frozen=True, slots=True)
class States(_Codes):
    """One byte per key of a LOOKUP."""

    kind: ClassVar[int] = 67


@dataclass(frozen=True, slots=True)
class Settled(_Codes):
    """One byte per sequence of a COMMIT or ABORT: 0 = done."""

    kind: ClassVar[int] = 70


@dataclass(frozen=True, slots=True)
class Grants(Message):
    kind: ClassVar[int] = 69
    reason: int  # why there are fewer grants than keys, else 0
    grants: tuple[tuple[int, int], ...]  # (offset, sequence)

    def body(self) -> bytes:
        return bytes([self.reason]) + np.array(list(self.grants), dtype=_GRANT).tobytes()

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        rows = _rows(cls.kind, body[1:], _GRANT)
        return cls(body[0], tuple(rows))


@dataclass(frozen=True, slots=True)
class Batch(Message):
    kind: ClassVar[int] = 72
    batch: int
    granted: tuple[tuple[int, int, int, int], ...]  # (position, length, source, offset)

    def body(self) -> bytes:
        return _U32.pack(self.batch) + np.array(list(self.granted), dtype=_GRANTED).tobytes()

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        if len(body) < 4:
            raise ProtocolError("A frame is too short", kind=cls.kind)
        return cls(_U32.unpack_from(body)[0], tuple(_rows(cls.kind, body[4:], _GRANTED)))


@dataclass(frozen=True, slots=True)
class Failed(Message):
    kind: ClassVar[int] = 73
    failures: tuple[tuple[int, int], ...]  # (position, reason)

    def body(self) -> bytes:
        return np.array(list(self.failures), dtype=_FAILURE).tobytes()

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(tuple(_rows(cls.kind, body, _FAILURE)))


def _rows(kind: int, body: memoryview, layout: np.dtype[Any]) -> list[Any]:
    if len(body) % layout.itemsize:
        raise ProtocolError("A packed list has a ragged end", kind=kind, bytes=len(body))
    rows: list[Any] = np.frombuffer(body, dtype=layout).tolist()
    return rows


# -- frames ---------------------------------------------------------------------------------------

_KINDS: dict[int, type[Message]] = {
    message.kind: message
    for message in (
        Hello, OpenNamespace, Lookup, Touch, Reserve, Commit, Abort, LoadKeys, Ack, Release, Reset,
        Pin, Unpin, Stats, Events, Flush, Welcome, NamespaceOpened, States, Grants, Settled, Batch,
        Failed, Done, Ok, Report, Failure,
    )
}  # fmt: skip


def encode(ticket: int, message: Message) -> bytes:
    """The message's frame. Raises ProtocolError when it is larger than the peer would accept."""
    body = message.body()
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError("A frame would be too large", kind=message.kind, bytes=len(body))
    return HEADER.pack(len(body), message.kind, 0, 0, ticket) + body


class Decoder:
    """Turns bytes into (ticket, message). Buffers at most one incomplete frame."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, Message]]:
        """Every message that is complete now. Raises ProtocolError; the stream is over then."""
        self._buffer += data
        messages: list[tuple[int, Message]] = []
        consumed = 0
        with memoryview(self._buffer) as view:
            while len(view) - consumed >= HEADER.size:
                size, kind, zero, also_zero, ticket = HEADER.unpack_from(view, consumed)
                if size > self._frame_bytes_max or zero or also_zero:
                    raise ProtocolError("A frame's header is wrong", kind=kind, bytes=size)
                end = consumed + HEADER.size + size
                if len(view) < end:
                    break
                known = _KINDS.get(kind)
                if known is None:
                    raise ProtocolError("A frame of unknown kind", kind=kind)
                with view[consumed + HEADER.size : end] as body:
                    message = known.parse(body)
                consumed = end
                messages.append((ticket, message))
        del self._buffer[:consumed]
        return messages
