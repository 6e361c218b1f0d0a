"""The worker half: copies between device blocks and the arena, beside the forward pass.

A load, step by step:

1. `start_step` sends the keys; the store verifies and grants batches of slots;
2. a granted batch becomes a copy job; its end acknowledges the batch, which frees its slots;
3. when every key is named and every copy has ended, the load is reported.

A load's deadline ends where a copy begins: a copy that has started always ends before the load is
reported. A batch that comes for a load that was given up is acknowledged without a copy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbtide.allocator import pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.demotions import GROUP
from ebbtide.connectors.offload.namespace_link import NamespaceLink
from ebbtide.connectors.seam import LoadResult, WorkerReport
from ebbtide.connectors.supervisor import FaultLog, hook, nothing
from ebbtide.tiers.reasons import Miss, label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.seam import LoadJob, StepMetadata, StoreJob
    from ebbtide.tiers.device import CopyEnd, DeviceCopies

LOAD_TIMEOUT_S = 10.0
STORE_TIMEOUT_S = 5.0  # from the end of a copy to the answer to its commit
CLOSE_TIMEOUT_S = 5.0
TO_MEMORY, TO_DEVICE = "device_to_memory", "memory_to_device"


@dataclass(slots=True)
class _Load:
    """One load under way."""

    job: LoadJob
    ticket: int
    deadline_s: float
    sources: list[str | None]  # per block: a tier or a reason; None = not named yet
    copying: dict[int, list[tuple[int, str]]] = field(default_factory=dict)  # by batch
    given_up: bool = False

    @property
    def over(self) -> bool:
        return not self.copying and None not in self.sources


@dataclass(frozen=True, slots=True)
class _Copied:
    """Records that are whole in the arena; their commit is to be sent, or answered."""

    sequences: tuple[int, ...]
    arena_generation: int
    deadline_s: float


class OffloadWorker:
    """Implements `ebbtide.connectors.seam.WorkerHalf`. Worker thread only."""

    def __init__(
        self,
        client: Client,
        copies: DeviceCopies,
        *,
        descriptor: list[list[object]],
        load_timeout_s: float = LOAD_TIMEOUT_S,
        store_timeout_s: float = STORE_TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults = FaultLog()
        self._client = client
        self._copies = copies
        self._record_bytes = copies.layout.record_bytes
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self._now = now
        self._link = NamespaceLink(client, descriptor)
        self._ends: deque[CopyEnd] = deque()  # polled, not dealt with yet
        self._completions: deque[Completion] = deque()  # the same
        self._loads: dict[int, _Load] = {}  # by ticket
        self._copied: deque[_Copied] = deque()  # commits to be sent
        self._commits: dict[int, _Copied] = {}  # by ticket
        self._notices: deque[wire.Message] = deque()  # acks and releases to be sent
        self._report = WorkerReport()
        self._edges: Counter[str] = Counter()
        self._closed = False
        self._link.renew()

    # -- hooks ----------------------------------------------------------------------------------

    def _step_failed(self, metadata: StepMetadata) -> None:
        """Nothing of the step will happen: say so, or the engine would wait for it."""
        begun = {load.job.request_id for load in self._loads.values()}
        for job in metadata.loads:
            if job.request_id not in begun:
                self._fail_load(job, Miss.UNKNOWN)
        self._report.dropped.extend(job.sequence for job in metadata.stores)

    @hook(_step_failed)
    def start_step(self, metadata: StepMetadata) -> None:
        self._poll()
        for request_id in metadata.cancelled:
            self._cancel(request_id)
        for job in metadata.loads:
            self._begin_load(job)
        # Last: once a copy has begun, its slots must not be reported as dropped.
        self._begin_stores(metadata.stores, metadata.arena_generation)

    def _take_report(self) -> WorkerReport:
        """Nothing is waited for beyond its time, whether or not the store can be reached."""
        self._expire()
        report, self._report = self._report, WorkerReport()
        report.bytes_by_edge = dict(self._edges)
        self._edges.clear()
        return report

    @hook(_take_report)
    def finish_step(self) -> WorkerReport:
        self._poll()
        return self._take_report()

    @hook(nothing)
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = self._now() + CLOSE_TIMEOUT_S
        for load in list(self._loads.values()):
            self._give_up(load, Miss.CANCELLED)
        try:
            # Copies under way must end, and their commits and acks go out, before the arena is
            # unmapped.
            while self._closing_waits_for() and self._now() < deadline:
                self._client.wait(0.002)
                self._poll()
        finally:
            self._copies.close()
            self._client.close()

    def _closing_waits_for(self) -> bool:
        return bool(self._copies.open_jobs or self._copied or self._commits or self._notices)

    @property
    def ready(self) -> bool:
        """A store answers, knows the namespace and gave its arena. Polls."""
        self._poll()
        return self._link.handle is not None and self._client.arena is not None

    # -- stores ---------------------------------------------------------------------------------

    def _begin_stores(self, jobs: Sequence[StoreJob], arena_generation: int) -> None:
        if not jobs:
            return
        sequences = tuple(job.sequence for job in jobs)
        arena = self._client.arena
        if arena is None or arena_generation != self._client.arena_generation:
            self._report.dropped.extend(sequences)  # slots of a store that is gone
            return
        self._copies.submit(
            (arena_generation, sequences),
            [job.block_id for job in jobs],
            [job.offset for job in jobs],
            to_device=False,
            arena=arena,
        )

    def _store_copied(
        self, arena_generation: int, sequences: tuple[int, ...], error: BaseException | None
    ) -> None:
        if error is not None:
            self._report.dropped.extend(sequences)
            return
        self._edges[TO_MEMORY] += len(sequences) * self._record_bytes
        deadline_s = self._now() + self._store_timeout_s
        self._copied.append(_Copied(sequences, arena_generation, deadline_s))

    def _commit(self, copied: _Copied) -> None:
        if copied.arena_generation != self._client.arena_generation:
            # Another store answers by now: there the same numbers mean other slots.
            self._report.dropped.extend(copied.sequences)
            return
        self._commits[self._client.submit(wire.Commit(copied.sequences))] = copied

    def _settled(self, sequences: tuple[int, ...], message: wire.Message) -> None:
        codes = message.codes if isinstance(message, wire.Settled) else b""
        for number, sequence in enumerate(sequences):
            done = number < len(codes) and codes[number] == 0
            (self._report.stored if done else self._report.dropped).append(sequence)

    # -- loads ----------------------------------------------------------------------------------

    def _begin_load(self, job: LoadJob) -> None:
        if self._link.handle is None or self._client.arena is None:
            self._fail_load(job, Miss.UNKNOWN)
            return
        keys = tuple(pack_key(name, GROUP) for name in job.block_hashes)
        ticket = self._client.submit(wire.LoadKeys(self._link.handle, keys))
        deadline = self._now() + self._load_timeout_s
        self._loads[ticket] = _Load(job, ticket, deadline, [None] * len(keys))

    def _fail_load(self, job: LoadJob, reason: Miss) -> None:
        sources = (label(reason),) * len(job.block_hashes)
        self._report.loads.append(LoadResult(job.request_id, 0, sources))

    def _load_answer(self, load: _Load, completion: Completion) -> None:
        message = completion.message
        if isinstance(message, wire.Batch):
            self._begin_copy(load, message)
        elif isinstance(message, wire.Failed):
            for position, reason in message.failures:
                self._name(load, position, label(reason))
        else:  # Done, or the store is away: what is not named by now will not come
            reason = Miss.IO_ERROR if isinstance(message, wire.Failure) else Miss.UNKNOWN
            for position in range(len(load.sources)):
                if not any(position == p for rows in load.copying.values() for p, _ in rows):
                    self._name(load, position, label(reason))
        self._maybe_report(load)

    def _begin_copy(self, load: _Load, message: wire.Batch) -> None:
        arena = self._client.arena
        if load.given_up or arena is None:
            self._notices.append(wire.Ack(load.ticket, message.batch))
            return
        rows = [(position, label(source)) for position, _, source, _ in message.granted]
        load.copying[message.batch] = rows
        started = False
        try:
            self._copies.submit(
                (load.ticket, message.batch),
                [load.job.block_ids[position] for position, _ in rows],
                [offset for _, _, _, offset in message.granted],
                to_device=True,
                arena=arena,
            )
            started = True
        finally:
            if not started:
                self._batch_ended(load, message.batch, loaded=False)

    def _load_copied(self, ticket: int, batch: int, error: BaseException | None) -> None:
        load = self._loads.get(ticket)
        if load is None or batch not in load.copying:
            return
        if error is None:
            self._edges[TO_DEVICE] += len(load.copying[batch]) * self._record_bytes
        self._batch_ended(load, batch, loaded=error is None)

    def _batch_ended(self, load: _Load, batch: int, *, loaded: bool) -> None:
        self._notices.append(wire.Ack(load.ticket, batch))
        for position, source in load.copying.pop(batch):
            self._name(load, position, source if loaded else label(Miss.IO_ERROR))
        self._maybe_report(load)

    @staticmethod
    def _name(load: _Load, position: int, source: str) -> None:
        if load.sources[position] is None:
            load.sources[position] = source

    def _maybe_report(self, load: _Load) -> None:
        if not load.over or load.ticket not in self._loads:
            return
        del self._loads[load.ticket]
        sources = tuple(source or label(Miss.UNKNOWN) for source in load.sources)
        loaded = 0
        while loaded < len(sources) and sources[loaded] in ("memory", "disk", "remote"):
            loaded += 1
        self._report.loads.append(LoadResult(load.job.request_id, loaded, sources))

    def _cancel(self, request_id: str) -> None:
        for load in list(self._loads.values()):
            if load.job.request_id == request_id:
                self._give_up(load, Miss.CANCELLED)

    def _expire(self) -> None:
        """End what has taken too long. Sends nothing, and cannot fail."""
        now = self._now()
        for load in list(self._loads.values()):
            if now > load.deadline_s and not load.given_up:
                self._give_up(load, Miss.TIMEOUT)
        while self._copied and now > self._copied[0].deadline_s:
            self._report.dropped.extend(self._copied.popleft().sequences)
        for ticket, copied in list(self._commits.items()):
            if now > copied.deadline_s:
                del self._commits[ticket]
                self._report.dropped.extend(copied.sequences)

    def _give_up(self, load: _Load, reason: Miss) -> None:
        """No new copies; those that have started end first."""
        load.given_up = True
        self._notices.append(wire.Release(load.ticket))
        copying = {position for rows in load.copying.values() for position, _ in rows}
        for position in range(len(load.sources)):
            if position not in copying:
                self._name(load, position, label(reason))
        self._maybe_report(load)

    # -- the store and the copies ---------------------------------------------------------------

    def _poll(self) -> None:
        self._ends.extend(self._copies.poll())
        while self._ends:
            self._copy_ended(self._ends[0])
            self._ends.popleft()
        self._take_all()  # what an earlier fault left here belongs to the arena of that time
        self._completions.extend(self._client.poll())
        self._take_all()
        self._link.renew()
        self._send()

    def _take_all(self) -> None:
        while self._completions:
            self._take(self._completions.popleft())

    def _send(self) -> None:
        while self._notices:
            self._client.notify(self._notices[0])
            self._notices.popleft()
        while self._copied:
            self._commit(self._copied[0])
            self._copied.popleft()

    def _copy_ended(self, end: CopyEnd) -> None:
        tag = end.tag
        assert isinstance(tag, tuple)
        if end.to_device:
            self._load_copied(tag[0], tag[1], end.error)
        else:
            self._store_copied(tag[0], tag[1], end.error)

    def _take(self, completion: Completion) -> None:
        if self._link.take(completion):
            return
        load = self._loads.get(completion.ticket)
        if load is not None:
            self._load_answer(load, completion)
            return
        copied = self._commits.get(completion.ticket)
        if copied is not None:
            self._settled(copied.sequences, completion.message)
            del self._commits[completion.ticket]
        elif isinstance(completion.message, wire.Batch):  # of a load that was reported as given up
            self._notices.append(wire.Ack(completion.ticket, completion.message.batch))
