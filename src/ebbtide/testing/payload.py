"""Bytes that say whose they are."""

from __future__ import annotations

import hashlib


def keyed_bytes(key: bytes, length: int) -> bytes:
    """`length` bytes that are a function of `key` alone (SHAKE-128).

    Equal for equal keys in every process and on every machine; different for different keys all
    along: no 16 bytes of one key's are found in another's. Put the namespace into `key` to tell
    namespaces apart. 2 s/GB.
    """
    return hashlib.shake_128(key).digest(length)
