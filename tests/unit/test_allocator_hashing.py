"""Names of blocks: encoders, algorithms, seeds, extra keys, key packing."""

import hashlib
import logging
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.allocator import (
    LoraAdapter,
    MultiModalItem,
    block_extra_keys,
    cbor,
    check_encoder,
    embeds_token_ids,
    hash_algorithm,
    hash_blocks,
    hashing,
    none_hash,
    root_seed,
)
from ebbtide.errors import ConfigError, MisuseError

ALGORITHMS = ("sha256_cbor", "sha256", "xxhash_cbor", "xxhash")
EDGES = (0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1)
WIDER_EDGES = (2**31, 2**32 - 1, 2**32, 2**63 - 1)
TOKENS = st.one_of(st.sampled_from(EDGES), st.integers(0, 152_000))
WIDE_TOKENS = st.one_of(TOKENS, st.sampled_from(WIDER_EDGES))
quick = settings(max_examples=60, deadline=None, derandomize=True)


def encode_by_hand(item: object) -> bytes:
    """A second canonical encoder, so that a fault common to cbor2 and ours would show."""

    def head(major: int, value: int) -> bytes:
        if value < 24:
            return bytes([major * 32 + value])
        for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
            if value < 256**size:
                return bytes([major * 32 + code]) + value.to_bytes(size, "big")
        raise AssertionError(value)

    match item:
        case None:
            return b"\xf6"
        case int():
            return head(0, item) if item >= 0 else head(1, -1 - item)
        case bytes():
            return head(2, len(item)) + item
        case str():
            return head(3, len(item.encode())) + item.encode()
        case tuple():
            return head(4, len(item)) + b"".join(map(encode_by_hand, item))
    raise AssertionError(item)


