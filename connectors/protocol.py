"""The wire protocol: frames around messages, encode and feed, without any I/O.

`docs/protocol.md` is the specification. A message is a frozen dataclass; the same objects travel
between an in-process client and its session, unencoded.
"""

from __future__ import annotations

import struct

import cbor2

from ebbtide.connectors.message import (
    ALL_NAMESPACES,
    DIGESTS_SINCE,
    FRAME_BYTES_MAX,
    KEYS_MAX,
    VERSION,
    Message,
)
from ebbtide.connectors.replies import (
    Batch,
    BatchToVerify,
    Done,
    Failed,
    Failure,
    Grants,
    NamespaceOpened,
    Ok,
    Report,
    Settled,
    States,
    Welcome,
)
from ebbtide.connectors.requests import (
    CHOSEN_KEYS_MAX,
    COMMAND_ROLE,
    Abort,
    Ack,
    Check,
    Commit,
    CommitDigests,
    Describe,
    Dispute,
    Events,
    Find,
    Flush,
    Hello,
    LoadKeys,
    LoadToVerify,
    Lookup,
    OpenNamespace,
    Pin,
    PinRecords,
    Purge,
    Release,
    Reserve,
    Reset,
    Stats,
    Touch,
    Unpin,
    UnpinRecords,
)
from ebbtide.errors import MisuseError, ProtocolError

__all__ = [
    "ALL_NAMESPACES",
    "CHOSEN_KEYS_MAX",
    "COMMAND_ROLE",
    "DIGESTS_SINCE",
    "FRAME_BYTES_MAX",
    "HEADER",
    "KEYS_MAX",
    "REPLIES",
    "REQUESTS",
    "VERSION",
    "Abort",
    "Ack",
    "Batch",
    "BatchToVerify",
    "Check",
    "Commit",
    "CommitDigests",
    "Decoder",
    "Describe",
    "Dispute",
    "Done",
    "Events",
    "Failed",
    "Failure",
    "Find",
    "Flush",
    "Grants",
    "Hello",
    "LoadKeys",
    "LoadToVerify",
    "Lookup",
    "Message",
    "NamespaceOpened",
    "Ok",
    "OpenNamespace",
    "Pin",
    "PinRecords",
    "Purge",
    "Release",
    "Report",
    "Reserve",
    "Reset",
    "Settled",
    "States",
    "Stats",
    "Touch",
    "Unpin",
    "UnpinRecords",
    "Welcome",
    "encode",
]

HEADER = struct.Struct("<IBBHQ")

REQUESTS: tuple[type[Message], ...] = (
    Hello, OpenNamespace, Lookup, Touch, Reserve, Commit, Abort, LoadKeys, Ack, Release, Reset, Pin,
    Unpin, Stats, Events, Flush, Describe, Check, Purge, Find, PinRecords,
    UnpinRecords, CommitDigests, LoadToVerify, Dispute,
)  # fmt: skip
REPLIES: tuple[type[Message], ...] = (
    Welcome, NamespaceOpened, States, Grants, Settled, Batch, Failed, Done, Ok, Report, Failure,
    BatchToVerify,
)  # fmt: skip
_KINDS = {message.kind: message for message in (*REQUESTS, *REPLIES)}


def encode(ticket: int, message: Message, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The message's frame. Raises MisuseError for what the wire, or this peer, cannot carry."""
    try:
        body = message.body()
        header = HEADER.pack(len(body), message.kind, 0, 0, ticket)
    except (struct.error, OverflowError, ValueError, cbor2.CBOREncodeError) as error:
        raise MisuseError(
            "A field of a message is out of range", kind=message.kind, reason=error
        ) from error
    if len(body) > frame_bytes_max:
        raise MisuseError(
            "A frame would be too large",
            next_step="Ask for fewer keys at a time, or raise [limits] frame_max.",
            kind=message.kind,
            bytes=len(body),
            bytes_max=frame_bytes_max,
        )
    return header + body


class Decoder:
    """Turns bytes into (ticket, message). Buffers at most one incomplete frame between calls."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """How much of an incomplete frame has arrived."""
        return len(self._buffer)

    def forget(self) -> None:
        """Let go of what has arrived: the stream is over."""
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, Message]]:
        """Every message that is complete now. Raises ProtocolError; the stream is over then."""
        self._buffer += data
        messages: list[tuple[int, Message]] = []
        consumed = 0
        with memoryview(self._buffer) as view:
            while len(view) - consumed >= HEADER.size:
                size, kind, zero, also_zero, ticket = HEADER.unpack_from(view, consumed)
                known = _KINDS.get(kind)
                if size > self._frame_bytes_max or zero or also_zero or known is None:
                    raise ProtocolError("A frame's header is wrong", kind=kind, bytes=size)
                end = consumed + HEADER.size + size
                if len(view) < end:
                    break
                messages.append((ticket, known.parse(view[consumed + HEADER.size : end])))
                consumed = end
        del self._buffer[:consumed]
        return messages
