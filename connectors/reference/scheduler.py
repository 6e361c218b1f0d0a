"""Which tokens run in the next step: continuous batching, chunked prefill, first come first served.

The order of calls to the block tables and to the scheduler half is vLLM's (V1 scheduler, 0.32):
running requests first, preempting the youngest when blocks run out; then waiting ones, local lookup
before the half is asked, nothing admitted in a step that preempted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ebbtide.allocator import KVCacheManager, Request
    from ebbtide.connectors.reference.sequence import Sequence
    from ebbtide.connectors.seam import LoadResult, SchedulerHalf


class Scheduled(NamedTuple):
    """`num_tokens` of a sequence run in this step, from its `num_computed_tokens` on.

    `ahead`: its load is still arriving. What the step makes of it counts if the load ends whole.
    """

    sequence: Sequence
    num_tokens: int
    ahead: bool = False


class Scheduler:
    """Queues of the engine. Belongs to one thread; never waits.

    A sequence is in exactly one place: `waiting`, `loading` (its blocks are being filled by the
    worker half) or `running`. `half` may be set while all three are empty.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_batched_tokens: int,
        max_running: int,
        half: SchedulerHalf | None = None,
    ) -> None:
        self.kv = kv
        self.half = half
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: dict[str, Sequence] = {}
        self.names: set[str] = set()  # of all sequences, and of aborted ones still being loaded
        self._aborted_loads: dict[str, Sequence] = {}

    @property
    def has_sequences(self) -> bool:
        """True until every sequence has finished and every load has been reported."""
        return bool(self.names)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; its keys go out to the half now."""
        self.names.add(sequence.request_id)
        self.waiting.append(sequence)
        if self.half is not None:
            request = sequence.request
            self.half.on_new_request(
                request.request_id, request.block_hashes, request.num_prompt_tokens
            )

    def schedule(self) -> list[Scheduled]:
        """Choose this step's tokens, decodes before prefill chunks, and give them blocks."""
        scheduled: list[Scheduled] = []
        budget = self.max_batched_tokens
        preempted = False
        for sequence in sorted(self.running, key=lambda one: one.remaining_tokens > 1):
            if budget == 0:
                break
            if sequence not in self.running:
                continue  # preempted by one in front of it
            count = min(sequence.remaining_tokens, budget)
            done = {part.sequence.request_id for part in scheduled}
            granted = self.kv.allocate_slots(sequence.request, count) is not None
            while not granted:
                # Never one that is in this step already: blocks it fills are cached as of now, and
                # would be served without ever being computed.
                victim = next(one for one in reversed(self.running) if one.request_id not in done)
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    break
                granted = self.kv.allocate_slots(sequence.request, count) is not None
            if granted:
                scheduled.append(Scheduled(sequence, count))
                budget -= count
        if not preempted:
            scheduled += (ahead := self._run_ahead(budget))
            scheduled += self._admit(budget - sum(part.num_tokens for part in ahead))
        return scheduled

    def computed(self, scheduled: list[Scheduled]) -> list[Sequence]:
        """Advance what ran. Returns the sequences that now get their next token."""
        ready = []
        for sequence, count, ahead in scheduled:
            sequence.request.num_computed_tokens += count
            if ahead:  # the load is whole: what it filled may now be found
                self.kv.cache_blocks(sequence.request, sequence.request.num_computed_tokens)
            if sequence.remaining_tokens == 0:
                ready.append(sequence)
        return ready

    def finish(self, sequence: Sequence) -> None:
        """Release a running sequence that has all its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        self._forget(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a sequence wherever it is; does nothing when there is none of that name.

        One that is being loaded keeps its blocks and its name until its load is reported: a copy
        may still write.
        """
        loading = self.loading.pop(request_id, None)
        if loading is not None:
            self._aborted_loads[request_id] = loading
            self._release(loading)
            return
        for queue in (self.waiting, self.running):
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    self._release(sequence)
                    self._forget(sequence)
                    return

    def loads_ended(self, results: list[LoadResult]) -> set[str]:
        """Let sequences run whose load has ended, well or not. Returns those where all came.

        The unbroken run of loaded blocks counts as computed and is cached from now on. Blocks
        behind it are the sequence's own and get computed in place. Where windows hide tokens, or
        groups are several, a load that failed in part is of no use: the sequence starts again.
        """
        whole = set()
        for result in results:
            aborted = self._aborted_loads.pop(result.request_id, None)
            if aborted is not None:
                self._forget(aborted)
            sequence = self.loading.pop(result.request_id, None)
            if sequence is None:
                continue
            request = sequence.request
            brought = self._brought_tokens(sequence, result)
            sequence.load_ended(result, brought)
            if not brought and not self._in_place:
                self._start_again(sequence)
                continue
            loaded = sequence.load_start_tokens + brought
            self.kv.cache_blocks(request, loaded)
            self._counts_as_computed(request, loaded)
            request.is_running = True
            self.running.append(sequence)
            if brought == sequence.load_tokens:
                whole.add(result.request_id)
        return whole

    def _run_ahead(self, budget: int) -> list[Scheduled]:
        """Run sequences whose load arrives layer by layer.

        They stay in `loading`: whether they run at all, and with what, is settled by the load's
        end, as if they had waited for it. Until then no block of theirs is cached, so that nobody
        else can take what may yet fail.
        """
        scheduled: list[Scheduled] = []
        for sequence in self.loading.values():
            assert self.half is not None
            if not budget or not self.half.arrives(sequence.request_id):
                continue
            request = sequence.request
            self._counts_as_computed(request, sequence.load_start_tokens + sequence.load_tokens)
            count = min(sequence.remaining_tokens, budget)
            if self.kv.allocate_slots(request, count, delay_cache_blocks=True) is not None:
                scheduled.append(Scheduled(sequence, count, ahead=True))
                budget -= count
        return scheduled

    def _admit(self, budget: int) -> list[Scheduled]:
        """Start waiting sequences, oldest first, until tokens, places or blocks run out."""
        scheduled: list[Scheduled] = []
        postponed: list[Sequence] = []
        while self.waiting and budget and len(self.running) + len(self.loading) < self.max_running:
            sequence = self.waiting.popleft()
            request = sequence.request
            hit = self.kv.get_computed_blocks(request)
            request.junction_tokens = hit.junction_tokens
            external = self._external_tokens(sequence, hit.num_tokens)
            if external is None:
                postponed.append(sequence)  # the answer is under way: younger ones may go ahead
                continue
            count = 0 if external else min(request.num_tokens - hit.num_tokens, budget)
            blocks = self.kv.allocate_slots(
                request,
                count,
                hit,
                num_external_computed_tokens=external,
                delay_cache_blocks=external > 0,
                full_sequence_must_fit=True,
                has_scheduled_reqs=bool(self.running or self.loading),
            )
            if blocks is None:
                postponed.append(sequence)
                break
            sequence.admitted(hit.num_tokens)
            if self.half is not None:
                tables = self.kv.get_block_ids(request.request_id)
                self.half.on_allocated(request.request_id, tables, hit.num_tokens, external)
            if external:
                sequence.load_start_tokens, sequence.load_tokens = hit.num_tokens, external
                self.loading[request.request_id] = sequence
                continue
            request.num_computed_tokens = hit.num_tokens
            request.is_running = True
            self.running.append(sequence)
            scheduled.append(Scheduled(sequence, count))
            budget -= count
        self.waiting.extendleft(reversed(postponed))
        return scheduled

    def _external_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        """Tokens the half would load behind the device hit; None while its answer is under way.

        Cut to the request's whole blocks, whatever the half says. If that is all of it, its last
        token is computed once more when the load has ended.
        """
        if self.half is None or not sequence.loads:
            return 0
        request = sequence.request
        matched = self.half.matched_tokens(request.request_id, local_tokens)
        if matched is None:
            return None
        loadable = request.num_tokens // request.hash_block_size * request.hash_block_size
        return min(matched, loadable - local_tokens)

    @property
    def _in_place(self) -> bool:
        """Whether every token of a table has a block, so that any of them can be computed."""
        return len(self.kv.groups) == 1 and self.kv.groups[0].sees_all

    def _brought_tokens(self, sequence: Sequence, result: LoadResult) -> int:
        if result.loaded_blocks == len(result.sources):
            return sequence.load_tokens
        return result.loaded_blocks * sequence.request.hash_block_size if self._in_place else 0

    @staticmethod
    def _counts_as_computed(request: Request, loaded_tokens: int) -> None:
        """All but the last token, which is computed in any case: its logits are needed."""
        request.num_computed_tokens = min(loaded_tokens, request.num_tokens - 1)

    def _start_again(self, sequence: Sequence) -> None:
        """Compute all that the device has not, without asking again for what failed just now."""
        self.kv.free(sequence.request)
        sequence.request.num_computed_tokens = 0
        sequence.loads = False
        self.waiting.appendleft(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks from a running sequence and put it at the head of the queue."""
        self.running.remove(sequence)
        request = sequence.request
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.is_running = False
        self.waiting.appendleft(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Give back a sequence's blocks and its name."""
        self.kv.free(sequence.request)
        self.names.discard(sequence.request_id)

    def _release(self, sequence: Sequence) -> None:
        """Tell the half that a sequence has ended."""
        request = sequence.request
        if self.half is not None:
            self.half.request_finished(request.request_id, request.block_hashes)
