"""The messages of the store. `docs/protocol.md` says what each means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cbor2
import numpy as np

from ebbtide.connectors.message import (
    U32,
    U64,
    VERSION,
    Message,
    pack_rows,
    read_fields,
    read_fixed,
    read_rows,
    read_version,
    take_head,
)
from ebbtide.errors import ProtocolError
from ebbtide.tiers.digest import DIGEST_BYTES

_GRANTED = np.dtype([("position", "<u4"), ("length", "<u4"), ("source", "<u4"), ("offset", "<u8")])
_TO_VERIFY = np.dtype([*_GRANTED.descr, ("digest", f"V{DIGEST_BYTES}")])
_GRANT = np.dtype([("offset", "<u8"), ("sequence", "<u8")])
_FAILURE = np.dtype([("position", "<u4"), ("reason", "<u4")])


# -- CBOR -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    kind: ClassVar[int] = 65
    store: bytes  # 16 bytes, new with every process
    arena_generation: int
    arena_bytes: int
    alignment: int
    load_window_bytes: int
    frame_bytes_max: int
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
                "frame_bytes_max": self.frame_bytes_max,
            }
        )

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        numbers = (
            "arena_generation",
            "arena_bytes",
            "alignment",
            "load_window_bytes",
            "frame_bytes_max",
        )
        wanted = {"protocol": list, "store": bytes, **dict.fromkeys(numbers, int)}
        fields = read_fields(body, wanted)
        if any(fields[name] < 0 for name in numbers):
            raise ProtocolError("A number of WELCOME is negative")
        version = read_version(fields.pop("protocol"))
        return cls(**fields, protocol=version)


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
        wanted = {"namespace": int, "digest": bytes, "records": int, "bytes": int}
        return cls(**read_fields(body, wanted))


@dataclass(frozen=True, slots=True)
class Report(Message):
    kind: ClassVar[int] = 76
    report: dict[str, Any]

    def body(self) -> bytes:
        return cbor2.dumps({"report": self.report})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(**read_fields(body, {"report": dict}))


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
        return cls(**read_fields(body, {"error": str, "problem": str, "next_step": str}))


# -- packed ---------------------------------------------------------------------------------------


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
        return bytes([self.reason]) + pack_rows(self.grants, _GRANT)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        if not len(body):
            raise ProtocolError("A frame is too short", kind=cls.kind)
        return cls(body[0], read_rows(cls.kind, body[1:], _GRANT))


@dataclass(frozen=True, slots=True)
class Batch(Message):
    kind: ClassVar[int] = 72
    batch: int
    granted: tuple[tuple[int, int, int, int], ...]  # (position, length, source, offset)

    def body(self) -> bytes:
        return U32.pack(self.batch) + pack_rows(self.granted, _GRANTED)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        (batch,) = take_head(cls.kind, U32, body)
        return cls(batch, read_rows(cls.kind, body[U32.size :], _GRANTED))


@dataclass(frozen=True, slots=True)
class BatchToVerify(Message):
    """A batch of a LOAD_TO_VERIFY."""

    kind: ClassVar[int] = 77
    batch: int
    # (position, length, source, offset, digest)
    granted: tuple[tuple[int, int, int, int, bytes], ...]

    def body(self) -> bytes:
        return U32.pack(self.batch) + pack_rows(self.granted, _TO_VERIFY)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        (batch,) = take_head(cls.kind, U32, body)
        return cls(batch, read_rows(cls.kind, body[U32.size :], _TO_VERIFY))


@dataclass(frozen=True, slots=True)
class Failed(Message):
    kind: ClassVar[int] = 73
    failures: tuple[tuple[int, int], ...]  # (position, reason)

    def body(self) -> bytes:
        return pack_rows(self.failures, _FAILURE)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(read_rows(cls.kind, body, _FAILURE))


@dataclass(frozen=True, slots=True)
class Done(Message):
    kind: ClassVar[int] = 74


@dataclass(frozen=True, slots=True)
class Ok(Message):
    kind: ClassVar[int] = 75
    count: int = 0

    def body(self) -> bytes:
        return U64.pack(self.count)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*read_fixed(cls.kind, U64, body))
