"""The namespace: a digest of everything that changes the bytes or the meaning of a block.

Two engines share blocks exactly when their descriptors are equal. A descriptor is a
fixed-order list of (field, value) pairs, not a map, so that no serialiser's idea of order can
change it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import cbor2

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = "str | int | bytes | None | list[Value]"

DESCRIPTOR_BYTES_MAX = 64 << 10

# What belongs to the process and never to the content. An engine that meets a setting of its own
# which is in neither list fails its table test until somebody decides.
INSTANCE_FIELDS = frozenset(
    {
        "device_blocks",
        "engine_id",
        "host",
        "log_level",
        "max_batched_tokens",
        "max_context_tokens",
        "memory_fraction",
        "port",
        "rank_placement",
    }
)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The content fields, in digest order. Add a field only at the end, with a new `format`.

    `weights` identifies the weights' content (a digest, or a seed for made-up weights). While an
    engine still hashes its weights it opens the namespace as *pending* and gets `namespace_pending`
    for every key.
    """

    format: int  # of this descriptor
    engine: str  # engine and its KV format, e.g. "reference/1"
    model: str  # architecture and shape
    weights: str
    kv_dtype: str  # effective, never "auto"
    block_size: int  # tokens
    layers: tuple[str, ...]  # layer set and group specs, in order
    layout: str  # how a block's bytes lie in a record
    tensor_parallel: int
    pipeline_parallel: int
    shard_rule: str
    attention_isa: str  # the instruction set where it changes the bytes (CPU), else ""
    hash_algorithm: str
    hash_root: str  # hex
    pickle_minors: str = ""  # Python and engine minor for pickled hashes, else ""

    def pairs(self) -> list[list[object]]:
        """The ordered [name, value] list that is hashed, stored and sent."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [[name, list(v) if isinstance(v, tuple) else v] for name, v in values]


def namespace_digest(pairs: list[list[object]]) -> bytes:
    """SHA-256 of the canonical CBOR of the ordered pairs: 32 bytes. Raises MisuseError for a bad
    shape.
    """
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise MisuseError("A namespace descriptor is a list of [name, value] pairs", got=pair)
        if pair[0] in INSTANCE_FIELDS:
            raise MisuseError(
                "A property of the process must not be part of the content's identity",
                next_step="Leave it out of the descriptor.",
                field=pair[0],
            )
    packed = cbor2.dumps(pairs, canonical=True)
    if len(packed) > DESCRIPTOR_BYTES_MAX:  # the store keeps it as long as it lives
        raise MisuseError(
            "A namespace descriptor is too large", bytes=len(packed), bytes_max=DESCRIPTOR_BYTES_MAX
        )
    return hashlib.sha256(packed).digest()


class Namespace:
    """An open namespace of one store. `handle` is valid for the life of the store's process."""

    __slots__ = ("descriptor", "digest", "epoch", "handle", "pending")

    def __init__(
        self, handle: int, digest: bytes, descriptor: list[list[object]], epoch: int, pending: bool
    ) -> None:
        self.handle = handle
        self.digest = digest
        self.descriptor = descriptor
        self.epoch = epoch  # reset epoch: changes with every reset
        self.pending = pending

    def readable(self) -> Mapping[str, object]:
        """The descriptor for humans."""
        return {str(name): value for name, value in self.descriptor}
