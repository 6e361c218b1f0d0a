"""What ebbs: device blocks on their way down, and the pins that keep them in place meanwhile.

A block is reserved for in one step, copied by the worker half in a later one, and let go when the
worker reports. Every pin ends, whatever happens to the store: a reserve that is not answered in
time is given up, and the slots that a late answer brings go straight back.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.allocator import pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.seam import StoreJob
from ebbtide.tiers.planner import Candidate, plan_demotions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ebbtide.allocator import BlockPool
    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.offload.namespace_link import NamespaceLink
    from ebbtide.connectors.offload.tally import Tally
    from ebbtide.connectors.seam import BlockRef, WorkerReport

GROUP = 0  # one KV-cache group so far
STORE_TRIES = 3  # per block and store; a block that failed so often stays on the device


@dataclass(frozen=True, slots=True)
class SchedulerBounds:
    """Named bounds of one scheduler half."""

    lookup_timeout_s: float = 0.05
    store_budget_bytes: int = 64 << 20  # demoted per step at most
    store_timeout_s: float = 5.0  # unanswered, a reserve gives its pins back
    pinned_share: float = 0.25  # of the pool's blocks that copies may hold
    free_scan: int = 256  # blocks looked at from the head of the free queue


@dataclass(frozen=True, slots=True)
class _Reserve:
    candidates: Sequence[Candidate]
    deadline_s: float


class Demotions:
    """The scheduler half's part that ebbs. Scheduler thread only; never waits."""

    def __init__(
        self,
        client: Client,
        pool: BlockPool,
        link: NamespaceLink,
        tally: Tally,
        *,
        record_bytes: int,
        bounds: SchedulerBounds,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._pool = pool
        self._link = link
        self._tally = tally
        self._record_bytes = record_bytes
        self._bounds = bounds
        self._now = now
        self._backlog: list[Candidate] = []
        self._reserving: dict[int, _Reserve] = {}  # ticket -> pinned blocks
        self._overdue: set[int] = set()  # tickets of reserves that were given up
        self._storing: dict[int, Candidate] = {}  # sequence -> pinned block
        self._stale: dict[int, Candidate] = {}  # the same, of a store that has gone
        self._jobs: list[StoreJob] = []
        self._held: set[bytes] = set()  # hashes of device blocks that are held below
        self._failures: Counter[bytes] = Counter()
        self._generation = client.arena_generation
        self._pinned = 0

    @property
    def pending(self) -> bool:
        """Something is under way, or would be in the next step."""
        wanted = bool(self._backlog) and self._link.handle is not None and not self._overdue
        return bool(wanted or self._reserving or self._storing or self._stale or self._jobs)

    def plan(self, newly_full: Sequence[BlockRef]) -> None:
        """Choose what ebbs next and ask for slots."""
        self._expire()
        offered = [Candidate(block_id, block_hash) for block_id, block_hash in newly_full]
        wanted = dict.fromkeys([*self._backlog, *offered])
        self._backlog = [one for one in wanted if self._still_there(one)]
        handle = self._link.handle
        if handle is None or self._stale or self._overdue:
            return  # sequences of two stores must not mix; a store that is stuck gets no more work
        free_head = self._next_to_go()
        pin_max = max(1, int(len(self._pool.blocks) * self._bounds.pinned_share))
        room_bytes = max(0, pin_max - self._pinned) * self._record_bytes
        plan = plan_demotions(
            self._backlog,
            free_head,
            min(self._bounds.store_budget_bytes, room_bytes, wire.KEYS_MAX * self._record_bytes),
            record_bytes=self._record_bytes,
            settled=self._settled((*self._backlog, *free_head)),
        )
        if plan.demote:
            keys = tuple(pack_key(candidate.key, GROUP) for candidate in plan.demote)
            ticket = self._client.submit(wire.Reserve(handle, self._record_bytes, keys))
            deadline_s = self._now() + self._bounds.store_timeout_s
            self._reserving[ticket] = _Reserve(plan.demote, deadline_s)
            for candidate in plan.demote:
                self._pin(candidate)
        self._backlog = plan.deferred

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """The copies that the worker half shall start now."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take(self, completion: Completion) -> bool:
        """Whether the completion was ours."""
        message, ticket = completion.message, completion.ticket
        reserve = self._reserving.pop(ticket, None)
        if reserve is not None:
            self._granted(reserve.candidates, message)
            return True
        self._overdue.discard(ticket)
        if isinstance(message, wire.Grants):  # nobody waits for these slots any more
            self._abort([sequence for _, sequence in message.grants if sequence])
            return True
        return False

    def settle(self, report: WorkerReport) -> None:
        """What the worker half finished: pins end."""
        for _, candidate, gone in self._land(report.stored):
            if not gone:
                self._tally.demoted += 1
                self._held.add(candidate.key)
        unused = []
        for sequence, candidate, gone in self._land(report.dropped):
            self._backlog.append(candidate)
            if not gone:
                unused.append(sequence)
                self._failures[candidate.key] += 1
        # The worker has let go of these, and may not have reached the store that granted them.
        self._abort(unused)

    def let_go(self, report: WorkerReport) -> None:
        """Only end the pins."""
        self._land((*report.stored, *report.dropped))

    def restored(self, block_hashes: Iterable[bytes]) -> None:
        """Device blocks that were loaded: held below, never copied down again."""
        self._held.update(block_hashes)

    def missed(self, block_hashes: Iterable[bytes]) -> None:
        """The store says that it does not hold these (any more): they may ebb again."""
        self._held.difference_update(block_hashes)

    def evicted(self, block_hash: bytes) -> None:
        """The pool gives a block's content up. What had not ebbed by now is shed."""
        if self._pool.get_cached_block(block_hash) is not None:
            return  # another block has the same content
        self._failures.pop(block_hash, None)
        if block_hash in self._held:
            self._held.discard(block_hash)
        else:
            self._tally.shed += 1

    def new_store(self) -> None:
        """Another store answers: nothing is known to be held, and old slots mean nothing."""
        if self._client.arena_generation == self._generation:
            return  # only the connection is new
        self._generation = self._client.arena_generation
        self._held.clear()
        self._failures.clear()
        self._overdue.clear()
        self._land([job.sequence for job in self.take_jobs()])  # no copy has begun
        self._stale.update(self._storing)
        self._storing.clear()

    def close(self) -> None:
        """Give every pin back."""
        for reserve in self._reserving.values():
            self._let_go(reserve.candidates)
        self._let_go((*self._storing.values(), *self._stale.values()))
        self._reserving.clear()
        self._storing.clear()
        self._stale.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._now()
        late = [ticket for ticket, one in self._reserving.items() if now > one.deadline_s]
        for ticket in late:
            self._overdue.add(ticket)
            candidates = self._reserving.pop(ticket).candidates
            self._let_go(candidates)
            self._backlog = [*candidates, *self._backlog]

    def _settled(self, candidates: Iterable[Candidate]) -> set[bytes]:
        """Which of them need no copy: held below, on their way, or failed too often."""
        done = {candidate.key for candidate in self._storing.values()}
        for reserve in self._reserving.values():
            done.update(candidate.key for candidate in reserve.candidates)
        for _, key in candidates:
            if key in self._held or self._failures[key] >= STORE_TRIES:
                done.add(key)
        return done

    def _next_to_go(self) -> list[Candidate]:
        head = self._pool.peek_free(self._bounds.free_scan)
        return [
            Candidate(block.block_id, block.block_hash)
            for block in head
            if block.block_hash is not None
        ]

    def _still_there(self, candidate: Candidate) -> bool:
        return self._pool.blocks[candidate.block_id].block_hash == candidate.key

    def _granted(self, candidates: Sequence[Candidate], message: wire.Message) -> None:
        grants = message.grants if isinstance(message, wire.Grants) else ()
        for candidate, (offset, sequence) in zip(candidates, grants, strict=False):
            if sequence:
                self._storing[sequence] = candidate
                self._jobs.append(StoreJob(candidate.block_id, offset, sequence))
            else:
                self._held.add(candidate.key)
                self._let_go([candidate])
        refused = candidates[len(grants) :]
        if isinstance(message, wire.Failure) and message != LOST:
            self._failures.update(candidate.key for candidate in refused)
        self._let_go(refused)
        self._backlog = [*refused, *self._backlog]

    def _land(self, sequences: Iterable[int]) -> list[tuple[int, Candidate, bool]]:
        """Stores that have ended, with their blocks, whose pins end, and whether their store has
        gone.
        """
        landed = []
        for sequence in sequences:
            gone = sequence in self._stale
            candidate = (self._stale if gone else self._storing).pop(sequence, None)
            if candidate is not None:
                landed.append((sequence, candidate, gone))
        self._let_go([candidate for _, candidate, _ in landed])
        return landed

    def _abort(self, sequences: list[int]) -> None:
        if sequences:
            self._client.submit(wire.Abort(tuple(sequences)))

    def _pin(self, candidate: Candidate) -> None:
        self._pinned += 1
        self._pool.touch([self._pool.blocks[candidate.block_id]])

    def _let_go(self, candidates: Sequence[Candidate]) -> None:
        """Unpin, a chain's tail first, so that the pool evicts it first."""
        self._pinned -= len(candidates)
        self._pool.free([self._pool.blocks[one.block_id] for one in reversed(candidates)])
