"""The algorithms that name blocks: what serialises, what digests, how wide a name is.

Four are built in, as in vLLM 0.32. `register_algorithm` adds another to this process; all processes
that share blocks must add it alike, since a namespace holds only its name.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

from ebbtide.allocator import cbor
from ebbtide.errors import MisuseError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_ALGORITHM = "sha256_cbor"
HASH_BYTES = (32, 16)
"""The widths of a name. Keys and records are laid out for these two."""


class Digest(Protocol):
    """What a digest constructor returns, such as `hashlib.sha256(b"...")`."""

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class HashAlgorithm:
    """One way to name blocks: `new(serialise((parent, tokens, extra keys))).digest()`.

    `width` is the digest length in bytes. Without `reproducible_root` the root is random in each
    process unless PYTHONHASHSEED is set, as vLLM 0.32 has it for xxhash.
    """

    name: str
    width: int
    serialise: Callable[[object], bytes]
    new: Callable[[bytes], Digest]
    reproducible_root: bool

    @property
    def is_cbor(self) -> bool:
        """Whether whole runs of blocks can be encoded at once."""
        return self.serialise is cbor.encode


_ALGORITHMS: dict[str, HashAlgorithm] = {}


def register_algorithm(
    name: str,
    *,
    width: int,
    serialise: Callable[[object], bytes],
    new: Callable[[bytes], Digest],
    reproducible_root: bool,
) -> HashAlgorithm:
    """Add a way to name blocks, for all of this process, before anything is hashed with it.

    `serialise` gets a text (the seed) or the tuple `(parent: bytes, tokens: tuple[int, ...], extra
    keys or None)` and must give equal bytes for equal values, in every process; with
    `ebbtide.allocator.cbor.encode` the fast path serves it too. `new` digests those bytes. An error
    of either reaches the caller of `hash_blocks`; its text must not show the item, which holds the
    cache salt.

    Raises MisuseError for a name that is taken or empty, and for a width that is not 16 or 32 or
    not the digest's.
    """
    if type(name) is not str or not name:
        raise MisuseError("a hash algorithm has a name", name=name)
    if name in _ALGORITHMS:
        raise MisuseError(
            "a hash algorithm of this name is registered",
            next_step="Give it another name: blocks would be named in two ways under one",
            name=name,
        )
    if type(width) is not int or width not in HASH_BYTES:
        raise MisuseError("a block's name has 16 or 32 bytes", algorithm=name, width=width)
    found = new(serialise("")).digest()
    if type(found) is not bytes or len(found) != width:
        raise MisuseError(
            "the digest is not as wide as was said",
            algorithm=name,
            width=width,
            type=type(found).__name__,
            found=len(found),
        )
    algorithm = HashAlgorithm(name, width, serialise, new, reproducible_root)
    _ALGORITHMS[name] = algorithm
    return algorithm


def hash_algorithm(name: str) -> HashAlgorithm:
    """The algorithm of that name. Raises ConfigError that lists the choices for any other name."""
    if name not in _ALGORITHMS:
        raise unknown_name("hash algorithm", name, _ALGORITHMS)
    return _ALGORITHMS[name]


def _pickle(item: object) -> bytes:
    return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)


register_algorithm(
    DEFAULT_ALGORITHM, width=32, serialise=cbor.encode, new=hashlib.sha256, reproducible_root=True
)
register_algorithm(
    "sha256", width=32, serialise=_pickle, new=hashlib.sha256, reproducible_root=True
)
register_algorithm(
    "xxhash_cbor", width=16, serialise=cbor.encode, new=xxhash.xxh3_128, reproducible_root=False
)
register_algorithm(
    "xxhash", width=16, serialise=_pickle, new=xxhash.xxh3_128, reproducible_root=False
)
