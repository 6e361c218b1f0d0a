"""A small engine with continuous batching: the first consumer of the seam, and its proof.

It runs on a CPU in tests and benchmarks and does what a large engine does in the same order:
chunked prefill, prefix caching, preemption, loads that arrive steps later. Greedy answers only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ebbtide.allocator import (
    DEFAULT_ALGORITHM,
    BlockPool,
    FullAttention,
    KVCacheManager,
    Request,
    SlidingWindow,
    check_cache_salt,
)
from ebbtide.connectors.reference.runner import Part, Runner
from ebbtide.connectors.reference.scheduler import Scheduled, Scheduler
from ebbtide.connectors.reference.sequence import RequestOutput, Sequence
from ebbtide.connectors.seam import BlockRef
from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ebbtide.allocator import EventLog, LogLine
    from ebbtide.connectors.reference.model import ModelConfig
    from ebbtide.connectors.seam import SchedulerHalf, WorkerHalf

IDLE_SLEEP_S = 0.001
"""Pause between steps that had no token to run."""


@runtime_checkable
class ExplainsMisses(Protocol):
    """What a scheduler half may offer beside the seam: why a request's blocks were not served."""

    def misses_by_reason(self, request_id: str) -> dict[str, int]:
        """Blocks by miss reason. Asked once, before `request_finished`."""
        ...


