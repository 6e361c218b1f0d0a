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
from ebbtide.connectors.seam import StoreJob
from ebbtide.tiers.planner import Candidate, plan_demotions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.offload.device_pool import DevicePool
    from ebbtide.connectors.offload.groups import KVGroups
    from ebbtide.connectors.offload.namespace_link import NamespaceLink
    from ebbtide.connectors.offload.tally import Tally
    from ebbtide.connectors.seam import BlockRef, WorkerReport

STORE_TRIES = 3  # per block and store; a block that failed so often stays on the device


@dataclass(frozen=True, slots=True)
class SchedulerBounds:
    """Named bounds of one scheduler half."""

    lookup_timeout_s: float = 0.05
    store_budget_bytes: int = 64 << 20  # demoted per step at most
    store_open_bytes: int = 256 << 20  # on their way at the same time
    reserve_timeout_s: float = 0.05  # unanswered, a reserve gives its pins back
    commit_timeout_s: float = 5.0  # unanswered, a commit counts as failed
    free_scan: int = 64  # blocks looked at from the head of the free queue
    lazy_scan: int = 512  # the same, where nothing else is looked at


@dataclass(slots=True)
class _Reserve:
    candidates: Sequence[Candidate]
    deadline_s: float
    pinned: bool


@dataclass(slots=True)
class _Granted:
    """A slot for a block; the ranks have not been told yet."""

    candidate: Candidate
    offset: int
    sequence: int
    reserve: _Reserve


