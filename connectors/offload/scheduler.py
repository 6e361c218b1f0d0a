"""The scheduler half: what is held below, what to load, what ebbs, and the count of it all.

Lookups go out when a request arrives and are read when the scheduler asks; reserves go out in one
step and become copies in a later one. Nothing here waits: an answer that is not there yet is asked
for again next step, and after `lookup_timeout_s` it is a miss.

Blocks are counted in units of the longest prefix step that the engine knows: the block size, or
with several KV groups the smallest length at which all of them end a block.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.accounts import Accounts
from ebbtide.connectors.offload.asked import Asked, Offer
from ebbtide.connectors.offload.bounds import SchedulerBounds
from ebbtide.connectors.offload.demotions import Demotions
from ebbtide.connectors.offload.load import Load
from ebbtide.connectors.offload.namespace_link import NamespaceLink
from ebbtide.connectors.offload.tally import RequestTally, Tally
from ebbtide.connectors.seam import LoadJob, LoadResult, StepMetadata
from ebbtide.connectors.supervisor import FaultLog, hook, nothing
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.offload.device_pool import DevicePool
    from ebbtide.connectors.offload.groups import KVGroup, KVGroups
    from ebbtide.connectors.offload.load_or_compute import LoadOrCompute
    from ebbtide.connectors.seam import BlockRef, WorkerReport

__all__ = ["OffloadScheduler", "SchedulerBounds"]


class OffloadScheduler:
    """Implements `ebbtide.connectors.seam.SchedulerHalf`. Scheduler thread only."""

    def __init__(
        self,
        client: Client,
        pool: DevicePool,
        *,
        descriptor: list[list[object]],
        groups: KVGroups,
        ranks: int = 1,
        writers: Mapping[int, int] | None = None,
        shard_offsets: tuple[tuple[int, ...], ...] = (),
        bounds: SchedulerBounds | None = None,
        lazy: bool = False,
        pending: bool = False,
        chooser: LoadOrCompute | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks` worker halves report each step. `writers`: per group how many of them copy a
        block down. `shard_offsets`: see `StepMetadata`. `pending`: the descriptor is not final.
        Without a `chooser` every hit is loaded.
        """
        self.tally = Tally()
        self.faults = FaultLog()
        self._client = client
        self._groups = groups
        self._ranks = ranks
        self._shard_offsets = shard_offsets
        self._bounds = bounds or SchedulerBounds()
        self._chooser = chooser
        self._now = now
        self._link = NamespaceLink(client, descriptor, pending=pending)
        self._accounts = Accounts(self.tally, self._link)
        self._demotions = Demotions(
            client,
            pool,
            self._link,
            self.tally,
            groups,
            writers=writers,
            bounds=self._bounds,
            lazy=lazy,
            now=now,
        )
        self._completions: deque[Completion] = deque()  # polled, not dealt with yet
        self._requests: dict[str, Asked] = {}
        self._lookups: dict[int, str] = {}  # ticket -> request
        self._loads: dict[str, Load] = {}  # under way in the workers
        self._new_loads: list[LoadJob] = []
        self._cancelled: list[str] = []
        self._ended: list[LoadResult] = []  # on every rank; the engine has not been told
        self._void_loads = False
        self._silent = False  # an answer is late and none has come since: nobody waits any more
        self._closed = False
        self._link.renew()

    # -- hooks ----------------------------------------------------------------------------------

    @hook(nothing)
    def on_new_request(
        self, request_id: str, block_hashes: Sequence[bytes], prompt_tokens: int
    ) -> None:
        tally = RequestTally(prompt_tokens, self._groups.alignment)
        asked = Asked(self._groups, block_hashes, prompt_tokens, tally, self._now())
        self._requests[request_id] = asked
        self._poll()
        self._ask(request_id, asked)

    def _no_match(self, request_id: str, local_tokens: int, num_tokens: int = 0) -> int | None:
        return 0

    @hook(_no_match)
    def matched_tokens(self, request_id: str, local_tokens: int, num_tokens: int = 0) -> int | None:
        asked = self._requests.get(request_id)
        if asked is None:
            return 0
        if num_tokens > asked.prompt_tokens and asked.counted:
            asked.lengthen(num_tokens)
        if local_tokens >= asked.loadable_tokens(local_tokens) or asked.load_failed:
            return 0
        self._poll()
        if asked.states is None and not asked.ticket and not asked.lost:
            asked.asked_at_s = self._now()  # asked again after a preemption
            self._ask(request_id, asked)
        late = self._now() - asked.asked_at_s > self._bounds.lookup_timeout_s
        if asked.states is None:
            self._silent = self._silent or (bool(asked.ticket) and late)
            return None if asked.ticket and not self._silent else 0
        end = asked.hit_end(local_tokens)
        if asked.stop_code(end) == Place.PENDING and not late:
            asked.states = None  # somebody is putting it right now: ask again
            self._ask(request_id, asked)
            return None
        return self._offer(asked, local_tokens, end).end - local_tokens

    def _load_cannot_start(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """The engine waits for the load's end in any case: the ranks report one that failed."""
        if external_tokens and request_id not in self._loads:
            end = local_tokens + external_tokens
            places = self._groups.places(block_ids, local_tokens, end)
            job = LoadJob(request_id, (), tuple(block_id for _, _, block_id in places))
            self._loads[request_id] = self._load_of(job, places, local_tokens, end)
            self._new_loads.append(job)

    @hook(_load_cannot_start)
    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        asked = self._requests[request_id]
        end = local_tokens + external_tokens
        if not asked.counted:
            self._accounts.admitted(asked, local_tokens, end)
        if external_tokens:
            load = self._new_load(request_id, asked, block_ids, local_tokens, end)
            load.expected = asked.expected_tokens(local_tokens, end)
            load.choice = asked.offer.choice if asked.offer is not None else None
            load.started_s = self._now()
            self._loads[request_id] = load
            self._new_loads.append(load.job)
        elif not asked.counted:
            self._accounts.complete(asked)
        asked.counted = True
        asked.forget_answer()

    def _no_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        void = tuple(replace(job, keys=()) for job in self._new_loads)
        self._new_loads = []
        return StepMetadata(loads=void, settle_stores=True)

    @hook(_no_step)
    def build_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        self._poll()
        fence = self._demotions.take_fence()
        self._demotions.plan(newly_full, live=bool(self._requests))
        generation, stores = self._client.arena_generation, self._demotions.take_jobs()
        loads, self._new_loads = tuple(self._new_loads), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        void, self._void_loads = self._void_loads, False
        return StepMetadata(
            arena_generation=generation,
            namespace=self._link.handle,
            stores=stores,
            loads=loads,
            cancelled=cancelled,
            void_loads=void,
            settle_stores=fence,
            shard_offsets=self._shard_offsets if stores or loads else (),
        )

    def _only_ended(self, report: WorkerReport) -> list[LoadResult]:
        """Whatever went wrong: the engine waits for its loads, and the pool for its blocks."""
        self._demotions.let_go(report)
        while report.loads:
            result = report.loads.pop(0)
            load = self._loads.get(result.request_id)
            if load is not None:
                load.add(report.rank, (label(Miss.UNKNOWN),) * len(load.job.block_ids))
                if load.waiting <= 0:
                    del self._loads[result.request_id]
                    self._ended.append(load.result())
        return self._take_ended()

    @hook(_only_ended)
    def on_report(self, report: WorkerReport) -> list[LoadResult]:
        self._demotions.settle(report)
        self.tally.bytes_by_edge.update(report.bytes_by_edge)
        self.tally.worker_faults += report.faults
        if report.pinned is not None:
            self.tally.pinned[report.rank] = report.pinned
        for request_id in self._loads.keys() & set(report.arriving):
            self._loads[request_id].arriving.add(report.rank)
        while report.loads:  # each is taken out first: a fault must not count it twice
            result = report.loads.pop(0)
            load = self._loads.get(result.request_id)
            if load is None:
                continue
            load.add(report.rank, result.sources)
            if load.waiting <= 0:
                del self._loads[result.request_id]
                self._ended.append(load.result())
                self._load_ended(load)
        return self._take_ended()

    def _take_ended(self) -> list[LoadResult]:
        ended, self._ended = self._ended, []
        return ended

    @hook(lambda self, request_id: False)
    def arrives(self, request_id: str) -> bool:
        load = self._loads.get(request_id)
        return load is not None and len(load.arriving) == self._ranks and load.is_whole

    @hook(nothing)
    def request_finished(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        asked = self._requests.pop(request_id, None)
        if not self._requests:
            self._demotions.unpin_all()
        if asked is not None and asked.ticket:
            self._lookups.pop(asked.ticket, None)
        if request_id in self._loads:
            self._cancelled.append(request_id)
        if self._link.handle is None:
            return
        hashed = len(block_hashes) * self._groups.hash_block_size
        tokens = self._groups.askable_tokens(hashed)
        keys = [key for group in self._groups.all_keys(block_hashes, tokens) for key in group]
        if keys:
            self._client.notify(wire.Touch(self._link.handle, tuple(keys)))

    @hook(lambda self: False)
    def has_pending_work(self) -> bool:
        return bool(self._demotions.pending or self._loads)

    @hook(lambda self: False)
    def pins_blocks(self) -> bool:
        """Blocks come back within a moment: better to wait for them than to preempt."""
        return self._demotions.pins_blocks

    @hook(nothing)
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._demotions.close()
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

    @property
    def connected(self) -> bool:
        """A store knows the namespace, as far as is known. Does not poll."""
        return self._link.handle is not None

    @property
    def namespace(self) -> NamespaceLink:
        """The namespace, for who describes the content."""
        return self._link

    def expected_tokens(self, request_id: str) -> dict[str, int]:
        """Tokens of the request's load by the tier that should bring them. Until it ends."""
        load = self._loads.get(request_id)
        return dict(load.expected) if load is not None else {}

    def forget_loads(self) -> None:
        """After a reset: what is on its way is of the old life, and must not be used."""
        self._void_loads = True
        self._new_loads = [replace(job, keys=()) for job in self._new_loads]
        self._demotions.forget_held()

    def wants(self, key: bytes) -> bool:
        """Whether the block of this key is to be copied down, or is being copied."""
        return self._demotions.wants(key)

    def describe(self, descriptor: list[list[object]], *, pending: bool) -> None:
        """The content is known better, or another one: the namespace changes with the next poll."""
        self._link.describe(descriptor, pending=pending)
        self._demotions.forget_held()

    # -- lookups --------------------------------------------------------------------------------

    def _ask(self, request_id: str, asked: Asked) -> None:
        keys = asked.lookup_keys()
        if self._link.handle is None or not keys:
            return
        asked.ticket = self._client.submit(wire.Lookup(self._link.handle, keys))
        self._lookups[asked.ticket] = request_id

    def _offer(self, asked: Asked, start: int, hit_end: int) -> Offer:
        """How much of a hit to load. The same answer as long as the engine asks the same."""
        offer = asked.offer
        if offer is not None and (offer.start, offer.hit_end) == (start, hit_end):
            return offer
        end, choice = hit_end, None
        if self._chooser is not None and hit_end > start:
            unit = self._groups.alignment
            sources = asked.sources(start, hit_end)
            choice = self._chooser.choose(sources, self._groups.unit_bytes, unit, self._now())
            end = start + choice.load_blocks * unit
            if end < hit_end:  # a shorter prefix needs other windows
                end = asked.hit_end(start, end)
        asked.offer = Offer(start, hit_end, end, choice)
        return asked.offer

    # -- loads ----------------------------------------------------------------------------------

    def _new_load(
        self,
        request_id: str,
        asked: Asked,
        block_ids: Sequence[Sequence[int]],
        start: int,
        end: int,
    ) -> Load:
        """Every block between `start` and `end` that the engine has given a place."""
        places = self._groups.places(block_ids, start, end)
        looked_up = dict(zip(self._groups.all, asked.keys, strict=True))
        keys = tuple(looked_up[group][block] for group, block, _ in places)
        job = LoadJob(request_id, keys, tuple(block_id for _, _, block_id in places))
        return self._load_of(job, places, start, end)

    def _load_of(
        self, job: LoadJob, places: list[tuple[KVGroup, int, int]], start: int, end: int
    ) -> Load:
        unit = self._groups.alignment
        units = tuple((block * group.block_size - start) // unit for group, block, _ in places)
        num_units = (end - start) // unit
        return Load(job, units, num_units, self._ranks, self._groups.fails_whole)

    def _load_ended(self, load: Load) -> None:
        """On every rank. Told once to each who wants to know."""
        self._demotions.restored(load.restored())
        self._demotions.missed(load.missed())
        if self._chooser is not None:
            elapsed_s = self._now() - load.started_s
            choice = load.choice if load.is_whole else None
            self._chooser.observe_load(load.bytes_by_tier(self._groups), elapsed_s, choice)
        self._accounts.load_ended(load, self._requests.get(load.job.request_id))

    # -- the store ------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._take_all()  # what an earlier fault left here belongs to the store of that time
        self._completions.extend(self._client.poll())
        self._silent = self._silent and not self._completions
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
        if asked is None or asked.ticket != completion.ticket:
            return
        asked.ticket = 0
        if not isinstance(completion.message, wire.States):
            asked.lost = True
            return
        asked.answered(completion.message.codes)
        self._demotions.missed(asked.missing_keys())
