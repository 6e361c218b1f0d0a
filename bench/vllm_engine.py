"""A vLLM engine in this process, with everything that one measurement of it has to say."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ebbtide.bench.vllm_answer import BLOCK_SIZE, Answer, Prompt
from ebbtide.bench.vllm_hooks import HookTimes
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.bench.vllm_answer import WorkerSpec
    from ebbtide.bench.vllm_tiers import Tiers

COPY_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 120.0
IDLE_SLEEP_S = 0.001
PROBE_TOKENS = 2 * BLOCK_SIZE + 1
NOT_READY = {"namespace_pending", "timeout", "unknown"}  # reasons of misses at an engine's start


class Engine:
    """One `vllm.LLM`, eager, one request at a time."""

    def __init__(self, spec: WorkerSpec, tiers: Tiers) -> None:
        """Raises what vLLM raises, and EbbtideError when the connector does not come up."""
        from vllm import LLM

        flags: dict[str, Any] = {}
        if tiers.transfer_config is not None:
            flags["kv_transfer_config"] = tiers.transfer_config
        self._tiers = tiers
        self._llm = LLM(
            model=spec.model,
            dtype=spec.dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            block_size=BLOCK_SIZE,
            max_model_len=spec.max_model_len,
            max_num_batched_tokens=spec.max_model_len,  # a prompt is one step
            max_num_seqs=8,
            num_gpu_blocks_override=spec.device_blocks,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            disable_log_stats=False,
            **flags,
        )
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        connector = self._scheduler.connector
        self._hooks = HookTimes(connector) if connector is not None else None
        if spec.tiers.kind == "ebbtide":
            self._until_ready()

    def described(self) -> Answer:
        """What the driver is told when the engine is ready."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        record_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups
        )
        return Answer(record_bytes=record_bytes, facts=self._tiers.facts())

    def forget(self) -> None:
        """Drop the device's prefix cache; the tiers keep theirs. Raises EbbtideError if busy."""
        if not self._llm.reset_prefix_cache():
            raise EbbtideError("The device's prefix cache is in use and cannot be dropped")

    def ask(self, prompts: Sequence[Prompt]) -> Answer:
        """Answer the prompts one after the other, then wait until nothing is under way."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            max_tokens=1, min_tokens=1, temperature=0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt.token_ids()} for prompt in prompts]
        gc.collect()
        answer, before, counts = Answer(), _counters(), self._tiers.counts()
        if self._hooks is not None:
            self._hooks.take()
        cpu_s, store_cpu_s = time.process_time(), self._tiers.cpu_s()
        started = time.perf_counter()
        for each in asked:
            began = time.perf_counter()
            (output,) = self._llm.generate([each], greedy, use_tqdm=False)
            answer.times_s.append(time.perf_counter() - began)
            answer.token_ids.append(list(output.outputs[0].token_ids))
            answer.cached_tokens.append(output.num_cached_tokens or 0)
        answer.seconds = time.perf_counter() - started
        self._finish_copies()
        answer.copied_s = time.perf_counter() - started
        answer.engine_cpu_s = time.process_time() - cpu_s
        if self._hooks is not None:
            answer.hooks_us = self._hooks.take()
        self._tiers.settle()
        answer.store_cpu_s = self._tiers.cpu_s() - store_cpu_s
        _count(answer, _counters() - before)
        moved = Counter(self._tiers.counts()) - Counter(counts)
        answer.corrupt = moved.pop("corrupt", 0)
        answer.moved.update(moved)
        return answer

    def close(self) -> None:
        """End the engine core: copies first."""
        self._llm.llm_engine.engine_core.shutdown()

    def _finish_copies(self) -> None:
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while self._scheduler.has_requests():
            if time.monotonic() > deadline:
                raise EbbtideError("The engine's copies do not end")
            self._llm.llm_engine.step()
            time.sleep(IDLE_SLEEP_S)

    def _until_ready(self) -> None:
        """Until ebbtide knows its namespace, it neither stores nor restores."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        for number in itertools.count():
            misses = self.ask([Prompt(f"ready-{number}", PROBE_TOKENS)]).misses
            if misses and not misses.keys() & NOT_READY:
                return
            if time.monotonic() > deadline:
                raise EbbtideError("The connector does not come up", misses=misses)


def _counters() -> Counter[tuple[str, str]]:
    """ebbtide's counters in this process: (name, value of its own label) -> value."""
    from prometheus_client import REGISTRY

    found: Counter[tuple[str, str]] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("ebbtide_") and sample.name.endswith("_total"):
                labels = sample.labels
                own = [labels[name] for name in ("tier", "reason", "edge") if name in labels]
                found[sample.name, "".join(own)] += round(sample.value)
    return found


def _count(answer: Answer, grown: Counter[tuple[str, str]]) -> None:
    into = {
        "ebbtide_hit_tokens_total": answer.hits,
        "ebbtide_miss_blocks_total": answer.misses,
        "ebbtide_moved_bytes_total": answer.moved,
    }
    for (name, label), value in grown.items():
        if name in into:
            into[name][label] = value
        elif name == "ebbtide_demoted_blocks_total":
            answer.stored_blocks += value
        elif name == "ebbtide_faults_total":
            answer.faults += value
