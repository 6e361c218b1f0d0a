"""Two ranks in two worker processes: each moves its shard, and a block exists when both have."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.engine.counters import Counters, assert_counters_add_up
from tests.engine.in_process import DEFAULT_FLAGS, engine_prompt, greedy
from tests.engine.prompts import LONG_RESTORED, Answer, prompt, tokens_of
from tests.engine.servers import SharedStore, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any, Self

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models
    from tests.engine.prompts import Prompt

pytestmark = pytest.mark.timeout(300)

USERS = [prompt(seed) for seed in range(3)]
READY_S = 60.0
END_S = 30.0
_NOT_READY = {"namespace_pending", "timeout", "unknown"}


class TwoRanks:
    """A `vllm.LLM` whose engine core and workers are processes of their own."""

    def __init__(self, model: Path, transfer: dict[str, Any], **flags: Any) -> None:
        from vllm import LLM

        every = {**DEFAULT_FLAGS, **flags, "kv_transfer_config": transfer}
        self._before = Counters.of_this_process()
        self.llm = LLM(model=str(model), num_gpu_blocks_override=80, **every)
        self._children = psutil.Process().children(recursive=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        workers = [one for one in self._children if "serve" not in _command(one)]
        _, alive = psutil.wait_procs(workers, timeout=END_S)
        assert not alive, alive

    @property
    def workers(self) -> int:
        """How many worker processes there are."""
        return sum("VLLM::Worker" in _command(one) for one in self._children)

    def ask(self, prompts: Sequence[Prompt], *, max_tokens: int = 16) -> list[Answer]:
        """One by one."""
        answers = []
        for each in prompts:
            (output,) = self.llm.generate(
                [engine_prompt(each)], greedy(max_tokens), use_tqdm=False
            )
            tokens = tuple(output.outputs[0].token_ids)
            answers.append(Answer(tokens, output.num_cached_tokens or 0))
        return answers

    def ready(self) -> None:
        """Until ebbtide stores and restores; then count from there on."""
        deadline = time.monotonic() + READY_S
        reasons = {"unknown": 1}
        while reasons.keys() & _NOT_READY:
            assert time.monotonic() < deadline, f"the connector does not come up: {reasons}"
            before = self.counters()
            self.ask([prompt(3 * 10**9 + int(deadline - time.monotonic()), 65)], max_tokens=1)
            reasons = self.counters().since(before).by("ebbtide_miss_blocks_total", "reason")
        self._before = Counters.of_this_process()

    def counters(self) -> Counters:
        """Since the start, as far as the engine core has reported: with each answer."""
        return Counters.of_this_process().since(self._before)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[tuple[int, ...]]:
    """What one rank without a connector answers."""
    return tokens_of(plain(USERS))


@pytest.fixture
def two_processes(expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on: engines in processes of their own, each rank on a core."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedStore]:
    with SharedStore(tmp_path, memory="16MiB") as found:
        yield found


@pytest.mark.parametrize("shape", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_store_and_restore_as_one(
    models: Models,
    expected: list[tuple[int, ...]],
    tiers: Tiers,
    store: SharedStore,
    two_processes: None,
    shape: str,
) -> None:
    transfer = tiers(disk=False, socket=store.socket)
    transfer["kv_connector_extra_config"]["limits"] = {"lookup_timeout": "2s"}
    with TwoRanks(models["llama"], transfer, **{shape: 2}) as engine:
        assert engine.workers == 2
        engine.ready()
        first = engine.ask(USERS)
        again = engine.ask(USERS)
        engine.ask([prompt(50, 65)])  # brings the last numbers
        counters = engine.counters()
        eventually(lambda: store.held() == 0, END_S, "slots stay held")
    assert tokens_of(first) == expected
    assert tokens_of(again) == expected
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 3
    assert counters.restored_tokens == 3 * LONG_RESTORED
    assert counters.restored_from("disk") > 0
    assert_counters_add_up(counters, requests=7)
