"""The worker half: copies between device blocks and the arena, beside the forward pass.

A load, step by step:

1. `start_step` sends the keys; the store verifies and grants batches of slots;
2. a granted batch becomes copy jobs, one a group; their end acknowledges the batch, which frees its
   slots;
3. when every key is named and every copy has ended, the load is reported.

A load's deadline ends where a copy begins: a copy that has started always ends before the load is
reported. A batch that comes for a load that was given up is acknowledged without a copy.

With copies that bring one layer after the other a load *arrives* from step 2 on, as soon as the
last key is named and nothing has failed: see `ebbtide.connectors.seam`.

With several ranks each has a worker half, which moves its own shard of every record.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.offload.groups import group_number
from ebbtide.connectors.offload.incoming import CopiedBatch, IncomingLoad
from ebbtide.connectors.seam import LoadResult, WorkerReport
from ebbtide.connectors.supervisor import FaultLog, hook, nothing
from ebbtide.tiers.reasons import Miss, label

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.seam import LoadJob, StepMetadata, StoreJob
    from ebbtide.tiers.device import CopyEnd, DeviceCopies

LOAD_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
STORE_COPY_BYTES = 16 << 20  # of one copy job: a load that comes meanwhile waits for no more
TO_MEMORY, TO_DEVICE = "device_to_memory", "memory_to_device"


class OffloadWorker:
    """Implements `ebbtide.connectors.seam.WorkerHalf`. Worker thread only."""

    def __init__(
        self,
        client: Client,
        copies: DeviceCopies,
        *,
        rank: int = 0,
        writes: Collection[int] | None = None,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`writes`: the groups whose blocks this rank copies down; all when not given.

        Where ranks hold replicas, one of them writes.
        """
        self.faults = FaultLog()
        self._client = client
        self._copies = copies
        self._rank = rank
        self._writes = frozenset(copies.layouts if writes is None else writes)
        self._load_timeout_s = load_timeout_s
        self._now = now
        self._ends: deque[CopyEnd] = deque()  # polled, not dealt with yet
        self._completions: deque[Completion] = deque()  # the same
        self._loads: dict[int, IncomingLoad] = {}  # by ticket
        self._storing: set[int] = set()  # sequences whose copy has begun: never to be dropped
        self._notices: deque[wire.Message] = deque()  # acks and releases to be sent
        self._report = WorkerReport(rank)
        self._edges: Counter[str] = Counter()
        self._closed = False

    # -- hooks ----------------------------------------------------------------------------------

    def _step_failed(self, metadata: StepMetadata) -> None:
        """Nothing of the step will happen: say so, or the engine would wait for it."""
        if metadata.settle_stores:
            self._copies.settle_stores()
        begun = {load.job.request_id for load in self._loads.values()}
        begun.update(result.request_id for result in self._report.loads)
        for job in metadata.loads:
            if job.request_id not in begun:
                self._fail_load(job, Miss.UNKNOWN)
        jobs = [job for job in metadata.stores if job.group in self._writes]
        self._drop([job for job in jobs if job.sequence not in self._storing])

    @hook(_step_failed)
    def start_step(self, metadata: StepMetadata) -> None:
        if metadata.settle_stores:
            self._copies.settle_stores()
        if metadata.void_loads:
            for load in self._loads.values():
                load.void = Miss.RESET
        self._poll()
        for request_id in metadata.cancelled:
            self._cancel(request_id)
        for job in metadata.loads:
            self._begin_load(job, metadata)
        self._begin_stores(metadata)

    def _take_report(self) -> WorkerReport:
        """Nothing is waited for beyond its time, whether or not the store can be reached."""
        self._expire()
        report, self._report = self._report, WorkerReport(self._rank)
        report.bytes_by_edge = dict(self._edges)
        report.pinned = self._copies.pinned
        self._edges.clear()
        return report

    def _spoil(self, group: int, layer: int) -> None:
        """The pass goes on without having waited: nothing that it read may count."""
        for load in self._loads.values():
            if load.arriving:
                load.void = load.void or Miss.UNKNOWN

    @hook(_spoil)
    def wait_for_layer(self, group: int, layer: int) -> None:
        for load in self._loads.values():
            if load.arriving:
                load.waited_for = True
                for number in load.copying:
                    self._copies.wait_for_layer((load.ticket, number), group, layer)

    @hook(_take_report)
    def finish_step(self) -> WorkerReport:
        for load in self._loads.values():
            if load.waited_for:  # its last layer is there: the end is a moment away
                for number in load.copying:
                    self._copies.wait_for_end((load.ticket, number))
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
            # Copies under way must end, and their acks go out, before the arena is unmapped.
            while (self._copies.open_jobs or self._notices) and self._now() < deadline:
                self._client.wait(0.002)
                self._poll()
        finally:
            self._copies.close()
            self._client.close()

    @property
    def ready(self) -> bool:
        """A store answers and gave its arena. Polls."""
        self._poll()
        return self._client.arena is not None

    # -- stores ---------------------------------------------------------------------------------

    def _begin_stores(self, metadata: StepMetadata) -> None:
        jobs = [job for job in metadata.stores if job.group in self._writes]
        arena, generation = self._client.arena, metadata.arena_generation
        if arena is None or generation != self._client.arena_generation:
            self._drop(jobs)  # slots of a store that is gone
            return
        shards = self._shards(metadata)
        for group in self._writes:
            mine = [job for job in jobs if job.group == group]
            step = max(1, STORE_COPY_BYTES // self._copies.layouts[group].record_bytes)
            for start in range(0, len(mine), step):
                part = mine[start : start + step]
                sequences = tuple(job.sequence for job in part)
                self._copies.submit(
                    (group, sequences),
                    group,
                    [job.block_id for job in part],
                    [job.offset + shards[group] for job in part],
                    to_device=False,
                    arena=arena,
                )
                self._storing.update(sequences)

    def _drop(self, jobs: Sequence[StoreJob]) -> None:
        self._report.dropped.extend(job.sequence for job in jobs)

    def _store_copied(
        self, group: int, sequences: tuple[int, ...], error: BaseException | None
    ) -> None:
        self._storing.difference_update(sequences)
        if error is not None:
            self._report.dropped.extend(sequences)
            return
        self._edges[TO_MEMORY] += len(sequences) * self._copies.layouts[group].record_bytes
        self._report.copied.extend(sequences)

    def _shards(self, metadata: StepMetadata) -> tuple[int, ...]:
        """Per group where this rank's shard begins in a record."""
        if metadata.shard_offsets:
            return metadata.shard_offsets[self._rank]
        return (0,) * (1 + max(self._copies.layouts))

    # -- loads ----------------------------------------------------------------------------------

    def _begin_load(self, job: LoadJob, metadata: StepMetadata) -> None:
        other_arena = metadata.arena_generation != self._client.arena_generation
        namespace = metadata.namespace
        if not job.keys or namespace is None or other_arena or self._client.arena is None:
            self._fail_load(job, Miss.UNKNOWN)
            return
        ticket = self._client.submit(wire.LoadKeys(namespace, job.keys))
        deadline = self._now() + self._load_timeout_s
        shards = self._shards(metadata)
        self._loads[ticket] = IncomingLoad(job, ticket, deadline, shards, [None] * len(job.keys))

    def _fail_load(self, job: LoadJob, reason: Miss) -> None:
        sources = (label(reason),) * len(job.block_ids)
        self._report.loads.append(LoadResult(job.request_id, 0, sources))

    def _load_answer(self, load: IncomingLoad, completion: Completion) -> None:
        message = completion.message
        if isinstance(message, wire.Batch):
            self._begin_copies(load, message)
        elif isinstance(message, wire.Failed):
            for position, reason in message.failures:
                load.name(position, label(reason))
        else:  # Done, or the store is away: what is not named by now will not come
            reason = Miss.IO_ERROR if isinstance(message, wire.Failure) else Miss.UNKNOWN
            load.name_rest(label(reason))
        self._maybe_report(load)

    def _begin_copies(self, load: IncomingLoad, message: wire.Batch) -> None:
        arena = self._client.arena
        if load.given_up or arena is None:
            self._notices.append(wire.Ack(load.ticket, message.batch))
            return
        rows = [(position, label(source)) for position, _, source, _ in message.granted]
        parts: dict[int, list[tuple[int, int]]] = {}  # group -> (block, offset)
        for position, _, _, offset in message.granted:
            group = group_number(load.job.keys[position])
            if group in self._copies.layouts:  # else the layers of that group are other ranks'
                row = (load.job.block_ids[position], offset + load.shards[group])
                parts.setdefault(group, []).append(row)
        load.copying[message.batch] = batch = CopiedBatch(rows, len(parts))
        submitted = 0
        try:
            for group, pairs in parts.items():
                self._copies.submit(
                    (load.ticket, message.batch),
                    group,
                    [block_id for block_id, _ in pairs],
                    [offset for _, offset in pairs],
                    to_device=True,
                    arena=arena,
                )
                submitted += 1
        finally:
            if submitted < len(parts) or not parts:
                batch.loaded = not parts
                batch.parts = submitted  # those that have begun end first
                self._maybe_end_batch(load, message.batch)

    def _load_copied(self, ticket: int, number: int, error: BaseException | None) -> None:
        load = self._loads.get(ticket)
        batch = load.copying.get(number) if load is not None else None
        if load is None or batch is None:
            return
        batch.parts -= 1
        batch.loaded = batch.loaded and error is None
        self._maybe_end_batch(load, number)

    def _maybe_end_batch(self, load: IncomingLoad, number: int) -> None:
        batch = load.copying[number]
        if batch.parts:
            return
        del load.copying[number]
        self._notices.append(wire.Ack(load.ticket, number))
        for position, source in batch.rows:
            load.name(position, source if batch.loaded else label(Miss.IO_ERROR))
            group = group_number(load.job.keys[position])
            if batch.loaded and group in self._copies.layouts:
                self._edges[TO_DEVICE] += self._copies.layouts[group].record_bytes
        self._maybe_report(load)

    def _maybe_report(self, load: IncomingLoad) -> None:
        if load.ticket not in self._loads:
            return
        if not load.over:
            if self._copies.by_layer and not load.arriving and load.all_on_its_way:
                load.arriving = True
                self._copies.interleave([(load.ticket, number) for number in load.copying])
                self._report.arriving.append(load.job.request_id)
            return
        del self._loads[load.ticket]
        self._report.loads.append(load.result())

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

    def _give_up(self, load: IncomingLoad, reason: Miss) -> None:
        """No new copies; those that have started end first."""
        load.given_up = True
        self._notices.append(wire.Release(load.ticket))
        load.name_rest(label(reason))
        self._maybe_report(load)

    # -- the store and the copies ---------------------------------------------------------------

    def _poll(self) -> None:
        self._poll_copies()
        self._take_all()  # what an earlier fault left here belongs to the arena of that time
        self._completions.extend(self._client.poll())
        self._take_all()
        self._poll_copies()  # what has come just now may have been copied already
        while self._notices:
            self._client.notify(self._notices[0])
            self._notices.popleft()

    def _poll_copies(self) -> None:
        self._ends.extend(self._copies.poll())
        while self._ends:
            self._copy_ended(self._ends[0])
            self._ends.popleft()

    def _take_all(self) -> None:
        while self._completions:
            self._take(self._completions.popleft())

    def _copy_ended(self, end: CopyEnd) -> None:
        tag = end.tag
        assert isinstance(tag, tuple)
        if end.to_device:
            self._load_copied(tag[0], tag[1], end.error)
        else:
            self._store_copied(tag[0], tag[1], end.error)

    def _take(self, completion: Completion) -> None:
        load = self._loads.get(completion.ticket)
        if load is not None:
            self._load_answer(load, completion)
        elif isinstance(completion.message, wire.Batch):  # of a load that was reported as given up
            self._notices.append(wire.Ack(completion.ticket, completion.message.batch))
