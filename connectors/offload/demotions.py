"""What ebbs: device blocks on their way down, and what keeps them in place meanwhile.

A block's way, with the numbers of the steps at the earliest:

1. step N computes it; the engine offers it to step N+1 (or the pool is about to hand it out);
2. N+1: a slot is asked for; the block is pinned until the answer, so that it is not handed out;
3. N+2: the slot is granted; the ranks are told to copy, and the pin ends;
4. before each later step: if the pool no longer says that the block holds its key, it was handed
   out while it is perhaps still being read; the ranks wait for their copies before they write;
5. when every rank has copied, the slot is committed; when one has not, it is given back.

Nothing is held for longer than the store takes to answer, and nothing at all while no request
lives: whoever resets the device's prefix cache then finds every block free.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.offload.copies_down import CopiesDown, Slot
from ebbtide.tiers.planner import Candidate, plan_demotions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.offload.bounds import SchedulerBounds
    from ebbtide.connectors.offload.device_pool import DevicePool
    from ebbtide.connectors.offload.groups import KVGroups
    from ebbtide.connectors.offload.namespace_link import NamespaceLink
    from ebbtide.connectors.offload.tally import Tally
    from ebbtide.connectors.seam import BlockRef, StoreJob, WorkerReport

STORE_TRIES = 3  # per block and store; a block that failed so often stays on the device


@dataclass(slots=True)
class _Reserve:
    candidates: Sequence[Candidate]
    asked_at_s: float
    pinned: bool


@dataclass(slots=True)
class _Granted:
    """A slot for a block; the ranks have not been told yet."""

    slot: Slot
    offset: int
    reserve: _Reserve


class Demotions:
    """The scheduler half's part that ebbs. Scheduler thread only; never waits."""

    def __init__(
        self,
        client: Client,
        pool: DevicePool,
        link: NamespaceLink,
        tally: Tally,
        groups: KVGroups,
        *,
        writers: Mapping[int, int] | None = None,
        bounds: SchedulerBounds,
        lazy: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`writers`: per group how many ranks copy a shard of each block; one if not given."""
        self._client = client
        self._pool = pool
        self._link = link
        self._tally = tally
        self._groups = groups
        self._bounds = bounds
        self._lazy = lazy
        self._now = now
        self._backlog: dict[bytes, int] = {}  # key -> block, offered and not dealt with yet
        self._reserving: dict[int, _Reserve] = {}  # by ticket
        self._overdue: set[int] = set()  # tickets of reserves that were given up
        self._granted: list[_Granted] = []
        self._copies = CopiesDown(
            client,
            pool,
            link,
            groups,
            self,
            writers=writers or {},
            commit_timeout_s=bounds.commit_timeout_s,
            now=now,
        )
        self._under_way: set[bytes] = set()  # keys of all of these but the backlog
        self._open_bytes = 0  # of the same
        self._held: dict[bytes, int] = {}  # keys held below -> block that had that content
        self._failures: Counter[bytes] = Counter()
        self._looked_at: object = None  # mark of the free queue whose head needs no copy
        self._generation = client.arena_generation

    @property
    def pending(self) -> bool:
        """Something is under way, or would be in the next step."""
        wanted = bool(self._backlog) and self._link.handle is not None and not self._overdue
        return bool(wanted or self._under_way or self._copies.stale)

    @property
    def pins_blocks(self) -> bool:
        """Blocks are kept from being handed out, for a moment."""
        return any(one.pinned for one in self._reserving.values()) or any(
            one.reserve.pinned for one in self._granted
        )

    def plan(self, newly_full: Iterable[BlockRef], *, live: bool = True) -> None:
        """Choose what ebbs next and ask for slots. `live`: some request may be scheduled."""
        self._expire()
        if not live:
            self.unpin_all()
        handle = self._link.handle
        if handle is None:  # what nears its eviction is looked at again when a store answers
            self._backlog.clear()
            return
        self._copies.give_back()
        if not self._lazy:
            self._offer(newly_full)
        if self._copies.stale or self._overdue:
            # Sequences of two stores must not mix; a store that is stuck gets no more work.
            return
        demote = plan_demotions(
            self._offered(),
            self._next_to_go(),
            min(self._bounds.store_budget_bytes, self._bounds.store_open_bytes - self._open_bytes),
            record_bytes=self._record_bytes,
            settled=self._settled,
        )
        if demote:
            self._looked_at = None
        by_size: dict[int, list[Candidate]] = {}
        for candidate in demote:
            by_size.setdefault(self._groups.of_key(candidate.key).number, []).append(candidate)
        for group, candidates in by_size.items():
            for start in range(0, len(candidates), wire.KEYS_MAX):
                self._reserve(handle, group, candidates[start : start + wire.KEYS_MAX], pin=live)

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """The copies that the ranks shall start now. Their blocks hold what they held."""
        jobs, unused = [], []
        granted, self._granted = self._granted, []
        for one in granted:
            if self._still_there(one.slot.candidate):
                jobs.append(self._copies.begin(one.slot, one.offset))
            else:  # handed out between the pin's end and now
                unused.append(one.slot.sequence)
                self._tally.shed += 1
                self.ended(one.slot.candidate)
        self._unpin([one for one in granted if one.reserve.pinned])
        self._copies.give_back(unused)
        return tuple(jobs)

    def take_fence(self) -> bool:
        """Whether a block was handed out that is perhaps still being copied."""
        return self._copies.take_fence()

    def take(self, completion: Completion) -> bool:
        """Whether the completion was ours."""
        message, ticket = completion.message, completion.ticket
        reserve = self._reserving.pop(ticket, None)
        if reserve is not None:
            self._take_grants(reserve, message)
            return True
        if self._copies.take(completion):
            self._prune()
            return True
        self._overdue.discard(ticket)
        if isinstance(message, wire.Grants):  # nobody waits for these slots any more
            self._copies.give_back([sequence for _, sequence in message.grants if sequence])
            return True
        return False

    def settle(self, report: WorkerReport) -> None:
        """What one rank finished. A slot that every rank has filled is committed."""
        self._copies.settle(report)

    def let_go(self, report: WorkerReport) -> None:
        """Only forget what ended. Its slots stay reserved until the store or the engine ends."""
        self._copies.let_go(report)

    def stored(self, candidate: Candidate) -> None:
        """The record is committed: held below."""
        self.ended(candidate)
        self._tally.demoted += 1
        self._held[candidate.key] = candidate.block_id

    def failed(self, candidate: Candidate) -> None:
        """The copy or its commit failed: tried again, but not for ever."""
        self.ended(candidate)
        self._looked_at = None
        self._failures[candidate.key] += 1
        if not self._still_there(candidate) or self._failures[candidate.key] >= STORE_TRIES:
            self._tally.shed += 1
        elif not self._lazy:
            self._backlog[candidate.key] = candidate.block_id

    def ended(self, candidate: Candidate) -> None:
        """It is not under way any more."""
        if candidate.key in self._under_way:
            self._under_way.discard(candidate.key)
            self._open_bytes -= self._record_bytes(candidate.key)

    def wants(self, key: bytes) -> bool:
        """Whether the block of this key is to be copied, or is being copied."""
        return key in self._backlog or key in self._under_way

    def restored(self, refs: Iterable[BlockRef]) -> None:
        """Device blocks that were loaded: held below, never copied down again."""
        self._prune()  # before: the engine only caches these blocks now
        self._held.update((ref.key, ref.block_id) for ref in refs)

    def missed(self, keys: Iterable[bytes]) -> None:
        """The store says that it does not hold these (any more): they may ebb again."""
        if self._held:
            for key in keys:
                if self._held.pop(key, None) is not None:
                    self._looked_at = None

    def forget_held(self) -> None:
        """Nothing is known to be held below: another namespace, or a reset."""
        self._held.clear()
        self._failures.clear()
        self._looked_at = None

    def new_store(self) -> None:
        """Another store answers: nothing is known to be held, and old slots mean nothing."""
        if self._client.arena_generation == self._generation:
            return  # only the connection is new
        self._generation = self._client.arena_generation
        self.forget_held()
        self._overdue.clear()
        granted, self._granted = self._granted, []
        self._unpin([one for one in granted if one.reserve.pinned])
        for one in granted:  # no copy has begun
            self.ended(one.slot.candidate)
        self._copies.new_store()

    def unpin_all(self) -> None:
        """Keep no block in place any more. What is handed out before its copy begins is shed."""
        self._unpin([one for one in self._granted if one.reserve.pinned])
        for one in self._granted:
            one.reserve.pinned = False
        for reserve in self._reserving.values():
            self._let_loose(reserve)

    def close(self) -> None:
        """Give every pin back."""
        self.unpin_all()
        self._reserving.clear()
        self._granted.clear()
        self._copies.close()

    # -- inside ---------------------------------------------------------------------------------

    def _offer(self, newly_full: Iterable[BlockRef]) -> None:
        """Add to the backlog. It never outgrows the pool: what has left the device is shed."""
        self._backlog.update((ref.key, ref.block_id) for ref in newly_full)
        if len(self._backlog) > self._pool.num_blocks:
            there = {k: b for k, b in self._backlog.items() if self._pool.content(b) == k}
            for key in self._backlog.keys() - there.keys():
                self._left(key)
            self._backlog = there

    def _next_to_go(self) -> list[Candidate]:
        """The head of the free queue, unless it is the one that held nothing to do last time."""
        mark = self._pool.free_mark()
        if mark == self._looked_at:
            return []
        self._looked_at = mark
        scan = self._bounds.lazy_scan if self._lazy else self._bounds.free_scan
        return [Candidate(*ref) for ref in self._pool.next_to_go(scan)]

    def _offered(self) -> Iterator[Candidate]:
        """Take from the backlog, oldest first. What left the device before it ebbed is shed."""
        while self._backlog:
            key = next(iter(self._backlog))
            candidate = Candidate(self._backlog.pop(key), key)
            if self._still_there(candidate):
                yield candidate
            else:
                self._left(key)

    def _left(self, key: bytes) -> None:
        """An offered block left the device: shed, unless its content is below or given up."""
        if not (
            key in self._held or key in self._under_way or self._failures.get(key, 0) >= STORE_TRIES
        ):
            self._tally.shed += 1

    def _reserve(
        self, handle: int, group: int, candidates: Sequence[Candidate], *, pin: bool
    ) -> None:
        size = self._groups.of_key(candidates[0].key).record_bytes
        keys = tuple(candidate.key for candidate in candidates)
        ticket = self._client.submit(wire.Reserve(handle, size, keys))
        self._reserving[ticket] = _Reserve(candidates, self._now(), pin)
        self._under_way.update(keys)
        self._open_bytes += size * len(keys)
        if pin:
            self._pool.pin([candidate.block_id for candidate in candidates])

    def _expire(self) -> None:
        now = self._now()
        for ticket, reserve in list(self._reserving.items()):
            waited_s = now - reserve.asked_at_s
            if waited_s > self._bounds.pin_timeout_s:
                self._let_loose(reserve)
            if waited_s > self._bounds.reserve_timeout_s:
                del self._reserving[ticket]
                self._overdue.add(ticket)
                self._give_back(reserve.candidates)
        self._copies.expire()

    def _let_loose(self, reserve: _Reserve) -> None:
        """Its blocks may be handed out; what is still there when the slots come is copied."""
        if reserve.pinned:
            reserve.pinned = False
            self._pool.unpin([candidate.block_id for candidate in reserve.candidates])

    def _take_grants(self, reserve: _Reserve, message: wire.Message) -> None:
        grants = message.grants if isinstance(message, wire.Grants) else ()
        not_pinned_any_more: list[Candidate] = []
        for candidate, (offset, sequence) in zip(reserve.candidates, grants, strict=False):
            if sequence:
                self._granted.append(_Granted(Slot(sequence, candidate), offset, reserve))
            else:
                self._held[candidate.key] = candidate.block_id
                self.ended(candidate)
                not_pinned_any_more.append(candidate)
        refused = reserve.candidates[len(grants) :]
        if isinstance(message, wire.Failure) and message != LOST:
            self._failures.update(candidate.key for candidate in refused)
        if reserve.pinned:
            gone = [*not_pinned_any_more, *refused]
            self._pool.unpin([candidate.block_id for candidate in gone])
        self._give_back(refused)
        self._prune()

    def _give_back(self, candidates: Iterable[Candidate]) -> None:
        """To the backlog's front: they were the nearest to eviction."""
        back: dict[bytes, int] = {}
        self._looked_at = None
        for candidate in candidates:
            self.ended(candidate)
            if self._still_there(candidate):
                back[candidate.key] = candidate.block_id
            else:
                self._left(candidate.key)
        self._backlog = {**back, **self._backlog}

    def _settled(self, key: bytes) -> bool:
        """No copy is needed: held below, on its way, or failed too often."""
        if key in self._under_way or self._failures.get(key, 0) >= STORE_TRIES:
            return True
        block_id = self._held.get(key)
        if block_id is None:
            return False
        if self._pool.content(block_id) == key:
            return True
        del self._held[key]  # computed anew since: perhaps the store has evicted it meanwhile, too
        return False

    def _still_there(self, candidate: Candidate) -> bool:
        return self._pool.content(candidate.block_id) == candidate.key

    def _record_bytes(self, key: bytes) -> int:
        return self._groups.of_key(key).record_bytes

    def _prune(self) -> None:
        """Forget what the device has not got any more, now and then: both tables stay bounded."""
        for table in (self._held, self._failures):
            if len(table) > 2 * self._pool.num_blocks:
                break
        else:
            return
        self._held = {k: b for k, b in self._held.items() if self._pool.content(b) == k}
        self._failures.clear()

    def _unpin(self, granted: Sequence[_Granted]) -> None:
        """A chain's tail first, so that the pool evicts it first."""
        if granted:
            self._pool.unpin([one.slot.candidate.block_id for one in granted])