class Engine:
    """Requests in, greedy answers out. One thread; `step` does all the work.

    `pool` are the device blocks, `runner.kv_caches` the paged tensors: a scheduler half needs the
    first and a worker half the second, so halves are usually built after the engine and given to
    `attach`. Halves need prefix caching; without halves there are no tiers behind the device.

    `num_blocks` includes the null block. `events` collects what becomes of cached blocks; whoever
    passes it drains it. `log_line` is told of every step and logs when it is due. Raises
    ConfigError for bounds below one.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        max_batched_tokens: int = 512,
        max_running: int = 16,
        scheduler_half: SchedulerHalf | None = None,
        worker_half: WorkerHalf | None = None,
        enable_prefix_caching: bool = True,
        device: str = "cpu",
        seed: int = 0,
        hash_algorithm: str = DEFAULT_ALGORITHM,
        events: EventLog | None = None,
        log_line: LogLine | None = None,
    ) -> None:
        if min(max_batched_tokens, max_running, block_size) < 1 or num_blocks < 2:
            raise ConfigError(
                "an engine needs a token budget, a place to run and two blocks",
                max_batched_tokens=max_batched_tokens,
                max_running=max_running,
                num_blocks=num_blocks,
                block_size=block_size,
            )
        self.block_size = block_size
        self.kv = KVCacheManager(
            num_blocks,
            [
                FullAttention(block_size) if window is None else SlidingWindow(block_size, window)
                for window in model_config.windows
            ],
            model_config.max_position,
            enable_caching=enable_prefix_caching,
            max_in_flight_tokens=max_batched_tokens,
            events=events,
            track_newly_cached=True,
        )
        self.runner = Runner(
            model_config, num_blocks=num_blocks, block_size=block_size, device=device, seed=seed
        )
        self.scheduler = Scheduler(
            self.kv, max_batched_tokens=max_batched_tokens, max_running=max_running
        )
        self.last_step_tokens = 0
        self.tokens_ahead = 0  # that were computed on loads still arriving, and counted
        self.being_computed: set[int] = set()  # blocks that have their hash before their content
        self.hash_algorithm = hash_algorithm
        self._log_line = log_line
        self._worker_half: WorkerHalf | None = None
        self._newly_full: list[tuple[int, bytes]] = []
        self._generated = 0
        self._closed = False
        if scheduler_half is not None and worker_half is not None:
            self.attach(scheduler_half, worker_half)
        elif scheduler_half is not None or worker_half is not None:
            raise ConfigError("the two halves of a connector come together or not at all")

    @property
    def pool(self) -> BlockPool:
        """The device blocks, for a scheduler half to watch and to pin."""
        return self.kv.pool

    def attach(self, scheduler_half: SchedulerHalf, worker_half: WorkerHalf) -> None:
        """Connect both halves, once. Raises MisuseError while requests are under way."""
        if self.scheduler.has_sequences or self.scheduler.half is not None:
            raise MisuseError("halves are attached once, before the first request")
        if not self.kv.enable_caching:
            raise ConfigError(
                "cache tiers need prefix caching", next_step="Set enable_prefix_caching"
            )
        self.scheduler.half = scheduler_half
        self._worker_half = worker_half

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        max_new_tokens: int,
        cache_salt: str | None = None,
        *,
        keep_logits: bool = False,
    ) -> None:
        """Queue a request. `keep_logits` keeps the logits of its first answer token.

        Raises MisuseError for an id in use, an empty prompt, a token outside the vocabulary, no
        token to generate, a salt that no request may have, or a length that can never fit into the
        model or the pool.
        """
        config, total = self.runner.config, len(prompt_token_ids) + max_new_tokens
        if self._closed or request_id in self.scheduler.names:
            raise MisuseError("the engine is closed or the id is in use", request_id=request_id)
        blocks = self.kv.blocks_for_request(total)
        fits = total <= config.max_position and blocks < len(self.pool.blocks)
        if not prompt_token_ids or max_new_tokens < 1 or not fits:
            raise MisuseError(
                "the request is empty or too long",
                prompt_tokens=len(prompt_token_ids),
                max_new_tokens=max_new_tokens,
                needed_blocks=blocks,
                pool_blocks=len(self.pool.blocks) - 1,
                max_position=config.max_position,
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < config.vocab_size:
            raise MisuseError("a token is outside the vocabulary", vocab_size=config.vocab_size)
        if cache_salt is not None:
            check_cache_salt(cache_salt)
        request = Request(
            request_id,
            prompt_token_ids,
            hash_block_size=self.block_size,
            algorithm=self.hash_algorithm,
            cache_salt=cache_salt,
        )
        self.scheduler.add(Sequence(request, max_new_tokens, keep_logits))

    def abort(self, request_id: str) -> None:
        """Forget a request; no output comes. Unknown ids are ignored.

        While its blocks are being loaded, blocks and id stay taken until that load is reported.
        """
        self.scheduler.abort(request_id)

    def has_unfinished(self) -> bool:
        """True while requests are under way, or loads of aborted ones."""
        return self.scheduler.has_sequences

    def has_pending_work(self) -> bool:
        """True while another step would achieve something: requests, or copies of the halves."""
        half = self.scheduler.half
        return (
            self.has_unfinished()
            or bool(half is not None and self._newly_full)
            or (half is not None and half.has_pending_work())
        )

    def step(self) -> list[RequestOutput]:
        """One step of everything. Returns the requests that finished in it. Never sleeps.

        Also drives the halves when no token can run; `last_step_tokens` is 0 then.
        """
        if self._closed:
            raise MisuseError("the engine is closed")
        scheduled = self.scheduler.schedule()
        self.last_step_tokens = sum(part.num_tokens for part in scheduled)
        cached = self.kv.take_newly_cached()
        self.being_computed.update(block_id for block_id, _ in cached)
        self._start_copies()
        logits = self._forward(scheduled) if scheduled else None
        forward_ended_s = time.monotonic()
        if self._log_line is not None:
            self._log_line.observe(self.kv.take_stats())
            self._log_line.log_if_due(self.kv.usage)
        self.being_computed.clear()
        half, worker = self.scheduler.half, self._worker_half
        whole: set[str] = set()
        if half is not None and worker is not None:
            whole = self.scheduler.loads_ended(half.on_report(worker.finish_step()))
        rows = {
            part: row
            for row, part in enumerate(scheduled)
            if not part.ahead or part.sequence.request_id in whole
        }
        outputs = self._accept(rows, logits, forward_ended_s) if logits is not None else []
        # Cached when scheduled, computed by now: the next step may offer these blocks for storing.
        self._newly_full = cached + self.kv.take_newly_cached()
        return outputs

    def generate(
        self, prompts: Iterable[list[int]], max_new_tokens: int = 16, *, keep_logits: bool = False
    ) -> list[RequestOutput]:
        """Answers to all `prompts`, in their order, run together.

        Raises MisuseError while other requests are under way.
        """
        if self.has_unfinished():
            raise MisuseError("other requests are under way", requests=len(self.scheduler.names))
        names: list[str] = []
        for prompt in prompts:
            names.append(f"generate-{self._generated}")
            self._generated += 1
            self.add_request(names[-1], prompt, max_new_tokens, keep_logits=keep_logits)
        outputs = {output.request_id: output for output in self.run()}
        return [outputs[name] for name in names]

    def run(self) -> list[RequestOutput]:
        """Step until no request is left; all outputs in the order they finished."""
        outputs = []
        while self.has_unfinished():
            outputs += self.step()
            self._rest()
        return outputs

    def drain(self, timeout_s: float = 10.0) -> bool:
        """Step until the halves have nothing left to do; False when `timeout_s` came first."""
        deadline = time.monotonic() + timeout_s
        while self.has_pending_work():
            if time.monotonic() > deadline:
                return False
            self.step()
            self._rest()
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget the device's cached blocks (not the tiers'). False while any is referenced."""
        self._newly_full = []
        return self.kv.reset_prefix_cache()

    def close(self) -> None:
        """Abort everything and close both halves, copies first. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self.scheduler.names):
            self.abort(request_id)
        if self._worker_half is not None:
            self._worker_half.close()
        if self.scheduler.half is not None:
            self.scheduler.half.close()

    def _start_copies(self) -> None:
        half, worker = self.scheduler.half, self._worker_half
        if half is None or worker is None:
            return
        blocks = self.pool.blocks
        offered = [
            BlockRef(block_id, key)
            for block_id, key in self._newly_full
            if blocks[block_id].key == key  # else this step's schedule took it
        ]
        worker.start_step(half.build_step(offered))

    def _forward(self, scheduled: list[Scheduled]) -> torch.Tensor:
        """Logits, a row for each part."""
        parts = []
        for sequence, count, _ in scheduled:
            request = sequence.request
            start = request.num_computed_tokens
            parts.append(
                Part(
                    request.all_token_ids[start : start + count],
                    start,
                    self.kv.get_block_ids(request.request_id),
                )
            )
        wait_for_layer = None
        if self._worker_half is not None and any(part.ahead for part in scheduled):
            wait_for_layer = self._worker_half.wait_for_layer
        return self.runner.execute(parts, wait_for_layer)

    def _accept(
        self, rows: dict[Scheduled, int], logits: torch.Tensor, forward_ended_s: float
    ) -> list[RequestOutput]:
        """Take what stands of a step: `rows` of its logits, by part."""
        chosen = logits.argmax(dim=-1).tolist()
        self.tokens_ahead += sum(part.num_tokens for part in rows if part.ahead)
        row_of = {part.sequence.request_id: row for part, row in rows.items()}
        outputs = []
        for sequence in self.scheduler.computed(list(rows)):
            row = row_of[sequence.request_id]
            sequence.request.append_output([chosen[row]])
            if sequence.first_token is None:
                sequence.first_token = forward_ended_s
                sequence.first_logits = logits[row].clone() if sequence.keep_logits else None
            if sequence.finished:
                outputs.append(self._finish(sequence))
        return outputs

    def _finish(self, sequence: Sequence) -> RequestOutput:
        half = self.scheduler.half
        misses = None
        if isinstance(half, ExplainsMisses):
            misses = half.misses_by_reason(sequence.request_id)
        self.scheduler.finish(sequence)
        return sequence.output(misses)

    def _rest(self) -> None:
        if self.last_step_tokens == 0 and self.has_pending_work():
            time.sleep(IDLE_SLEEP_S)
