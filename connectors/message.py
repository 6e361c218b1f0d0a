"""What all messages share: the base class, the bounds, and the codecs of keys, CBOR and rows.

`body` raises MisuseError (this side built something that the wire cannot carry), `parse` raises
ProtocolError (the peer sent something that the protocol does not allow), and neither raises
anything else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ebbtide.connectors.strict_cbor import ITEMS_MAX, read_cbor
from ebbtide.errors import MisuseError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# 1.1: DESCRIBE, CHECK, PURGE. 1.2: FIND, PIN_RECORDS, UNPIN_RECORDS. 1.3: COMMIT_DIGESTS,
# LOAD_TO_VERIFY, DISPUTE.
VERSION = (1, 3)
FRAME_BYTES_MAX = 4 << 20
ALL_NAMESPACES = 2**32 - 1
ENGINE_ID_BYTES = 16
KEY_WIDTHS = (36, 20)  # 32- or 16-byte block hash + 4-byte KV group
KEYS_MAX = 65_536  # keys of one message, and sequences
DIGESTS_SINCE = (1, 3)  # the store takes digests from its clients, and lets them verify

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

_KEY_LAYOUTS = {width: np.dtype(f"V{width}") for width in KEY_WIDTHS}


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. `kind` is the frame's, in both directions unique.

    `answered`: a request that its sender gives a ticket to and waits for.
    """

    kind: ClassVar[int]
    answered: ClassVar[bool] = True

    def body(self) -> bytes:
        """The frame's body."""
        return b""

    @classmethod
    def parse(cls, body: memoryview) -> Message:
        """The message of a body."""
        if len(body):
            raise ProtocolError("A frame without body has one", kind=cls.kind)
        return cls()


# -- keys -----------------------------------------------------------------------------------------


def key_width(keys: Sequence[bytes]) -> int:
    """The one width of all keys. A key is never padded or cut: any other width is refused."""
    kinds = set(map(type, keys))
    if not kinds <= {bytes}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise MisuseError("A key is bytes and nothing else", got=names)
    widths = set(map(len, keys)) or {KEY_WIDTHS[0]}
    if len(widths) != 1 or not widths <= {*KEY_WIDTHS}:
        raise MisuseError(
            "The keys of a message have one of two widths, all the same",
            next_step="Join the block hash and the 4 bytes of the KV group.",
            got=sorted(widths)[:8],
            known=KEY_WIDTHS,
        )
    if len(keys) > KEYS_MAX:
        raise MisuseError("Too many keys for one message", got=len(keys), keys_max=KEYS_MAX)
    return widths.pop()


def split_keys(body: memoryview, width: int, kind: int) -> tuple[bytes, ...]:
    """The keys of a body. A width that is no key's, or a ragged end, is an error."""
    layout = _KEY_LAYOUTS.get(width)
    if layout is None or len(body) % width or len(body) // width > KEYS_MAX:
        raise ProtocolError("Keys of the wrong width", kind=kind, width=width, bytes=len(body))
    keys: list[bytes] = np.frombuffer(body, dtype=layout).tolist()
    return tuple(keys)


# -- CBOR maps ------------------------------------------------------------------------------------


def read_fields(
    body: memoryview, wanted: Mapping[str, type], *, items_max: int = ITEMS_MAX
) -> dict[str, Any]:
    """The wanted fields of a CBOR map, of exactly these types; others are the future's."""
    fields = read_cbor(bytes(body), items_max=items_max)
    if not isinstance(fields, dict):
        raise ProtocolError("A control frame is not a CBOR map")
    for name, kind in wanted.items():
        if type(fields.get(name)) is not kind:  # True is not a number here
            raise ProtocolError("A control frame lacks a field or has the wrong type", field=name)
    return {name: fields[name] for name in wanted}


def read_version(parts: list[object]) -> tuple[int, int]:
    """A protocol version: major and minor."""
    match parts:
        case [int(major), int(minor)] if type(major) is type(minor) is int:
            return (major, minor)
    raise ProtocolError("A protocol version is two integers")


# -- fixed and repeated integers ------------------------------------------------------------------


def read_fixed(kind: int, layout: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    """The integers of a body that has exactly this layout."""
    if len(body) != layout.size:
        raise ProtocolError("A frame has the wrong size", kind=kind, bytes=len(body))
    return layout.unpack(body)


def read_rows(kind: int, body: memoryview, layout: np.dtype[Any]) -> tuple[Any, ...]:
    """The rows of a packed list."""
    if len(body) % layout.itemsize:
        raise ProtocolError("A packed list has a ragged end", kind=kind, bytes=len(body))
    return tuple(np.frombuffer(body, dtype=layout).tolist())


def pack_rows(rows: Sequence[Any], layout: np.dtype[Any]) -> bytes:
    """The bytes of a packed list."""
    return np.array(list(rows), dtype=layout).tobytes()


def take_head(kind: int, layout: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    """The integers at the start of a body."""
    if len(body) < layout.size:
        raise ProtocolError("A frame is too short", kind=kind, bytes=len(body))
    return layout.unpack_from(body)
