"""What happens to cached blocks, as messages for routers and other caches outside the engine.

Facts (the wire format of vLLM 0.32): MessagePack. A batch is the array `[ts, events, rank]`. An
event is a map with `"type"` first; what has no default is always there, what has one is left out
while it is None. A block hash is the unsigned 64-bit int of its last 8 bytes, or the raw bytes.
Extra keys are those of the hash without their tags: the adapter's name alone, `[identifier,
offset]`, salt, digest of the prompt embeddings.

Consumers: a block stored twice is announced twice, and each removal is one announcement less, so
count references. The tokens of a `BlockStored` are all of its range, its hashes only those of the
blocks that were kept: there may be fewer, or none, in groups that keep only some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ebbtide.allocator.extra_keys import block_extra_keys
from ebbtide.allocator.group_hashes import group_hashes
from ebbtide.allocator.hashing import event_hash, unpack_key
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ebbtide.allocator.extra_keys import ExtraKeys, LoraAdapter, MultiModalItem

    RequestExtras = tuple[
        LoraAdapter | None, tuple[MultiModalItem, ...], str | None, NDArray[Any] | None
    ]

EventHash = int | bytes
EventExtraKeys = tuple[Any, ...]


class _CacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Base of the events. `gc=False`: they hold no cycles, and a step may make thousands."""


