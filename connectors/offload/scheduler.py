"""The scheduler half: what is held below, what to load, what ebbs, and the count of it all.

Lookups go out when a request arrives and are read when the scheduler asks; reserves go out in one
step and become copies in a later one. Nothing here waits: an answer that is not there yet is asked
for again next step, and after `lookup_timeout_s` it is a miss.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.allocator import pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.demotions import GROUP, Demotions, SchedulerBounds
from ebbtide.connectors.offload.namespace_link import NamespaceLink
from ebbtide.connectors.offload.tally import RequestTally, Tally
from ebbtide.connectors.seam import LoadJob, LoadResult, StepMetadata
from ebbtide.connectors.supervisor import FaultLog, hook, nothing
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.allocator import BlockPool
    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.seam import BlockRef, WorkerReport

__all__ = ["GROUP", "OffloadScheduler", "SchedulerBounds"]

LOADABLE = frozenset({Place.MEMORY, Place.DISK, Place.REMOTE})
FIRST_REASON = min(Miss)  # codes below it are places
TIERS = frozenset(label(place) for place in LOADABLE)


@dataclass(slots=True)
class _Asked:
    """What is known of one request."""

    block_hashes: tuple[bytes, ...]
    tally: RequestTally
    asked_at_s: float
    ticket: int = 0  # of the lookup under way
    states: bytes | None = None
    lost: bool = False  # the lookup failed: not asked again before the next admission
    counted: bool = False  # admitted once: what was not loaded then is in the tally
    complete: bool = False  # what was loaded then, too, and all of it in the totals


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
        self._bounds = bounds or SchedulerBounds()
        self._now = now
        self._link = NamespaceLink(client, descriptor)
        self._demotions = Demotions(
            client,
            pool,
            self._link,
            self.tally,
            record_bytes=record_bytes,
            bounds=self._bounds,
            now=now,
        )
        self._completions: deque[Completion] = deque()  # polled, not dealt with yet
        self._requests: dict[str, _Asked] = {}
        self._lookups: dict[int, str] = {}  # ticket -> request
        self._loads: dict[str, LoadJob] = {}  # under way in the worker
        self._new_loads: list[LoadJob] = []
        self._cancelled: list[str] = []
        self._failed_loads: list[LoadResult] = []
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
        if asked.states is None and not asked.ticket and not asked.lost:
            asked.asked_at_s = self._now()  # asked again after a preemption
            self._ask(request_id, asked)
        late = self._now() - asked.asked_at_s > self._bounds.lookup_timeout_s
        if asked.states is None:
            return None if asked.ticket and not late else 0
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
        self._fail_load(request_id, external_tokens // self._block_size)

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
            self._complete(asked)
        asked.counted = True
        asked.states, asked.ticket, asked.lost = None, 0, False  # stale if the request comes back

    def _no_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        for job in self._new_loads:
            self._fail_load(job.request_id, len(job.block_ids))
        self._new_loads = []
        return StepMetadata()

    @hook(_no_step)
    def build_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        self._poll()
        self._demotions.plan(newly_full)
        generation, stores = self._client.arena_generation, self._demotions.take_jobs()
        loads, self._new_loads = tuple(self._new_loads), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepMetadata(generation, stores, loads, cancelled)

    def _ended_loads(self, report: WorkerReport) -> list[LoadResult]:
        failed, self._failed_loads = self._failed_loads, []
        for result in (*failed, *report.loads):
            self._loads.pop(result.request_id, None)
        return [*failed, *report.loads]

    def _only_ended(self, report: WorkerReport) -> list[LoadResult]:
        """Whatever went wrong: the engine waits for its loads, and the pool for its blocks."""
        self._demotions.let_go(report)
        return self._ended_loads(report)

    @hook(_only_ended)
    def on_report(self, report: WorkerReport) -> list[LoadResult]:
        self._demotions.settle(report)
        self.tally.bytes_by_edge.update(report.bytes_by_edge)
        for result in (*self._failed_loads, *report.loads):
            self._count_load(result)
        return self._ended_loads(report)

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
        return bool(self._demotions.pending or self._loads or self._failed_loads)

    @hook(nothing)
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.on_evict = None
        self._demotions.close()
        self._client.close()

    def _fail_load(self, request_id: str, blocks: int) -> None:
        """The engine waits for the load's end in any case: it gets one that failed."""
        if blocks:
            failed = LoadResult(request_id, 0, (label(Miss.UNKNOWN),) * blocks)
            self._failed_loads.append(failed)

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
            no_store = asked.lost or self._link.handle is None
            return label(Miss.UNKNOWN if no_store else Miss.TIMEOUT)
        if asked.states[number] in LOADABLE:
            return label(Miss.UNKNOWN)  # the engine took fewer than it was offered
        return label(asked.states[number])

    def _count_load(self, result: LoadResult) -> None:
        """A load has ended; those after a preemption are not counted again."""
        job = self._loads.get(result.request_id)
        asked = self._requests.get(result.request_id)
        if job is not None:
            self._demotions.restored(job.block_hashes[: result.loaded_blocks])
            named = zip(job.block_hashes, result.sources, strict=True)
            self._demotions.missed(name for name, source in named if source not in TIERS)
        if asked is None or asked.complete:
            return
        for source in result.sources[: result.loaded_blocks]:
            asked.tally.served(source, 1)
        lost = len(result.sources) - result.loaded_blocks
        if lost:
            asked.tally.missed(result.sources[result.loaded_blocks])
            asked.tally.missed(label(Miss.BEHIND_MISS), lost - 1)
        self._complete(asked)

    def _complete(self, asked: _Asked) -> None:
        asked.complete = True
        self.tally.add(asked.tally)

    @hook(nothing)
    def _evicted(self, block_id: int, block_hash: bytes) -> None:
        self._demotions.evicted(block_hash)

    # -- the store ------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._take_all()  # what an earlier fault left here belongs to the store of that time
        self._completions.extend(self._client.poll())
        self._take_all()
        if self._link.renew():
            self._demotions.new_store()

    def _take_all(self) -> None:
        while self._completions:
            self._take(self._completions.popleft())

    def _take(self, completion: Completion) -> None:
        if self._link.take(completion) or self._demotions.take(completion):
            return
        request_id = self._lookups.pop(completion.ticket, None)
        asked = self._requests.get(request_id) if request_id is not None else None
        if asked is not None and asked.ticket == completion.ticket:
            asked.ticket = 0
            if isinstance(completion.message, wire.States):
                asked.states = completion.message.codes
                named = zip(asked.block_hashes, asked.states, strict=False)
                self._demotions.missed(name for name, code in named if code >= FIRST_REASON)
            else:
                asked.lost = True
