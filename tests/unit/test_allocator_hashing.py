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
    hash_blocks,
    hashing,
    none_hash,
    root_seed,
)
from ebbtide.errors import MisuseError

pytestmark = pytest.mark.usefixtures("both_paths")

ALGORITHMS = ("sha256_cbor", "sha256", "xxhash_cbor", "xxhash")
EDGES = (0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1)
WIDER_EDGES = (2**31, 2**32 - 1, 2**32, 2**63 - 1)
TOKENS = st.one_of(st.sampled_from(EDGES), st.integers(0, 152_000))
WIDE_TOKENS = st.one_of(TOKENS, st.sampled_from(WIDER_EDGES), st.integers(0, 2**63 - 1))
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


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int]:
    """Token ids and a block size, from no block at all to more than the fast path begins at."""
    edges = st.sampled_from((16, 23, 24, 255, 256))
    block_size = draw(st.one_of(st.integers(1, 9), edges, st.integers(1, 300)))
    length = draw(st.integers(0, (hashing._FAST_PATH_BLOCKS + 3) * block_size))
    few = draw(st.lists(draw(st.sampled_from((TOKENS, WIDE_TOKENS))), min_size=1, max_size=50))
    return (few * (length // len(few) + 1))[:length], block_size


@st.composite
def any_extras(draw: st.DrawFn) -> dict[str, Any]:
    """An adapter, images, a salt, embeddings; each may be missing."""
    items, position = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), max_size=4)
    ):
        items.append(MultiModalItem(draw(st.text(max_size=30)), position + gap, length))
        position += gap + length
    rows = draw(st.none() | st.integers(0, 60))
    return {
        "lora": draw(st.none() | st.builds(LoraAdapter, st.text(max_size=30), st.text())),
        "mm_items": items,
        "cache_salt": draw(st.none() | st.text(max_size=130)),
        "prompt_embeds": None if rows is None else np.arange(2.0 * rows).reshape(rows, 2),
    }


def extras_by_hand(extras: dict[str, Any], start: int, end: int) -> Any:
    """The extra keys of the block of tokens `start` .. `end - 1`, token by token."""
    lora, embeds = extras["lora"], extras["prompt_embeds"]
    keys: list[tuple[Any, ...]] = [] if lora is None else [("lora", lora.name, lora.path)]
    for name, offset, length in extras["mm_items"]:
        if set(range(offset, offset + length)) & set(range(start, end)):
            keys += [("mm", name, offset - start)]
    if extras["cache_salt"] and start == 0:
        keys.append(("cache_salt", extras["cache_salt"]))
    if embeds is not None:
        keys.append(("prompt_embeds", hashlib.sha256(embeds[start:end].tobytes()).digest()))
    return tuple(keys) or None


@settings(quick, max_examples=200)
@given(prompts(), any_extras(), st.sampled_from(("list", "tuple", "int64", "uint64")))
def test_every_path_names_blocks_as_the_specification_has_it(
    prompt: tuple[list[int], int], extras: dict[str, Any], given_as: str
) -> None:
    tokens, size = prompt
    forms: dict[str, Any] = {
        "list": tokens,
        "tuple": tuple(tokens),
        "int64": np.array(tokens, np.int64),
        "uint64": np.array(tokens, np.uint64),
    }
    by_hand = [extras_by_hand(extras, at, at + size) for at in range(0, len(tokens), size)]
    expected = chain_by_hand(tokens, size, none_hash("sha256_cbor", "s"), by_hand)
    root = none_hash("sha256_cbor", "s")
    assert hash_blocks(forms[given_as], size, root=root, **extras) == expected
    known = expected[: len(expected) // 2]
    more = hash_blocks(forms[given_as], size, root=root, known=known, **extras)
    assert known + more == expected


@quick
@given(prompts(), any_extras(), st.sampled_from(ALGORITHMS))
def test_a_prompt_at_once_is_named_as_block_by_block(
    prompt: tuple[list[int], int], extras: dict[str, Any], algorithm: str
) -> None:
    tokens, size = prompt
    chain: list[bytes] = []
    how: dict[str, Any] = {"algorithm": algorithm, "root": none_hash(algorithm, "s"), **extras}
    for end in range(size, len(tokens) + 1, size):  # one block a call: no fast path
        chain += hash_blocks(tokens[:end], size, known=chain, **how)
    assert hash_blocks(tokens, size, **how) == chain


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


def test_arrays_above_the_signed_range_are_hashed_by_their_values() -> None:
    tokens = [2**63, 2**64 - 1, 3, 4] * 20
    assert hash_blocks(np.array(tokens, np.uint64), 4) == chain_by_hand(tokens, 4, none_hash())


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