class BlockStored(_CacheEvent):
    """Blocks that lookups find from now on; one hash each, in the order of the prompt.

    `parent_block_hash` is that of the block before the first one, None at the start of a prompt.
    `token_ids` are those of the whole range that was looked at. `block_size` is in tokens.
    `lora_id` is deprecated and no part of the hash: `lora_name` is. `medium` is GPU, CPU or
    STORAGE. `extra_keys` has one entry per hash. `kv_cache_spec_sliding_window` is in tokens.
    `locality`, `ownership` and `session_id` are vLLM's, for tiers and sessions.
    """

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[EventExtraKeys | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_CacheEvent):
    """One block less under each of these hashes."""

    block_hashes: list[EventHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_CacheEvent):
    """Lookups find nothing any more. No removals are sent beside it."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step. `ts` is in seconds since 1970, `data_parallel_rank` is filled by the
    publisher when it is None."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class EventRequest(Protocol):
    """What the log reads of a request. `block_hashes` has one hash per `hash_block_size` tokens.

    `extras` are adapter, multi-modal items, salt and prompt embeddings, as `block_extra_keys` takes
    them. `lora_id: int | None` and `session_id: str | None` are read too where a request has them.
    """

    @property
    def block_hashes(self) -> Sequence[bytes]: ...

    @property
    def hash_block_size(self) -> int: ...

    @property
    def extras(self) -> RequestExtras: ...

    def tokens(self, start: int, end: int) -> list[int]: ...


class EventSpec(Protocol):
    """What the log reads of a KV group. `block_size` and `window_tokens` are in tokens."""

    @property
    def kind(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def window_tokens(self) -> int | None: ...


class EventLog:
    """Collects the events of one device pool until `take`.

    `hash_block_size` is the number of tokens per hash of a request; group block sizes are multiples
    of it. `medium` says where the blocks lie. `use_int_hashes` False sends whole hashes, as vLLM
    does with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.

    Belongs to the thread of the engine's scheduler. Without a call to `take` it grows: whoever
    turns events on drains them, once per step.
    """

    def __init__(
        self, hash_block_size: int, medium: str = "GPU", use_int_hashes: bool = True
    ) -> None:
        if type(hash_block_size) is not int or hash_block_size < 1:
            raise MisuseError("a hash block has at least 1 token", hash_block_size=hash_block_size)
        self.hash_block_size = hash_block_size
        self.medium = medium
        self.use_int_hashes = use_int_hashes
        self._events: list[Event] = []

    def __len__(self) -> int:
        """Events that `take` would return."""
        return len(self._events)

    def stored(
        self,
        request: EventRequest,
        group: int,
        spec: EventSpec,
        start: int,
        end: int,
        kept: Sequence[int],
    ) -> None:
        """Blocks `start` .. `end - 1` of the request's table in `group` became full.

        `kept` are the indices in that table, ascending, of those that were cached: not the null
        blocks, and not those that the group's retention leaves out. The event is sent even if it is
        empty, and lists the tokens of the whole range. An empty range sends nothing. O(tokens).

        Raises MisuseError for a range that is not full, or an index outside it.
        """
        if start >= end:
            return
        if len(kept) and not (start <= kept[0] and kept[-1] < end):
            raise MisuseError(
                "kept blocks lie outside the range that became full",
                next_step="Give indices in the request's table, ascending",
                start=start,
                end=end,
                kept=list(kept),
            )
        fine = self._hashes_per_block(request, spec)
        names = group_hashes(request.block_hashes, fine)
        if end > len(names):
            raise MisuseError(
                "the request has no hash for a block that is said to be full",
                block=end - 1,
                block_size=spec.block_size,
                hashes=len(request.block_hashes),
            )
        extra_keys = _event_extra_keys(request, spec.block_size, start, end)
        self._add_stored(
            request,
            group,
            spec,
            hashes=[names[block] for block in kept],
            parent=names[start - 1] if start else None,
            start_tokens=start * spec.block_size,
            end_tokens=end * spec.block_size,
            block_size=spec.block_size,
            extra_keys=[extra_keys[block - start] for block in kept] or None,
        )

    def stored_partial(
        self, request: EventRequest, group: int, spec: EventSpec, end_tokens: int
    ) -> None:
        """The prefix of `end_tokens` tokens, which ends inside a block of `group`, was cached.

        One hash block is announced, the one that ends there. `end_tokens` is a multiple of the hash
        block size; call only when the entry is new. Raises MisuseError for any other boundary.
        """
        size = self.hash_block_size
        self._hashes_per_block(request, spec)
        last, rest = divmod(end_tokens, size)
        if rest or not 0 < last <= len(request.block_hashes):
            raise MisuseError(
                "no hash ends there",
                end_tokens=end_tokens,
                hash_block_size=size,
                hashes=len(request.block_hashes),
            )
        self._add_stored(
            request,
            group,
            spec,
            hashes=[request.block_hashes[last - 1]],
            parent=request.block_hashes[last - 2] if last > 1 else None,
            start_tokens=end_tokens - size,
            end_tokens=end_tokens,
            block_size=size,
            extra_keys=_event_extra_keys(request, size, last - 1, last),
        )

    def reused(self, request: EventRequest, group: int, spec: EventSpec, end: int) -> None:
        """A lookup hit the first `end` blocks of the table in `group`, leading nulls included.

        For requests whose `kv_cache_report_mode` is `full`: what they share is announced again, as
        blocks `0 .. end - 1` and from the start of the prompt. No hit sends nothing. O(tokens).
        """
        self.stored(request, group, spec, 0, end, range(end))

    def removed(self, key: bytes) -> None:
        """A block is no longer found under `key`, which `pack_key` made. O(1).

        Once per key and block, in the order of removal. Raises MisuseError for any other key.
        """
        block_hash, group = unpack_key(key)
        self._events.append(BlockRemoved([self._external(block_hash)], self.medium, group))

    def cleared(self) -> None:
        """The whole cache was reset."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """The events since the last call, oldest first."""
        events = self._events
        self._events = []
        return events

    def _add_stored(
        self,
        request: EventRequest,
        group: int,
        spec: EventSpec,
        *,
        hashes: list[bytes],
        parent: bytes | None,
        start_tokens: int,
        end_tokens: int,
        block_size: int,
        extra_keys: list[EventExtraKeys | None] | None,
    ) -> None:
        lora = request.extras[0]
        self._events.append(
            BlockStored(
                block_hashes=[self._external(block_hash) for block_hash in hashes],
                parent_block_hash=None if parent is None else self._external(parent),
                token_ids=request.tokens(start_tokens, end_tokens),
                block_size=block_size,
                lora_id=getattr(request, "lora_id", None),
                medium=self.medium,
                lora_name=None if lora is None else lora.name,
                extra_keys=extra_keys,
                group_idx=group,
                kv_cache_spec_kind=spec.kind,
                kv_cache_spec_sliding_window=spec.window_tokens,
                session_id=getattr(request, "session_id", None),
            )
        )

    def _external(self, block_hash: bytes) -> EventHash:
        return event_hash(block_hash) if self.use_int_hashes else block_hash

    def _hashes_per_block(self, request: EventRequest, spec: EventSpec) -> int:
        fine, rest = divmod(spec.block_size, self.hash_block_size)
        if request.hash_block_size != self.hash_block_size or rest or not fine:
            raise MisuseError(
                "the request or the group has other block sizes than the log",
                hash_block_size=self.hash_block_size,
                request_hash_block_size=request.hash_block_size,
                block_size=spec.block_size,
            )
        return fine


def _event_extra_keys(
    request: EventRequest, block_size: int, start: int, end: int
) -> list[EventExtraKeys | None]:
    lora, mm_items, cache_salt, prompt_embeds = request.extras
    if lora is None and not mm_items and not cache_salt and prompt_embeds is None:
        return [None] * (end - start)
    tagged = block_extra_keys(
        start,
        end,
        block_size,
        lora=lora,
        mm_items=mm_items,
        cache_salt=cache_salt,
        prompt_embeds=prompt_embeds,
    )
    return [None if keys is None else _untagged(keys) for keys in tagged]


def _untagged(keys: ExtraKeys) -> EventExtraKeys:
    """The adapter's path is left out with the tags: consumers know adapters by name."""
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
