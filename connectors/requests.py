"""The messages of a client. `docs/protocol.md` says what each means and what answers it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import cbor2
import numpy as np

from ebbtide.connectors.message import (
    ALL_NAMESPACES,
    ENGINE_ID_BYTES,
    KEY_WIDTHS,
    KEYS_MAX,
    U32,
    U64,
    VERSION,
    Message,
    key_width,
    read_fields,
    read_fixed,
    read_rows,
    read_version,
    split_keys,
    take_head,
)
from ebbtide.errors import MisuseError, ProtocolError
from ebbtide.tiers.digest import DIGEST_BYTES

ROLE_CHARACTERS_MAX = 64
COMMAND_ROLE = "command"  # of a visitor: it neither keeps a private store alive nor ends it
NAMESPACE_DIGEST_BYTES = 32
CHOSEN_KEYS_MAX = 1024  # of one PIN_RECORDS or UNPIN_RECORDS
ITEMS_MAX = 4096  # CBOR items of one request

_KEYS_HEAD = struct.Struct("<IH")
_RESERVE_HEAD = struct.Struct("<IHI")
_ACK = struct.Struct("<QI")
_DIGEST = np.dtype([("sequence", "<u8"), ("digest", f"V{DIGEST_BYTES}")])


# -- opening --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    kind: ClassVar[int] = 1
    engine: bytes  # 16 bytes; the processes of one engine share it
    role: str  # "scheduler", "worker", "tool": for humans
    arena: bool  # whether this process will map the arena
    protocol: tuple[int, int] = VERSION

    def body(self) -> bytes:
        if len(self.engine) != ENGINE_ID_BYTES or len(self.role) > ROLE_CHARACTERS_MAX:
            raise MisuseError(
                "An engine id has 16 bytes, a role at most 64 characters",
                engine_bytes=len(self.engine),
                role_characters=len(self.role),
            )
        fields = {"engine": self.engine, "role": self.role, "arena": self.arena}
        return cbor2.dumps({"protocol": list(self.protocol), **fields})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        wanted = {"engine": bytes, "role": str, "arena": bool, "protocol": list}
        fields = read_fields(body, wanted, items_max=ITEMS_MAX)
        version = read_version(fields.pop("protocol"))
        if len(fields["engine"]) != ENGINE_ID_BYTES:
            raise ProtocolError("An engine id has 16 bytes", got=len(fields["engine"]))
        if len(fields["role"]) > ROLE_CHARACTERS_MAX:
            raise ProtocolError("A role is too long", got=len(fields["role"]))
        return cls(**fields, protocol=version)


@dataclass(frozen=True, slots=True)
class OpenNamespace(Message):
    kind: ClassVar[int] = 2
    descriptor: list[list[object]]
    pending: bool = False

    def body(self) -> bytes:
        return cbor2.dumps({"descriptor": self.descriptor, "pending": self.pending})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        wanted = {"descriptor": list, "pending": bool}
        return cls(**read_fields(body, wanted, items_max=ITEMS_MAX))


# -- lists of keys --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Keyed(Message):
    namespace: int
    keys: tuple[bytes, ...]

    def body(self) -> bytes:
        return _KEYS_HEAD.pack(self.namespace, key_width(self.keys)) + b"".join(self.keys)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        namespace, width = take_head(cls.kind, _KEYS_HEAD, body)
        return cls(namespace, split_keys(body[_KEYS_HEAD.size :], width, cls.kind))


@dataclass(frozen=True, slots=True)
class Lookup(_Keyed):
    kind: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Touch(_Keyed):
    kind: ClassVar[int] = 4
    answered: ClassVar[bool] = False


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
        head = _RESERVE_HEAD.pack(self.namespace, key_width(self.keys), self.record_bytes)
        return head + b"".join(self.keys)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        namespace, width, record_bytes = take_head(cls.kind, _RESERVE_HEAD, body)
        keys = split_keys(body[_RESERVE_HEAD.size :], width, cls.kind)
        return cls(namespace, record_bytes, keys)


# -- lists of sequences ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sequenced(Message):
    sequences: tuple[int, ...]

    def body(self) -> bytes:
        if len(self.sequences) > KEYS_MAX:
            raise MisuseError("Too many sequences for one message", got=len(self.sequences))
        return struct.pack(f"<{len(self.sequences)}Q", *self.sequences)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        count, rest = divmod(len(body), 8)
        if rest or count > KEYS_MAX:
            raise ProtocolError("A list of sequences has no valid length", bytes=len(body))
        return cls(struct.unpack(f"<{count}Q", body))


@dataclass(frozen=True, slots=True)
class Commit(_Sequenced):
    kind: ClassVar[int] = 6


@dataclass(frozen=True, slots=True)
class Abort(_Sequenced):
    kind: ClassVar[int] = 7


# -- fixed integers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack(Message):
    kind: ClassVar[int] = 9
    answered: ClassVar[bool] = False
    load_ticket: int
    batch: int

    def body(self) -> bytes:
        return _ACK.pack(self.load_ticket, self.batch)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*read_fixed(cls.kind, _ACK, body))


@dataclass(frozen=True, slots=True)
class Release(Message):
    kind: ClassVar[int] = 10
    answered: ClassVar[bool] = False
    load_ticket: int

    def body(self) -> bytes:
        return U64.pack(self.load_ticket)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*read_fixed(cls.kind, U64, body))


@dataclass(frozen=True, slots=True)
class Reset(Message):
    kind: ClassVar[int] = 11
    namespace: int = ALL_NAMESPACES

    def body(self) -> bytes:
        return U32.pack(self.namespace)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*read_fixed(cls.kind, U32, body))


@dataclass(frozen=True, slots=True)
class Stats(Message):
    kind: ClassVar[int] = 14


@dataclass(frozen=True, slots=True)
class Events(Message):
    kind: ClassVar[int] = 15
    since: int = 0

    def body(self) -> bytes:
        return U64.pack(self.since)

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        return cls(*read_fixed(cls.kind, U64, body))


@dataclass(frozen=True, slots=True)
class Flush(Message):
    kind: ClassVar[int] = 16


# -- of commands, since 1.1 -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Started(Message):
    start: int = 0  # 0, then the `next` of the answer before

    def body(self) -> bytes:
        if not 0 <= self.start < 1 << 64:
            raise MisuseError("A start is an unsigned number of 64 bits", start=self.start)
        return cbor2.dumps({"start": self.start})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        fields = read_fields(body, {"start": int}, items_max=ITEMS_MAX)
        if fields["start"] < 0:
            raise ProtocolError("A start is not negative", kind=cls.kind)
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Describe(_Started):
    kind: ClassVar[int] = 17


@dataclass(frozen=True, slots=True)
class Check(_Started):
    kind: ClassVar[int] = 18


@dataclass(frozen=True, slots=True)
class _Named(Message):
    namespace: bytes  # its digest

    def body(self) -> bytes:
        if len(self.namespace) != NAMESPACE_DIGEST_BYTES:
            raise MisuseError("A namespace's digest has 32 bytes", got=len(self.namespace))
        return cbor2.dumps({"namespace": self.namespace})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        fields = read_fields(body, {"namespace": bytes}, items_max=ITEMS_MAX)
        if len(fields["namespace"]) != NAMESPACE_DIGEST_BYTES:
            raise ProtocolError("A namespace's digest has 32 bytes", kind=cls.kind)
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Purge(_Named):
    kind: ClassVar[int] = 19


# -- of commands, since 1.2 -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Find(_Named):
    kind: ClassVar[int] = 20


@dataclass(frozen=True, slots=True)
class _Chosen(Message):
    namespace: bytes  # its digest
    keys: tuple[bytes, ...] = ()  # none: everything that memory holds of it

    def body(self) -> bytes:
        if len(self.namespace) != NAMESPACE_DIGEST_BYTES or len(self.keys) > CHOSEN_KEYS_MAX:
            raise MisuseError(
                "A namespace's digest has 32 bytes, and so many keys can be chosen",
                got=len(self.namespace),
                keys=len(self.keys),
                keys_max=CHOSEN_KEYS_MAX,
            )
        key_width(self.keys)
        return cbor2.dumps({"namespace": self.namespace, "keys": list(self.keys)})

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        fields = read_fields(body, {"namespace": bytes, "keys": list}, items_max=ITEMS_MAX)
        namespace, keys = fields["namespace"], fields["keys"]
        right = all(type(key) is bytes and len(key) in KEY_WIDTHS for key in keys)
        if len(namespace) != NAMESPACE_DIGEST_BYTES or not right or len(keys) > CHOSEN_KEYS_MAX:
            raise ProtocolError("A choice of records is wrong", kind=cls.kind, keys=len(keys))
        return cls(namespace, tuple(keys))


@dataclass(frozen=True, slots=True)
class PinRecords(_Chosen):
    kind: ClassVar[int] = 21


@dataclass(frozen=True, slots=True)
class UnpinRecords(_Chosen):
    kind: ClassVar[int] = 22


# -- of clients that take digests themselves, since 1.3 -------------------------------------------


@dataclass(frozen=True, slots=True)
class CommitDigests(Message):
    """A COMMIT of whoever has taken the digests of what it copied."""

    kind: ClassVar[int] = 23
    digests: tuple[tuple[int, bytes], ...]  # (sequence, digest)

    def body(self) -> bytes:
        if len(self.digests) > KEYS_MAX or any(len(d) != DIGEST_BYTES for _, d in self.digests):
            raise MisuseError(
                "Digests have 16 bytes each, and so many can be sent",
                digests=len(self.digests),
                digests_max=KEYS_MAX,
            )
        return b"".join([U64.pack(sequence) + digest for sequence, digest in self.digests])

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        rows = read_rows(cls.kind, body, _DIGEST)
        if len(rows) > KEYS_MAX:
            raise ProtocolError("Too many digests", kind=cls.kind, digests=len(rows))
        return cls(rows)


@dataclass(frozen=True, slots=True)
class LoadToVerify(_Keyed):
    """A LOAD of whoever verifies what it has copied."""

    kind: ClassVar[int] = 24


@dataclass(frozen=True, slots=True)
class Dispute(Message):
    """An ACK that names rows of the batch whose copies did not verify."""

    kind: ClassVar[int] = 25
    answered: ClassVar[bool] = False
    load_ticket: int
    batch: int
    rows: tuple[int, ...]

    def body(self) -> bytes:
        if len(self.rows) > KEYS_MAX:
            raise MisuseError("Too many rows for one message", got=len(self.rows))
        return _ACK.pack(self.load_ticket, self.batch) + b"".join(map(U32.pack, self.rows))

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        ticket, batch = take_head(cls.kind, _ACK, body)
        count, rest = divmod(len(body) - _ACK.size, U32.size)
        if rest or count > KEYS_MAX:
            raise ProtocolError("A list of rows has no valid length", bytes=len(body))
        return cls(ticket, batch, struct.unpack(f"<{count}I", body[_ACK.size :]))
