"""Our KV cache manager beside vLLM's, operation by operation."""

from __future__ import annotations

import json
import os

from tests.engine.allocator_oracle import SHAPES, rounds
from tests.oracle_replay import Replays

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
