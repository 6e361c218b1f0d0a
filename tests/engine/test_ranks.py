"""Two ranks in two worker processes: each moves its shard, and a block exists when both have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.prompts import LONG_RESTORED, prompt, tokens_of
from tests.engine.servers import END_S, PATIENT, Server, SharedStore, eventually, transfer_config

if TYPE_CHECKING:
    from tests.engine.conftest import Plain
    from tests.engine.models import Models

pytestmark = [pytest.mark.server, pytest.mark.timeout(450)]

SITE = Path(__file__).parent / "site"  # no rank waits in a loop that starves everybody else
USERS = [prompt(seed) for seed in range(3)]
PROCESSES = 4  # API, engine core and two workers
RECORD_BYTES = 128 << 10  # of a block of the Llama, both shards together


# Not also two stages of a pipeline: vLLM 0.32 without a connector cannot run them eagerly on a
# CPU (the second stage asserts that a warm-up has run, which eager mode leaves out).
def test_two_tensor_parallel_ranks_store_and_restore_as_one(
    models: Models, plain: Plain, tmp_path: Path
) -> None:
    expected = tokens_of(plain(USERS))  # of one rank
    with SharedStore(tmp_path, memory="16MiB") as store:
        transfer = transfer_config(
            *("--memory", "16MiB", "--socket", store.socket),
            *PATIENT,
        )
        two = ("--tensor-parallel-size", "2")
        with Server(
            models["llama"],
            tmp_path / "server",
            transfer=transfer,
            flags=two,
            VLLM_CPU_OMP_THREADS_BIND="0|1",
            PYTHONPATH=str(SITE),
        ) as server:
            server.until_ready()
            assert len(server.engine_processes()) >= PROCESSES
            first = server.one_by_one(USERS)
            again = server.one_by_one(USERS)
            counters = server.counters(requests=6)
            eventually(lambda: store.held() == 0, END_S, "slots stay held")
            assert store.stats()["memory"]["payload_bytes"] % RECORD_BYTES == 0
    assert tokens_of(first) == expected
    assert tokens_of(again) == expected
    assert [answer.cached_tokens for answer in first] == [0] * 3
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 3
    told = (
        counters.by("ebbtide_hit_blocks_total", "tier"),
        counters.by("ebbtide_miss_blocks_total", "reason"),
        counters.by("ebbtide_loads_total", "outcome"),
    )
    assert counters.restored_tokens == 3 * LONG_RESTORED, told
    assert counters.restored_from("disk") > 0
    assert_counters_add_up(counters, requests=6)