def chain_by_hand(
    tokens: list[int], block_size: int, root: bytes, extras: Any = None
) -> list[bytes]:
    chain = [root]
    for block in range(len(tokens) // block_size):
        run = tuple(tokens[block * block_size : (block + 1) * block_size])
        extra = extras[block] if extras else None
        chain.append(hashlib.sha256(encode_by_hand((chain[-1], run, extra))).digest())
    return chain[1:]


# ------------------------------------------------------------------------------ encoding


@quick
@given(st.lists(TOKENS, min_size=1, max_size=80), st.integers(1, 5))
def test_the_fast_encoding_is_cbor2s(tokens: list[int], run: int) -> None:
    tokens = tokens[: len(tokens) // run * run] or [7] * run
    words = cbor.as_words(tokens)
    assert words is not None
    encoded, ends = cbor.encode_runs(words, run)
    starts = [0, *ends]
    for number, (start, end) in enumerate(pairwise(starts)):
        expected = cbor2.dumps(tuple(tokens[number * run : (number + 1) * run]), canonical=True)
        assert cbor.head(cbor.TUPLE, run) + encoded[start:end] == expected


@pytest.mark.parametrize("length", [0, 23, 24, 255, 256, 65535, 65536, 2**32])
@pytest.mark.parametrize("major", [cbor.BYTES, cbor.TUPLE])
def test_heads_take_the_shortest_form(major: int, length: int) -> None:
    found = cbor.head(major, length)
    assert found[0] >> 5 == major
    plain = cbor2.dumps(length, canonical=True)
    assert bytes([found[0] & 31]) + found[1:] == plain


@quick
@given(
    st.lists(WIDE_TOKENS, max_size=200),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(ALGORITHMS),
)
def test_fast_and_slow_path_name_blocks_alike(
    tokens: list[int], block_size: int, as_array: bool, algorithm: str
) -> None:
    given_ids: Any = np.array(tokens, dtype=np.uint64) if as_array else tokens
    found = hash_blocks(given_ids, block_size, algorithm=algorithm, root=none_hash(algorithm, "s"))
    chain: list[bytes] = []
    for end in range(block_size, len(tokens) + 1, block_size):  # one block a call: no fast path
        chain += hash_blocks(
            tuple(tokens[:end]), block_size, algorithm=algorithm, root=none_hash(algorithm, "s"),
            known=chain,
        )  # fmt: skip
    assert found == chain
    if algorithm == "sha256_cbor":
        assert found == chain_by_hand(tokens, block_size, none_hash(algorithm, "s"))


@pytest.mark.parametrize("num_blocks", [1, hashing._FAST_PATH_BLOCKS, hashing._RUN_BLOCKS + 3])
def test_extras_are_hashed_alike_on_both_paths(num_blocks: int) -> None:
    tokens = list(range(4 * num_blocks))
    lora = LoraAdapter("sql", "/models/sql")
    items = [MultiModalItem("a" * 64, 2, 30), MultiModalItem("b" * 64, 32, 1)]
    extras = block_extra_keys(0, num_blocks, 4, lora=lora, mm_items=items, cache_salt="sålt")
    root = none_hash()
    assert hash_blocks(
        tokens, 4, lora=lora, mm_items=items, cache_salt="sålt"
    ) == chain_by_hand(tokens, 4, root, extras)  # fmt: skip


def test_p06_self_test_passes_here_and_refuses_another_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_encoder()
    honest = cbor2.dumps

    def wrong_past_4096(item: object, *, canonical: bool) -> bytes:
        raw = honest(item, canonical=canonical)
        return raw[:4096] + raw[:-4096] if len(raw) > 8192 else raw

    def long_ints(item: object, *, canonical: bool) -> bytes:
        return b"\x18\x17" if item == 23 else honest(item, canonical=canonical)

    for broken in (wrong_past_4096, long_ints):
        monkeypatch.setattr(cbor2, "dumps", broken)
        with pytest.raises(ConfigError, match="hash self-test failed"):
            check_encoder()


@pytest.mark.parametrize("part", ["as_words", "encode_runs"])
def test_p06_self_test_refuses_a_broken_fast_path(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    broken: dict[str, Any] = {
        "as_words": lambda tokens: None,
        "encode_runs": lambda words, run: (b"", []),
    }
    monkeypatch.setattr(cbor, part, broken[part])
    with pytest.raises(ConfigError, match="hash self-test failed"):
        check_encoder()


def test_p06_keys_equal_the_field_cases_vectors() -> None:
    root = none_hash("sha256_cbor", "0")
    assert root.hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    first, second = hash_blocks(range(32), 16, root=root)
    assert first.hex() == "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c"
    assert second.hex() == "fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac"
    widths = [23, 24, 255, 256, 65535, 65536, 2**31 - 1, *range(9)]
    (third,) = hash_blocks(widths, 16, root=root)
    assert third.hex() == "1791d4634d1beed7a9706ae6e3bdae5461e3ed5d947aa57b8f94496bec14e14c"


# ------------------------------------------------------------------------------ token types


@pytest.mark.parametrize("num_blocks", [1, hashing._FAST_PATH_BLOCKS])
# The last two are as long as an int where the fast path lays tokens out.
@pytest.mark.parametrize("wrong", [True, np.int64(3), np.int32(3), 3.0, "3", None, b"", ()])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_p07_token_ids_of_another_type_are_rejected(
    num_blocks: int, wrong: Any, algorithm: str
) -> None:
    tokens = [3] * (4 * num_blocks)
    tokens[2] = wrong
    with pytest.raises(MisuseError, match=type(wrong).__name__):
        hash_blocks(tokens, 4, algorithm=algorithm, root=none_hash(algorithm, "0"))


@pytest.mark.parametrize("num_blocks", [1, hashing._FAST_PATH_BLOCKS])
def test_p07_list_tuple_and_integer_arrays_give_one_digest(num_blocks: int) -> None:
    tokens = list(range(4 * num_blocks))
    expected = hash_blocks(tokens, 4)
    assert hash_blocks(tuple(tokens), 4) == expected
    assert hash_blocks(range(4 * num_blocks), 4) == expected
    for dtype in (np.int64, np.uint32, np.int16, ">i8"):
        assert hash_blocks(np.array(tokens, dtype), 4) == expected
    strided = np.repeat(np.array(tokens), 2)[::2]
    assert hash_blocks(strided, 4) == expected


@pytest.mark.parametrize("array", [np.ones(8, bool), np.ones(8), np.ones((8, 1), int)])
def test_p07_other_arrays_are_rejected(array: Any) -> None:
    with pytest.raises(MisuseError, match="one dimension and an integer dtype"):
        hash_blocks(array, 4)


@pytest.mark.parametrize("tokens", [[-1, -25, 3, 4], [2**32, 2**40, 3, 4], [2**31, 3, -1, 4]])
def test_negative_and_huge_ids_are_hashed_as_vllm_does(tokens: list[int]) -> None:
    expected = chain_by_hand(tokens * 20, 4, none_hash())
    assert hash_blocks(tokens * 20, 4) == expected
    assert hash_blocks(np.array(tokens * 20), 4) == expected


# ------------------------------------------------------------------------------ chains


def test_chain_names_the_whole_prefix() -> None:
    base = list(range(12))
    changed = [99, *base[1:]]
    assert not set(hash_blocks(base, 4)) & set(hash_blocks(changed, 4))
    assert hash_blocks(base, 4) == hash_blocks([*base, 1, 2, 3], 4)
    assert hash_blocks(base[:3], 4) == []
    assert hash_blocks([], 4) == []


def test_long_chains_go_on_across_runs_and_across_ids_that_only_the_slow_path_takes() -> None:
    tokens = list(range(4 * (3 * hashing._RUN_BLOCKS + 20)))
    tokens[4 * hashing._RUN_BLOCKS + 7] = 2**40
    assert hash_blocks(tokens, 4) == chain_by_hand(tokens, 4, none_hash())


def test_wrong_chains_are_rejected() -> None:
    chain = hash_blocks(range(8), 4)
    with pytest.raises(MisuseError, match="more blocks are known"):
        hash_blocks(range(4), 4, known=chain)
    with pytest.raises(MisuseError, match="expected 32 bytes"):
        hash_blocks(range(8), 4, root=bytes(16))
    with pytest.raises(MisuseError, match="expected 16 bytes"):
        hash_blocks(range(12), 4, algorithm="xxhash_cbor", known=chain)
    wrong_sizes: list[Any] = [0, -1, True, 4.0]
    for size in wrong_sizes:
        with pytest.raises(MisuseError, match="at least 1"):
            hash_blocks(range(8), size)


def test_an_empty_root_means_the_default_root() -> None:
    assert hash_blocks(range(8), 4, root=b"") == hash_blocks(range(8), 4)


@pytest.mark.parametrize("name", ["builtin", "md5", "", "SHA256"])
def test_unknown_algorithms_are_refused_with_the_choices(name: str) -> None:
    for call in (hash_algorithm, none_hash, lambda n: hash_blocks([1], 1, algorithm=n)):
        with pytest.raises(ConfigError, match="sha256_cbor, sha256, xxhash_cbor, xxhash"):
            call(name)


# ------------------------------------------------------------------------------ seeds


def test_xxhash_root_is_random_but_fixed_within_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    hashing._random_seed.cache_clear()
    with caplog.at_level(logging.WARNING):
        seed = root_seed("xxhash")
        assert none_hash("xxhash_cbor") == none_hash("xxhash_cbor", seed)
    assert len(bytes.fromhex(seed)) == 32
    assert root_seed("sha256") == root_seed("sha256_cbor") == "vllm-none-hash"
    assert [r.message for r in caplog.records if "PYTHONHASHSEED" in r.message] == [
        r.message for r in caplog.records
    ]
    assert len(caplog.records) == 1


def test_seeds_are_text() -> None:
    seed: Any = 0
    with pytest.raises(MisuseError, match="int"):
        none_hash("sha256", seed)
    assert len({none_hash("sha256", text) for text in ("0", "00", "", "random")}) == 4


def test_p01_processes_with_one_seed_agree_and_roots_tell_those_without() -> None:
    script = (
        "from ebbtide.allocator import hash_blocks, none_hash\n"
        "print(none_hash().hex(), *(h.hex() for h in hash_blocks(range(64), 16)))"
    )

    def run(seed: str | None) -> list[str]:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    seven = run("7")
    assert len(seven) == 5
    assert run("7") == seven
    unset = run(None)
    assert unset == [none_hash("sha256_cbor", "vllm-none-hash").hex(), *unset[1:]]
    assert not set(unset) & set(seven)
    assert unset[0] != seven[0]


# ------------------------------------------------------------------------------ extra keys


def overlapping(items: list[MultiModalItem], start: int, end: int) -> list[tuple[str, str, int]]:
    return [
        ("mm", i.identifier, i.offset - start)
        for i in items
        if i.offset < end and i.offset + i.length > start
    ]


@quick
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=6),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_images_are_in_every_block_they_overlap(
    gaps: list[tuple[int, int]], block_size: int, first: int
) -> None:
    items, position = [], 0
    for number, (gap, length) in enumerate(gaps):
        items.append(MultiModalItem(f"image{number}", position + gap, length))
        position += gap + length
    found = block_extra_keys(first, first + 12, block_size, mm_items=items)
    for block, keys in enumerate(found, first):
        start = block * block_size
        assert list(keys or ()) == overlapping(items, start, start + block_size)


def test_extra_keys_stand_in_their_order() -> None:
    embeds = np.arange(8, dtype=np.float32).reshape(8, 1)
    first, second = block_extra_keys(
        0, 2, 4,
        lora=LoraAdapter("n", "/p"),
        mm_items=[MultiModalItem("i", 3, 2)],
        cache_salt="s",
        prompt_embeds=embeds,
    )  # fmt: skip
    digests = [hashlib.sha256(embeds[a : a + 4].tobytes()).digest() for a in (0, 4)]
    lora = ("lora", "n", "/p")
    assert first == (lora, ("mm", "i", 3), ("cache_salt", "s"), ("prompt_embeds", digests[0]))
    assert second == (lora, ("mm", "i", -1), ("prompt_embeds", digests[1]))
    assert block_extra_keys(1, 2, 4, cache_salt="s") == [None]
    assert block_extra_keys(0, 1, 4, cache_salt="") == [None]


def test_p11_images_that_differ_anywhere_or_stand_elsewhere_never_share() -> None:
    tail = "beef"
    prompt = [9] * 128  # placeholders all carry one token id
    names = {}
    for label, items in {
        "one": [MultiModalItem("a" * 60 + tail, 40, 50)],
        "two": [MultiModalItem("b" * 60 + tail, 40, 50)],
        "shifted": [MultiModalItem("a" * 60 + tail, 41, 50)],
        "text": [],
    }.items():
        names[label] = hash_blocks(prompt, 16, mm_items=items)
    for label in ("two", "shifted", "text"):
        same = [a == b for a, b in zip(names["one"], names[label], strict=True)]
        assert same == [True] * 2 + [False] * 6


@pytest.mark.parametrize(
    "extras",
    [
        {"cache_salt": b"bytes"},
        {"lora": LoraAdapter("name", 7)},  # type: ignore[arg-type]
        {"mm_items": [MultiModalItem(12, 0, 4)]},  # type: ignore[arg-type]
        {"mm_items": [MultiModalItem("i", 0.0, 4)]},  # type: ignore[arg-type]
        {"cache_salt": "\ud800"},  # a lone surrogate, which JSON lets through
    ],
)
def test_extras_that_cannot_be_named_are_rejected(extras: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        hash_blocks(range(8), 4, **extras)


def test_embeds_are_hashed_under_zeros_where_no_token_id_stands() -> None:
    assert embeds_token_ids(3) == [0, 0, 0]
    assert embeds_token_ids(3, [7, 8, 9]) == [7, 8, 9]
    assert embeds_token_ids(3, [7, 8, 9], [True, False, True]) == [7, 0, 9]
    for ids, mask in (([7, 8], None), ([7, 8, 9], [True])):
        with pytest.raises(MisuseError, match="differ in length"):
            embeds_token_ids(3, ids, mask)