@dataclass(slots=True)
class _Storing:
    """The ranks are copying."""

    candidate: Candidate
    waiting: int  # ranks that have not reported
    whole: bool = True
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class _Commit:
    filled: Sequence[tuple[int, Candidate]]  # sequence, content
    deadline_s: float


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
        self._writers = writers or {}
        self._bounds = bounds
        self._lazy = lazy
        self._now = now
        self._backlog: dict[bytes, int] = {}  # key -> block, offered and not dealt with yet
        self._reserving: dict[int, _Reserve] = {}  # by ticket
        self._overdue: set[int] = set()  # tickets of reserves that were given up
        self._granted: list[_Granted] = []
        self._storing: dict[int, _Storing] = {}  # by sequence
        self._stale: dict[int, _Storing] = {}  # the same, of a store that has gone
        self._committing: dict[int, _Commit] = {}  # by ticket
        self._unused: list[int] = []  # slots to give back to a store that is away
        self._under_way: set[bytes] = set()  # keys of all of these but the backlog
        self._open_bytes = 0  # of the same
        self._held: dict[bytes, int] = {}  # keys held below -> block that had that content
        self._failures: Counter[bytes] = Counter()
        self._generation = client.arena_generation

    @property
    def pending(self) -> bool:
        """Something is under way, or would be in the next step."""
        wanted = bool(self._backlog) and self._link.handle is not None and not self._overdue
        return bool(wanted or self._under_way or self._stale)

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
        if handle is None or self._stale or self._overdue:
            # Sequences of two stores must not mix; a store that is stuck gets no more work. What
            # nears its eviction is looked at again by then.
            self._backlog.clear()
            return
        self._abort()
        if not self._lazy:
            self._offer(newly_full)
        scan = self._bounds.lazy_scan if self._lazy else self._bounds.free_scan
        demote = plan_demotions(
            self._offered(),
            (Candidate(*ref) for ref in self._pool.next_to_go(scan)),
            min(self._bounds.store_budget_bytes, self._bounds.store_open_bytes - self._open_bytes),
            record_bytes=self._record_bytes,
            settled=self._settled,
        )
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
            candidate = one.candidate
            if self._still_there(candidate):
                group = self._groups.of_key(candidate.key).number
                jobs.append(StoreJob(candidate.block_id, one.offset, one.sequence, group))
                self._storing[one.sequence] = _Storing(candidate, self._writers.get(group, 1))
            else:  # handed out between the pin's end and now
                unused.append(one.sequence)
                self._tally.shed += 1
                self._ended(candidate)
        self._unpin([one for one in granted if one.reserve.pinned])
        self._abort(unused)
        return tuple(jobs)

    def take_fence(self) -> bool:
        """Whether a block was handed out that is perhaps still being copied."""
        fence = False
        for store in (*self._storing.values(), *self._stale.values()):
            if not store.fenced and not self._still_there(store.candidate):
                store.fenced = fence = True
        return fence

    def take(self, completion: Completion) -> bool:
        """Whether the completion was ours."""
        message, ticket = completion.message, completion.ticket
        reserve = self._reserving.pop(ticket, None)
        if reserve is not None:
            self._take_grants(reserve, message)
            return True
        commit = self._committing.pop(ticket, None)
        if commit is not None:
            codes = message.codes if isinstance(message, wire.Settled) else b""
            try:
                self._committed(commit, codes, lost=message == LOST)
            finally:  # whatever a fault left out
                for _, candidate in commit.filled:
                    self._ended(candidate)
            return True
        self._overdue.discard(ticket)
        if isinstance(message, wire.Grants):  # nobody waits for these slots any more
            self._abort([sequence for _, sequence in message.grants if sequence])
            return True
        return False

    def settle(self, report: WorkerReport) -> None:
        """What one rank finished. A slot that every rank has filled is committed."""
        filled, unused = self._land(report)
        for _, candidate in unused:
            self._failed(candidate)
        asked = False
        try:
            self._abort([sequence for sequence, _ in unused])
            if filled:
                ticket = self._client.submit(wire.Commit(tuple(sequence for sequence, _ in filled)))
                deadline_s = self._now() + self._bounds.commit_timeout_s
                self._committing[ticket] = _Commit(filled, deadline_s)
            asked = True
        finally:
            if not asked:  # a fault: nobody will hear of these again
                for _, candidate in filled:
                    self._ended(candidate)

    def let_go(self, report: WorkerReport) -> None:
        """Only forget what ended. Its slots stay reserved until the store or the engine ends."""
        for landed in self._land(report):
            for _, candidate in landed:
                self._ended(candidate)

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
                self._held.pop(key, None)

    def forget_held(self) -> None:
        """Nothing is known to be held below: another namespace, or a reset."""
        self._held.clear()
        self._failures.clear()

    def new_store(self) -> None:
        """Another store answers: nothing is known to be held, and old slots mean nothing."""
        if self._client.arena_generation == self._generation:
            return  # only the connection is new
        self._generation = self._client.arena_generation
        self.forget_held()
        self._overdue.clear()
        self._unused.clear()
        granted, self._granted = self._granted, []
        self._unpin([one for one in granted if one.reserve.pinned])
        for one in granted:  # no copy has begun
            self._ended(one.candidate)
        for store in self._storing.values():
            self._ended(store.candidate)
        self._stale.update(self._storing)
        self._storing.clear()

    def unpin_all(self) -> None:
        """Keep no block in place any more. What is handed out before its copy begins is shed."""
        self._unpin([one for one in self._granted if one.reserve.pinned])
        for one in self._granted:
            one.reserve.pinned = False
        for reserve in self._reserving.values():
            if reserve.pinned:
                reserve.pinned = False
                self._pool.unpin([candidate.block_id for candidate in reserve.candidates])

    def close(self) -> None:
        """Give every pin back."""
        self.unpin_all()
        self._reserving.clear()
        self._granted.clear()
        self._storing.clear()
        self._stale.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _offer(self, newly_full: Iterable[BlockRef]) -> None:
        """Add to the backlog. It never outgrows the pool: what has left the device is shed."""
        self._backlog.update((ref.key, ref.block_id) for ref in newly_full)
        if len(self._backlog) > self._pool.num_blocks:
            there = {k: b for k, b in self._backlog.items() if self._pool.content(b) == k}
            for key in self._backlog.keys() - there.keys():
                self._left(key)
            self._backlog = there

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
        deadline_s = self._now() + self._bounds.reserve_timeout_s
        self._reserving[ticket] = _Reserve(candidates, deadline_s, pin)
        self._under_way.update(keys)
        self._open_bytes += size * len(keys)
        if pin:
            self._pool.pin([candidate.block_id for candidate in candidates])

    def _expire(self) -> None:
        now = self._now()
        for ticket, reserve in list(self._reserving.items()):
            if now > reserve.deadline_s:
                del self._reserving[ticket]
                self._overdue.add(ticket)
                if reserve.pinned:
                    self._pool.unpin([one.block_id for one in reserve.candidates])
                self._give_back(reserve.candidates)
        for ticket, commit in list(self._committing.items()):
            if now > commit.deadline_s:
                del self._committing[ticket]
                self._committed(commit, b"", lost=False)

    def _take_grants(self, reserve: _Reserve, message: wire.Message) -> None:
        grants = message.grants if isinstance(message, wire.Grants) else ()
        not_pinned_any_more: list[Candidate] = []
        for candidate, (offset, sequence) in zip(reserve.candidates, grants, strict=False):
            if sequence:
                self._granted.append(_Granted(candidate, offset, sequence, reserve))
            else:
                self._held[candidate.key] = candidate.block_id
                self._ended(candidate)
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
        for candidate in candidates:
            self._ended(candidate)
            if self._still_there(candidate):
                back[candidate.key] = candidate.block_id
            else:
                self._left(candidate.key)
        self._backlog = {**back, **self._backlog}

    def _committed(self, commit: _Commit, codes: bytes, *, lost: bool) -> None:
        unused = []
        for number, (sequence, candidate) in enumerate(commit.filled):
            if number < len(codes) and codes[number] == 0:
                self._ended(candidate)
                self._tally.demoted += 1
                self._held[candidate.key] = candidate.block_id
                continue
            unused.append(sequence)
            if lost:
                self._ended(candidate)
            else:
                self._failed(candidate)
        self._prune()
        self._abort(unused)  # perhaps the store never heard of the commit

    def _failed(self, candidate: Candidate) -> None:
        self._ended(candidate)
        self._failures[candidate.key] += 1
        if not self._still_there(candidate) or self._failures[candidate.key] >= STORE_TRIES:
            self._tally.shed += 1
        elif not self._lazy:
            self._backlog[candidate.key] = candidate.block_id

    def _land(
        self, report: WorkerReport
    ) -> tuple[list[tuple[int, Candidate]], list[tuple[int, Candidate]]]:
        """Slots that no rank touches any more: filled by all, and not."""
        filled: list[tuple[int, Candidate]] = []
        unused: list[tuple[int, Candidate]] = []
        for whole, sequences in ((True, report.copied), (False, report.dropped)):
            while sequences:  # taken out: a fault later on must not count a rank twice
                sequence = sequences.pop(0)
                stale = sequence in self._stale
                home = self._stale if stale else self._storing
                store = home.get(sequence)
                if store is None:
                    continue
                store.waiting -= 1
                store.whole = store.whole and whole
                if store.waiting <= 0:
                    del home[sequence]
                    if not stale:
                        row = (sequence, store.candidate)
                        (filled if store.whole else unused).append(row)
        return filled, unused

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

    def _ended(self, candidate: Candidate) -> None:
        if candidate.key in self._under_way:
            self._under_way.discard(candidate.key)
            self._open_bytes -= self._record_bytes(candidate.key)

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

    def _abort(self, sequences: Sequence[int] = ()) -> None:
        """Give slots back; while the store cannot be reached, as soon as it can."""
        self._unused.extend(sequences)
        if self._unused and self._link.handle is not None:
            unused, self._unused = self._unused, []
            self._client.submit(wire.Abort(tuple(unused)))

    def _unpin(self, granted: Sequence[_Granted]) -> None:
        """A chain's tail first, so that the pool evicts it first."""
        if granted:
            self._pool.unpin([one.candidate.block_id for one in granted])
