"""Our KV cache manager beside vLLM's, operation by operation."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import msgspec
from tests.engine.allocator_oracle import SHAPES, Oracle, rounds
from tests.oracle_replay import Replays, Told

from ebbtide.allocator import EventLog

SEED = int(os.environ.get("EBBTIDE_TEST_ORACLE_SEED", "1"))
ROUNDS = int(os.environ.get("EBBTIDE_TEST_ORACLE_ROUNDS", "40"))


def test_no_operation_differs() -> None:
    replays = Replays()
    rounds(SEED, ROUNDS, lambda record: replays.apply(json.loads(json.dumps(record))))
    replays.end()
    print(  # noqa: T201  # shown with -s
        f"seed {SEED}: {replays.rounds} rounds, {replays.operations} operations, "
        f"{replays.hit_tokens} hit tokens, {replays.evicted} evictions, "
        f"{replays.refused} refused, {len(replays.shapes)} of {len(SHAPES)} shapes, 0 differences"
    )
    assert replays.operations >= ROUNDS * 100
    assert min(replays.hit_tokens, replays.evicted, replays.refused) >= ROUNDS


class Messages(Told):
    """The events that we would send, beside those of the traces."""

    def __init__(self, hash_block_size: int) -> None:
        super().__init__(hash_block_size)
        self.log = EventLog(hash_block_size)

    def stored(self, *what: Any) -> None:
        super().stored(*what)
        self.log.stored(*what)

    def stored_partial(self, *what: Any) -> None:
        super().stored_partial(*what)
        self.log.stored_partial(*what)

    def removed(self, key: bytes) -> None:
        super().removed(key)
        self.log.removed(key)

    def cleared(self) -> None:
        super().cleared()
        self.log.cleared()


def test_every_event_is_vllms_byte_for_byte() -> None:
    replays, seen = Replays(Messages), Counter[str]()

    def compare(oracle: Oracle) -> None:
        told = replays.one.told
        assert isinstance(told, Messages)
        ours = told.log.take()
        # Of a block with several keys vLLM removes them in the order of a set.
        assert sorted(map(msgspec.msgpack.encode, ours)) == sorted(
            map(msgspec.msgpack.encode, oracle.taken)
        )
        seen.update(type(event).__name__ for event in ours)

    rounds(SEED + 1, ROUNDS // 2, lambda r: replays.apply(json.loads(json.dumps(r))), compare)
    assert seen["BlockStored"] > 500
    assert seen["BlockRemoved"] > 200
    assert seen["AllBlocksCleared"] > 5
