"""The scheduler half: what is held below, what to load, what ebbs, and the count of it all.

Lookups go out when a request arrives and are read when the scheduler asks; reserves go out in one
step and become copies in a later one. Nothing here waits: an answer that is not there yet is asked
for again next step, and after `lookup_timeout_s` it is a miss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbtide.allocator import pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.namespace_link import NamespaceLink
from ebbtide.connectors.offload.tally import RequestTally, Tally
from ebbtide.connectors.seam import LoadJob, LoadResult, StepMetadata, StoreJob
from ebbtide.connectors.supervisor import FaultLog, hook, nothing
from ebbtide.tiers.planner import Candidate, plan_demotions
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.allocator import BlockPool
    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.seam import BlockRef, WorkerReport

GROUP = 0  # one KV-cache group so far
LOADABLE = frozenset({Place.MEMORY, Place.DISK, Place.REMOTE})


@dataclass(frozen=True, slots=True)
class SchedulerBounds:
    """Named bounds of one scheduler half."""

    lookup_timeout_s: float = 0.05
    store_budget_bytes: int = 64 << 20  # demoted per step at most
    pinned_share: float = 0.25  # of the pool's blocks that copies may hold
    free_scan: int = 256  # blocks looked at from the head of the free queue


@dataclass(slots=True)
class _Asked:
    """What is known of one request."""

    block_hashes: tuple[bytes, ...]
    tally: RequestTally
    asked_at_s: float
    ticket: int = 0
    states: bytes | None = None
    counted: bool = False
    misses: dict[str, int] = field(default_factory=dict)


class OffloadScheduler:
    """Implements `ebbtide.connectors.seam.SchedulerHalf`. Scheduler thread only."""

    def __init__(
        self,
        client: Client,
        pool: BlockPool,
        *,
        descriptor: list[list[object]],
        block_size: int,
        record_bytes: int,
        bounds: SchedulerBounds | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self.faults = FaultLog()
        self._client = client
        self._pool = pool
        self._block_size = block_size
        self._record_bytes = record_bytes
        self._bounds = bounds or SchedulerBounds()
        self._now = now
        self._link = NamespaceLink(client, descriptor)
        self._requests: dict[str, _Asked] = {}
        self._lookups: dict[int, str] = {}  # ticket -> request
        self._backlog: list[Candidate] = []
        self._reserving: dict[int, list[Candidate]] = {}  # ticket -> pinned blocks
        self._storing: dict[int, Candidate] = {}  # sequence -> pinned block
        self._jobs: list[StoreJob] = []
        self._loads: dict[str, LoadJob] = {}  # under way in the worker
        self._new_loads: list[LoadJob] = []
        self._cancelled: list[str] = []
        self._failed_loads: list[LoadResult] = []
        self._settled: set[bytes] = set()  # hashes of device blocks that are held below
        self._pinned = 0
        self._closed = False
        pool.on_evict = self._evicted
        self._link.renew()

    # -- hooks ----------------------------------------------------------------------------------

    @hook(nothing)
    def on_new_request(
        self, request_id: str, block_hashes: Sequence[bytes], prompt_tokens: int
    ) -> None:
        tally = RequestTally(prompt_tokens, self._block_size)
        full = prompt_tokens // self._block_size
        asked = _Asked(tuple(block_hashes[:full]), tally, self._now())
        self._requests[request_id] = asked
        self._poll()
        self._ask(request_id, asked)

    def _no_match(self, request_id: str, local_tokens: int) -> int | None:
        return 0

    @hook(_no_match)
    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        asked = self._requests.get(request_id)
        if asked is None:
            return 0
        start = local_tokens // self._block_size
        if start >= self._loadable_blocks(asked):
            return 0
        self._poll()
        if not asked.ticket and asked.states is None:  # asked again after a preemption
            asked.asked_at_s = self._now()
            self._ask(request_id, asked)
        late = self._now() - asked.asked_at_s > self._bounds.lookup_timeout_s
        if asked.states is None:
            return 0 if late or not asked.ticket else None
        end = self._hit_end(asked, start)
        pending = end < len(asked.states) and asked.states[end] == Place.PENDING
        if pending and end < self._loadable_blocks(asked) and not late:
            asked.states = None  # somebody is putting it right now: ask again
            self._ask(request_id, asked)
            return None
        return (end - start) * self._block_size

    def _load_cannot_start(
        self,
        request_id: str,
        block_ids: Sequence[int],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """The engine waits for the load's end in any case: it gets one that failed."""
        blocks = external_tokens // self._block_size
        if blocks:
            failed = LoadResult(request_id, 0, (label(Miss.UNKNOWN),) * blocks)
            self._failed_loads.append(failed)

    @hook(_load_cannot_start)
    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[int],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        asked = self._requests[request_id]
        start = local_tokens // self._block_size
        end = start + external_tokens // self._block_size
        if not asked.counted:
            self._count(asked, start, end)
        if end > start:
            job = LoadJob(request_id, asked.block_hashes[start:end], tuple(block_ids[start:end]))
            self._loads[request_id] = job
            self._new_loads.append(job)
        elif not asked.counted:
            self.tally.add(asked.tally)
        asked.counted = True
        asked.states, asked.ticket = None, 0  # stale if the request comes back

    @hook(lambda self, newly_full: StepMetadata())
    def build_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        self._poll()
        self._backlog.extend(Candidate(block_id, name) for block_id, name in newly_full)
        self._plan()
        loads, self._new_loads = tuple(self._new_loads), []
        stores, self._jobs = tuple(self._jobs), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepMetadata(self._client.arena_generation, stores, loads, cancelled)

    @hook(lambda self, report: report.loads)
    def on_report(self, report: WorkerReport) -> list[LoadResult]:
        for sequence in report.stored:
            candidate = self._storing.pop(sequence, None)
            if candidate is not None:
                self.tally.demoted += 1
                self._settled.add(candidate.key)
                self._unpin(candidate)
        for sequence in report.dropped:
            candidate = self._storing.pop(sequence, None)
            if candidate is not None:
                self._unpin(candidate)
                self._backlog.append(candidate)
        self.tally.bytes_by_edge.update(report.bytes_by_edge)
        failed, self._failed_loads = self._failed_loads, []
        for result in report.loads:
            self._load_ended(result)
        return [*failed, *report.loads]

    @hook(nothing)
    def request_finished(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        asked = self._requests.pop(request_id, None)
        if asked is not None and asked.ticket:
            self._lookups.pop(asked.ticket, None)
        if request_id in self._loads:
            self._cancelled.append(request_id)
        if self._link.handle is not None and block_hashes:
            keys = tuple(pack_key(name, GROUP) for name in block_hashes)
            self._client.notify(wire.Touch(self._link.handle, keys))

    @hook(lambda self: False)
    def has_pending_work(self) -> bool:
        wanted = bool(self._backlog) and self._link.handle is not None
        return bool(wanted or self._reserving or self._storing or self._jobs or self._loads)

    @hook(nothing)
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.on_evict = None
        for candidates in self._reserving.values():
            for candidate in candidates:
                self._unpin(candidate)
        for candidate in self._storing.values():
            self._unpin(candidate)
        self._reserving.clear()
        self._storing.clear()
        self._client.close()

    # -- what others may ask --------------------------------------------------------------------

    def misses_by_reason(self, request_id: str) -> dict[str, int]:
        """The request's blocks that were computed, by reason. Before `request_finished`."""
        asked = self._requests.get(request_id)
        return dict(asked.tally.misses) if asked is not None else {}

    @property
    def ready(self) -> bool:
        """A store answers and knows the namespace. Polls."""
        self._poll()
        return self._link.handle is not None

    # -- lookups --------------------------------------------------------------------------------

    def _ask(self, request_id: str, asked: _Asked) -> None:
        if self._link.handle is None or not asked.block_hashes:
            return
        keys = tuple(pack_key(name, GROUP) for name in asked.block_hashes)
        asked.ticket = self._client.submit(wire.Lookup(self._link.handle, keys))
        self._lookups[asked.ticket] = request_id

    def _loadable_blocks(self, asked: _Asked) -> int:
        """The prompt's last token is always computed: its logits are needed."""
        return (asked.tally.prompt_tokens - 1) // self._block_size

    def _hit_end(self, asked: _Asked, start: int) -> int:
        """One past the last block of the unbroken run of held blocks from `start`."""
        assert asked.states is not None
        end, limit = start, min(self._loadable_blocks(asked), len(asked.states))
        while end < limit and asked.states[end] in LOADABLE:
            end += 1
        return end

    def _count(self, asked: _Asked, start: int, end: int) -> None:
        """Account for every prompt block but those that are being loaded."""
        tally, loadable = asked.tally, self._loadable_blocks(asked)
        tally.served("device", start)
        if end < loadable:
            tally.missed(self._reason(asked, end))
            tally.missed(label(Miss.BEHIND_MISS), loadable - end - 1)
        whole = tally.prompt_tokens % self._block_size == 0
        if start <= loadable:
            tally.missed(label(Miss.LAST_TOKEN if whole else Miss.PARTIAL_BLOCK))

    def _reason(self, asked: _Asked, number: int) -> str:
        if asked.states is None or asked.states[number] == Place.PENDING:
            return label(Miss.TIMEOUT if self._link.handle is not None else Miss.UNKNOWN)
        if asked.states[number] in LOADABLE:
            return label(Miss.UNKNOWN)  # the engine took fewer than it was offered
        return label(asked.states[number])

    def _load_ended(self, result: LoadResult) -> None:
        job = self._loads.pop(result.request_id, None)
        asked = self._requests.get(result.request_id)
        if job is None:
            return
        self._settled.update(job.block_hashes[: result.loaded_blocks])
        if asked is None:
            return
        for source in result.sources[: result.loaded_blocks]:
            asked.tally.served(source, 1)
        lost = len(result.sources) - result.loaded_blocks
        if lost:
            asked.tally.missed(result.sources[result.loaded_blocks])
            asked.tally.missed(label(Miss.BEHIND_MISS), lost - 1)
        self.tally.add(asked.tally)

    # -- demotion -------------------------------------------------------------------------------

    def _plan(self) -> None:
        if self._link.handle is None:
            return
        pin_max = max(1, int(len(self._pool.blocks) * self._bounds.pinned_share))
        room_bytes = (pin_max - self._pinned) * self._record_bytes
        plan = plan_demotions(
            [candidate for candidate in self._backlog if self._still_there(candidate)],
            self._next_to_go(),
            min(self._bounds.store_budget_bytes, max(0, room_bytes)),
            record_bytes=self._record_bytes,
            settled=self._settled | self._on_the_way(),
        )
        self._backlog = plan.deferred
        if not plan.demote:
            return
        for candidate in plan.demote:
            self._pin(candidate)
        keys = tuple(pack_key(candidate.key, GROUP) for candidate in plan.demote)
        reserve = wire.Reserve(self._link.handle, self._record_bytes, keys)
        self._reserving[self._client.submit(reserve)] = plan.demote

    def _next_to_go(self) -> list[Candidate]:
        head = self._pool.peek_free(self._bounds.free_scan)
        return [
            Candidate(block.block_id, block.block_hash)
            for block in head
            if block.block_hash is not None
        ]

    def _on_the_way(self) -> set[bytes]:
        keys = {candidate.key for candidate in self._storing.values()}
        for candidates in self._reserving.values():
            keys.update(candidate.key for candidate in candidates)
        return keys

    def _still_there(self, candidate: Candidate) -> bool:
        return self._pool.blocks[candidate.block_id].block_hash == candidate.key

    def _granted(self, ticket: int, message: wire.Message) -> None:
        candidates = self._reserving.pop(ticket)
        grants = message.grants if isinstance(message, wire.Grants) else ()
        for candidate, (offset, sequence) in zip(candidates, grants, strict=False):
            if sequence:
                self._storing[sequence] = candidate
                self._jobs.append(StoreJob(candidate.block_id, offset, sequence))
            else:
                self._settled.add(candidate.key)
                self._unpin(candidate)
        refused = candidates[len(grants) :]
        for candidate in refused:
            self._unpin(candidate)
        self._backlog = [*refused, *self._backlog]

    def _pin(self, candidate: Candidate) -> None:
        self._pinned += 1
        self._pool.touch([self._pool.blocks[candidate.block_id]])

    def _unpin(self, candidate: Candidate) -> None:
        self._pinned -= 1
        self._pool.free([self._pool.blocks[candidate.block_id]])

    @hook(nothing)
    def _evicted(self, block_id: int, block_hash: bytes) -> None:
        """The pool gives a block's content up. What had not ebbed by now is shed."""
        if block_hash in self._settled:
            if self._pool.get_cached_block(block_hash) is None:
                self._settled.discard(block_hash)
        else:
            self.tally.shed += 1

    # -- the store ------------------------------------------------------------------------------

    def _poll(self) -> None:
        for completion in self._client.poll():
            self._take(completion)
        if self._link.renew():
            self._forget_store()

    def _take(self, completion: Completion) -> None:
        if self._link.take(completion):
            return
        if completion.ticket in self._reserving:
            self._granted(completion.ticket, completion.message)
            return
        request_id = self._lookups.pop(completion.ticket, None)
        asked = self._requests.get(request_id) if request_id is not None else None
        if asked is not None and asked.ticket == completion.ticket:
            asked.ticket = 0
            if isinstance(completion.message, wire.States):
                asked.states = completion.message.codes
            else:
                asked.asked_at_s = 0.0  # the store is away: do not ask again for this request

    def _forget_store(self) -> None:
        """Another store answers: nothing is known to be held, and old slots mean nothing."""
        self._settled.clear()
        self._jobs.clear()
