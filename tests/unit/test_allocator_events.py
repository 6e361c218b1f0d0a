"""KV events: their bytes, and what is said of blocks that are stored, reused and removed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.allocator.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventHash,
    EventLog,
)
from ebbtide.allocator.extra_keys import LoraAdapter, MultiModalItem
from ebbtide.allocator.hashing import hash_blocks, pack_key
from ebbtide.errors import MisuseError

HASH_SIZE = 4


@dataclass
class Spec:
    """A KV group as the log reads it."""

    kind: str = "full_attention"
    block_size: int = HASH_SIZE
    window_tokens: int | None = None


@dataclass
class Prompt:
    """A request as the log reads it: 30 tokens, 0, 1, 2 ..."""

    lora: LoraAdapter | None = None
    mm_items: tuple[MultiModalItem, ...] = ()
    cache_salt: str | None = None
    prompt_embeds: Any = None
    hash_block_size: int = HASH_SIZE
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        lora, mm_items, cache_salt, prompt_embeds = self.extras
        self.block_hashes = hash_blocks(
            list(range(30)),
            self.hash_block_size,
            lora=lora,
            mm_items=mm_items,
            cache_salt=cache_salt,
            prompt_embeds=prompt_embeds,
        )

    @property
    def extras(self) -> tuple[LoraAdapter | None, tuple[MultiModalItem, ...], str | None, Any]:
        return self.lora, self.mm_items, self.cache_salt, self.prompt_embeds

    def tokens(self, start: int, end: int) -> list[int]:
        return list(range(30))[start:end]


def as_int(block_hash: bytes) -> int:
    return int(block_hash.hex()[-16:], 16)


def only(log: EventLog) -> BlockStored:
    (event,) = log.take()
    assert isinstance(event, BlockStored)
    return event


# Bytes.


def test_an_all_cleared_batch_is_vllms_35_bytes() -> None:
    batch = EventBatch(1_700_000_000.5, [AllBlocksCleared()], 0)
    expected = "93cb41d954fc402000009181a474797065b0416c6c426c6f636b73436c656172656400"
    assert msgspec.msgpack.encode(batch).hex() == expected


def test_what_has_no_default_is_always_there_and_the_rest_only_when_set() -> None:
    stored = BlockStored([1], None, [7], 1, None, None, None)
    assert list(msgspec.msgpack.decode(msgspec.msgpack.encode(stored)).items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [1]),
        ("parent_block_hash", None),
        ("token_ids", [7]),
        ("block_size", 1),
        ("lora_id", None),
        ("medium", None),
        ("lora_name", None),
    ]
    removed = BlockRemoved([b"\x01"], "CPU", group_idx=0, locality="LOCAL", ownership="disk")
    assert list(msgspec.msgpack.decode(msgspec.msgpack.encode(removed)).items()) == [
        ("type", "BlockRemoved"),
        ("block_hashes", [b"\x01"]),
        ("medium", "CPU"),
        ("group_idx", 0),
        ("locality", "LOCAL"),
        ("ownership", "disk"),
    ]


def test_a_batch_without_a_rank_still_has_three_elements() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.0, []))) == [1.0, [], None]


def test_a_batch_can_be_read_back() -> None:
    log = EventLog(HASH_SIZE)
    prompt = Prompt(LoraAdapter("x", "/x"), (MultiModalItem("a", 2, 9),), "salt")
    log.stored(prompt, 0, Spec(), 0, 3, [0, 2])
    log.removed(pack_key(prompt.block_hashes[0], 0))
    log.cleared()
    batch = EventBatch(2.5, log.take(), 3)
    payload = msgspec.msgpack.encode(batch)
    read = msgspec.msgpack.Decoder(EventBatch).decode(payload)
    assert [type(event) for event in read.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
    assert msgspec.msgpack.encode(read) == payload  # pairs of extra keys come back as lists


# Stored.


def test_a_stored_event_tells_hashes_parent_tokens_and_group() -> None:
    log, prompt = EventLog(HASH_SIZE), Prompt()
    hashes: list[EventHash] = [as_int(each) for each in prompt.block_hashes]
    log.stored(prompt, 1, Spec(), 0, 2, [0, 1])
    log.stored(prompt, 1, Spec("sliding_window", HASH_SIZE, 9), 2, 3, range(2, 3))
    assert len(log) == 2
    assert log.take() == [
        BlockStored(
            hashes[:2], None, list(range(8)), 4, None, "GPU", None,
            extra_keys=[None, None], group_idx=1, kv_cache_spec_kind="full_attention",
        ),
        BlockStored(
            hashes[2:3], hashes[1], [8, 9, 10, 11], 4, None, "GPU", None,
            extra_keys=[None], group_idx=1, kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=9,
        ),
    ]  # fmt: skip
    assert log.take() == []


def test_blocks_that_were_not_kept_are_missing_but_their_tokens_are_not() -> None:
    log = EventLog(HASH_SIZE)
    prompt = Prompt(mm_items=(MultiModalItem("a", 13, 2),), cache_salt="s")
    log.stored(prompt, 0, Spec(), 0, 5, [1, 3])
    event = only(log)
    assert event.block_hashes == [as_int(prompt.block_hashes[i]) for i in (1, 3)]
    assert event.extra_keys == [None, (("a", 1),)]
    assert event.token_ids == list(range(20))


def test_an_event_without_a_kept_block_is_sent_and_has_no_extra_keys() -> None:
    log, prompt = EventLog(HASH_SIZE), Prompt(cache_salt="s")
    log.stored(prompt, 0, Spec(), 0, 1, [])
    event = only(log)
    assert (event.block_hashes, event.extra_keys, event.token_ids) == ([], None, [0, 1, 2, 3])
    log.stored(prompt, 0, Spec(), 2, 2, [])
    assert log.take() == []


def test_a_coarser_block_is_named_by_its_last_fine_hash() -> None:
    log = EventLog(HASH_SIZE)
    prompt = Prompt(mm_items=(MultiModalItem("a", 6, 4),), cache_salt="s")
    log.stored(prompt, 0, Spec(block_size=8), 1, 3, [1, 2])
    event = only(log)
    assert event.block_hashes == [as_int(prompt.block_hashes[i]) for i in (3, 5)]
    assert event.parent_block_hash == as_int(prompt.block_hashes[1])
    assert event.token_ids == list(range(8, 24))
    assert event.block_size == 8
    assert event.extra_keys == [(("a", -2),), None]  # over 8 tokens, not over the hash block


def test_extra_keys_are_untagged_and_in_order() -> None:
    embeds = np.arange(60, dtype=np.float32).reshape(30, 2)
    prompt = Prompt(
        LoraAdapter("adapter", "/where/it/lies"),
        (MultiModalItem("a", 1, 2), MultiModalItem("b", 3, 3)),
        "salt",
        embeds,
    )
    log = EventLog(HASH_SIZE)
    log.stored(prompt, 0, Spec(), 0, 2, [0, 1])
    event = only(log)
    assert event.lora_name == "adapter"
    digests = [hashlib.sha256(embeds[i : i + 4].tobytes()).digest() for i in (0, 4)]
    assert event.extra_keys == [
        ("adapter", ("a", 1), ("b", 3), "salt", digests[0]),
        ("adapter", ("b", -1), digests[1]),
    ]


def test_the_adapters_number_and_the_session_are_told_where_a_request_has_them() -> None:
    class Named(Prompt):
        lora_id = 9
        session_id = "chat"

    log = EventLog(HASH_SIZE, medium="CPU")
    log.stored(Named(LoraAdapter("x", "/x")), 0, Spec(), 0, 1, [0])
    event = only(log)
    assert (event.lora_id, event.session_id, event.medium) == (9, "chat", "CPU")


def test_whole_hashes_are_sent_on_demand() -> None:
    log, prompt = EventLog(HASH_SIZE, use_int_hashes=False), Prompt()
    log.stored(prompt, 0, Spec(), 1, 2, [1])
    log.removed(pack_key(prompt.block_hashes[1], 258))
    stored, removed = log.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [prompt.block_hashes[1]]
    assert stored.parent_block_hash == prompt.block_hashes[0]
    assert removed == BlockRemoved([prompt.block_hashes[1]], "GPU", 258)


def test_a_partial_entry_is_one_hash_block() -> None:
    log = EventLog(HASH_SIZE)
    prompt = Prompt(mm_items=(MultiModalItem("a", 5, 8),), cache_salt="s")
    log.stored_partial(prompt, 2, Spec(block_size=16), 12)
    log.stored_partial(prompt, 2, Spec(block_size=16), 4)
    assert log.take() == [
        BlockStored(
            [as_int(prompt.block_hashes[2])], as_int(prompt.block_hashes[1]), [8, 9, 10, 11], 4,
            None, "GPU", None, extra_keys=[(("a", -3),)], group_idx=2,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored(
            [as_int(prompt.block_hashes[0])], None, [0, 1, 2, 3], 4,
            None, "GPU", None, extra_keys=[("s",)], group_idx=2,
            kv_cache_spec_kind="full_attention",
        ),
    ]  # fmt: skip


def test_reused_blocks_are_told_from_the_start_of_the_prompt() -> None:
    log, prompt = EventLog(HASH_SIZE), Prompt()
    log.reused(prompt, 0, Spec(block_size=8), 2)
    event = only(log)
    assert event.block_hashes == [as_int(prompt.block_hashes[i]) for i in (1, 3)]
    assert (event.parent_block_hash, event.token_ids) == (None, list(range(16)))
    log.reused(prompt, 0, Spec(), 0)
    assert log.take() == []


# Removed.


def test_each_removal_is_an_event_in_its_order() -> None:
    log, prompt = EventLog(HASH_SIZE), Prompt()
    first, second = prompt.block_hashes[:2]
    for key in (pack_key(second, 0), pack_key(first, 1), pack_key(second, 0)):
        log.removed(key)
    log.cleared()
    assert log.take() == [
        BlockRemoved([as_int(second)], "GPU", 0),
        BlockRemoved([as_int(first)], "GPU", 1),
        BlockRemoved([as_int(second)], "GPU", 0),
        AllBlocksCleared(),
    ]


# Misuse.


@pytest.mark.parametrize(
    ("start", "end", "kept"), [(1, 3, [0]), (1, 3, [0, 1]), (1, 3, [1, 3]), (0, 8, [])]
)
def test_ranges_that_are_not_full_or_do_not_hold_what_was_kept_are_refused(
    start: int, end: int, kept: list[int]
) -> None:
    log = EventLog(HASH_SIZE)
    with pytest.raises(MisuseError):
        log.stored(Prompt(), 0, Spec(), start, end, kept)
    assert log.take() == []


@pytest.mark.parametrize("end_tokens", [0, 3, 6, 32])
def test_boundaries_without_a_hash_are_refused(end_tokens: int) -> None:
    with pytest.raises(MisuseError, match="no hash ends there"):
        EventLog(HASH_SIZE).stored_partial(Prompt(), 0, Spec(block_size=8), end_tokens)


def test_other_block_sizes_are_refused() -> None:
    with pytest.raises(MisuseError, match="other block sizes"):
        EventLog(HASH_SIZE).stored(Prompt(hash_block_size=2), 0, Spec(), 0, 1, [0])
    for size in (2, 6):
        with pytest.raises(MisuseError, match="other block sizes"):
            EventLog(HASH_SIZE).stored(Prompt(), 0, Spec(block_size=size), 0, 1, [0])
    with pytest.raises(MisuseError, match="at least 1"):
        EventLog(0)
    with pytest.raises(MisuseError):
        EventLog(HASH_SIZE).removed(Prompt().block_hashes[0])
