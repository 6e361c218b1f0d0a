"""A real vLLM in the test's own process: engine core, scheduler, worker and connector.

Several engines can follow each other in one process; at no time are there two.
"""

from __future__ import annotations

import gc
import itertools
import time
from typing import TYPE_CHECKING, Any, Self

import psutil
from tests.engine.counters import Counters
from tests.engine.prompts import Answer, Prompt, prompt
from vllm import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm.lora.request import LoRARequest

SETTLE_S = 20.0
STORE_END_S = 20.0
READY_S = 30.0
PROBE_PAUSE_S = 0.2
_NOT_READY = {"namespace_pending", "timeout", "unknown"}  # reasons of misses at an engine's start
_probe_seeds = itertools.count(10**9)
ANSWER_TOKENS = 16
DEFAULT_FLAGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",  # with fewer bits, greedy tokens change with the batch a prompt is in
    "seed": 0,
    "block_size": 32,
    "prefix_caching_hash_algo": "sha256_cbor",
    "max_model_len": 2304,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": False,
}


def greedy(max_tokens: int = ANSWER_TOKENS) -> SamplingParams:
    """Exactly `max_tokens` greedy tokens, as ids."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)


class Engine:
    """One `vllm.LLM`. A context manager; after it, nothing of the engine is left."""

    def __init__(
        self,
        model: Path,
        *,
        blocks: int = 80,
        transfer: dict[str, Any] | None = None,
        **flags: Any,
    ) -> None:
        """`blocks`: device blocks, one of which vLLM keeps for itself. `transfer`: the
        `kv_transfer_config`, None for vLLM without a connector. `flags`: as of `vllm.LLM`."""
        every_flag = {**DEFAULT_FLAGS, **flags}
        if transfer is not None:
            every_flag["kv_transfer_config"] = transfer
        try:
            self.llm = LLM(model=str(model), num_gpu_blocks_override=blocks, **every_flag)
        except BaseException:
            _forget_distributed_state()
            raise
        self.blocks = blocks
        self._before = Counters.of_this_process()
        if transfer is not None:
            self.ready()
            self._before = Counters.of_this_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut everything down so that the next engine finds a process like a fresh one."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        end_private_stores()

    def ready(self) -> None:
        """Wait until ebbtide knows its namespace: before that it neither stores nor restores.

        Asks short prompts of its own; called after the start, and by a test after a reset.
        """
        deadline = time.monotonic() + READY_S
        good = 0
        while good < 2:  # with the second, what the earlier ones left on the device is stored
            before = self.counters()
            self.one_by_one([prompt(next(_probe_seeds), 65)], max_tokens=1)
            reasons = self.counters().since(before).by("ebbtide_miss_blocks_total", "reason")
            good = 0 if reasons.keys() & _NOT_READY else good + 1
            assert time.monotonic() < deadline, f"the connector does not come up: {reasons}"
            if not good:
                time.sleep(PROBE_PAUSE_S)  # each probe leaves blocks on the device

    # ------------------------------------------------------------------ parts of the engine

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def free_blocks(self) -> int:
        """Device blocks that nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # ------------------------------------------------------------------ what a test does

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = ANSWER_TOKENS,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        reads: bool = True,
    ) -> list[Answer]:
        """Answer all prompts in one batch, in order. Not `reads`: without any cache."""
        asked = [engine_prompt(prompt, salt) for prompt in prompts]
        params = greedy(max_tokens)
        params.skip_reading_prefix_cache = not reads
        outputs = self.llm.generate(asked, params, use_tqdm=False, lora_request=lora)
        return [
            Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0)
            for output in outputs
        ]

    def one_by_one(self, prompts: Sequence[Prompt], **how: Any) -> list[Answer]:
        """Answer the prompts one after the other; copies under way end in between."""
        answers = []
        for each in prompts:
            answers += self.generate([each], **how)
            self.settle()
        return answers

    def add(self, name: str, prompt: Prompt, *, max_tokens: int = ANSWER_TOKENS) -> None:
        """Hand in a request without running it: for tests that step by hand."""
        self.llm.llm_engine.add_request(name, engine_prompt(prompt), greedy(max_tokens))

    def step(self) -> None:
        """One step of the engine; finished outputs are dropped."""
        self.llm.llm_engine.step()

    def abort(self) -> None:
        """Abort every request that was handed in with `add`."""
        names = list(self.llm.llm_engine.output_processor.request_states)
        self.llm.llm_engine.abort_request(names, internal=True)

    def settle(self) -> None:
        """Step until no request and no copy is under way."""
        deadline = time.monotonic() + SETTLE_S
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, "the engine does not come to rest"
            self.step()

    def reset(self, *, connector: bool = False) -> bool:
        """`LLM.reset_prefix_cache`; with `connector`, of the tiers as well."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def counted_now(self, name: str) -> int:
        """The sum of one counter so far, without stepping."""
        return Counters.of_this_process().since(self._before).total(name)

    def counters(self) -> Counters:
        """What was counted since this engine was built, copies under way included."""
        self.settle()
        return Counters.of_this_process().since(self._before)


def engine_prompt(prompt: Prompt, salt: str | None = None) -> dict[str, Any]:
    """A prompt as vLLM takes it."""
    asked: dict[str, Any] = {"prompt_token_ids": list(prompt)}
    if salt is not None:
        asked["cache_salt"] = salt
    return asked


def end_private_stores() -> None:
    """A private store lives as long as its engine's process, which here goes on: end it."""
    stores = [child for child in psutil.Process().children() if "--private" in child.cmdline()]
    for store in stores:
        store.terminate()
    _, alive = psutil.wait_procs(stores, timeout=STORE_END_S)
    assert not alive, "a store did not end"


def _forget_distributed_state() -> None:
    """After a start that failed: the next engine must be able to initialise it again."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
