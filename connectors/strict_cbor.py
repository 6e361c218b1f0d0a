"""CBOR as the control messages use it, read strictly: no tag, no indefinite length, no surprise.

A general decoder turns tags into dates, patterns and shared references, and a claimed length into
an allocation. This one knows integers of up to 64 bits, byte and text strings, arrays, maps with
distinct text keys, floats, true, false and null. Everything else is refused, and so is what nests
too deep, has too many items, or ends too early or too late.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from ebbtide.errors import ProtocolError

DEPTH_MAX = 16
ITEMS_MAX = 65_536

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _SIMPLE = 0, 1, 2, 3, 4, 5, 7
_SIMPLE_VALUES = {20: False, 21: True, 22: None}
_FLOATS = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}


def read_cbor(data: bytes, *, items_max: int = ITEMS_MAX) -> object:
    """The one item that `data` holds. Raises ProtocolError. Allocates in proportion to `data`."""
    reader = _Reader(data, items_max)
    item = reader.item(0)
    if reader.at != len(data):
        _refuse("it goes on behind its end")
    return item


class _Reader:
    def __init__(self, data: bytes, items_max: int) -> None:
        self.at = 0
        self._data = data
        self._items_left = items_max

    def item(self, depth: int) -> object:
        """The item that starts here."""
        self._items_left -= 1
        if self._items_left < 0:
            _refuse("it has too many items")
        if depth > DEPTH_MAX:
            _refuse("it nests too deep")
        major, info = divmod(self._take(1)[0], 32)
        if major == _SIMPLE:
            return self._simple(info)
        number = self._number(info)
        if major == _UNSIGNED:
            return number
        if major == _NEGATIVE:
            return -1 - number
        if major == _BYTES:
            return self._take(number)
        if major == _TEXT:
            return self._text(number)
        # Built item by item, and each takes a byte: a claimed length by itself allocates nothing.
        if major == _ARRAY:
            return [self.item(depth + 1) for _ in range(number)]
        if major == _MAP:
            return self._map(number, depth + 1)
        _refuse("it has a tag")

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            _refuse("it is shorter than it says")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _number(self, info: int) -> int:
        if info < 24:
            return info
        if info > 27:
            _refuse("it has a length that is indefinite or reserved")
        return int.from_bytes(self._take(1 << (info - 24)), "big")

    def _text(self, count: int) -> str:
        try:
            return self._take(count).decode("utf-8")
        except UnicodeDecodeError:
            _refuse("a text is not UTF-8")

    def _map(self, count: int, depth: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        for _ in range(count):
            key = self.item(depth)
            if not isinstance(key, str) or key in fields:
                _refuse("a map's key is no text or comes twice")
            fields[key] = self.item(depth)
        return fields

    def _simple(self, info: int) -> object:
        if info in _SIMPLE_VALUES:
            return _SIMPLE_VALUES[info]
        layout = _FLOATS.get(info)
        if layout is None:
            _refuse("it has a value of unknown kind")
        (value,) = layout.unpack(self._take(layout.size))
        return value


def _refuse(reason: str) -> NoReturn:
    raise ProtocolError("A control frame is not the CBOR it should be", reason=reason)
