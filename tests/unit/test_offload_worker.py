"""The worker half alone: a load is reported when no copy of it can still write, come what may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.scripted import RECORD_BYTES, ScriptedClient

from ebbtide.allocator import pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.offload.worker import OffloadWorker
from ebbtide.connectors.seam import LoadJob, LoadResult, StepMetadata, StoreJob
from ebbtide.tiers.device import CopyEnd, DeviceCopies
from ebbtide.tiers.reasons import Miss, Place

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from ebbtide.tiers.arena import Arena

M, D = Place.MEMORY, Place.DISK
JOB = LoadJob("r", tuple(pack_key(bytes([n]) * 32, 0) for n in range(4)), (10, 11, 12, 13))


class HandCopies:
    """Copies that end when the test says so."""

    def __init__(self, groups: Collection[int] = (0,)) -> None:
        self.layouts = {group: SimpleNamespace(record_bytes=RECORD_BYTES) for group in groups}
        self.jobs: list[tuple[Hashable, list[int], bool]] = []
        self.offsets: list[list[int]] = []  # of the same jobs
        self.ends: list[CopyEnd] = []
        self.open_jobs = 0
        self.pinned: bool | None = None
        self.by_layer = False
        self.waits: list[tuple[Hashable, ...]] = []
        self.interleaved: list[list[Hashable]] = []
        self.closed = False
        self.settled = 0
        self.refuse_from: int | None = None  # number of the job

    def submit(
        self,
        tag: Hashable,
        group: int,
        block_ids: list[int],
        offsets: list[int],
        *,
        to_device: bool,
        arena: object,
    ) -> None:
        assert group in self.layouts
        if self.refuse_from is not None and len(self.jobs) >= self.refuse_from:
            raise RuntimeError("injected: no copy can be started")
        self.jobs.append((tag, list(block_ids), to_device))
        self.offsets.append(list(offsets))
        self.open_jobs += 1

    def settle_stores(self) -> None:
        self.settled += 1

    def interleave(self, tags: Collection[Hashable]) -> None:
        self.interleaved.append(list(tags))

    def wait_for_layer(self, tag: Hashable, group: int, layer: int) -> None:
        self.waits.append((tag, group, layer))

    def wait_for_end(self, tag: Hashable) -> None:
        """It comes while it is waited for."""
        self.waits.append((tag,))
        while any(job[0] == tag for job in self.jobs):
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """The oldest copy ends."""
        self.offsets.pop(0)
        tag, _, to_device = self.jobs.pop(0)
        self.ends.append(CopyEnd(tag, to_device, error))

    def poll(self) -> list[CopyEnd]:
        ends, self.ends = self.ends, []
        self.open_jobs -= len(ends)
        return ends

    def close(self) -> bool:
        self.closed = True
        return True


class Bench:
    """A worker half with a store and copies that the test plays."""

    def __init__(self, groups: Collection[int] = (0,), *, rank: int = 0, **how: Any) -> None:
        self.client, self.copies, self.now = ScriptedClient(), HandCopies(groups), 100.0
        self.client.arena = cast("Arena", object())
        self.half = OffloadWorker(
            self.client,
            cast("DeviceCopies", self.copies),
            rank=rank,
            load_timeout_s=1.0,
            now=lambda: self.now,
            **how,
        )
        self.half.finish_step()

    def load(self, job: LoadJob = JOB, **how: Any) -> int:
        """Returns the load's ticket."""
        self.half.start_step(StepMetadata(1, 0, loads=(job,), **how))
        (ticket,) = (t for t, m in self.client.asked.items() if isinstance(m, wire.LoadKeys))
        return ticket

    def store(self, *sequences: int, generation: int = 1) -> None:
        jobs = tuple(StoreJob(number, number * RECORD_BYTES, number) for number in sequences)
        self.half.start_step(StepMetadata(generation, 0, stores=jobs))

    def say(self, ticket: int, message: wire.Message) -> None:
        final = not isinstance(message, (wire.Batch, wire.Failed))
        self.client.completions.append(Completion(ticket, message, final))

    def batch(self, ticket: int, number: int, positions: list[int], source: Place = M) -> None:
        rows = tuple((n, RECORD_BYTES, int(source), n * RECORD_BYTES) for n in positions)
        self.say(ticket, wire.Batch(number, rows))

    def report(self) -> list[LoadResult]:
        return self.half.finish_step().loads


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_load_is_reported_when_its_last_copy_has_ended(bench: Bench) -> None:
    ticket = bench.load()
    bench.batch(ticket, 0, [0, 1])
    bench.batch(ticket, 1, [2, 3], D)
    bench.say(ticket, wire.Done())
    assert bench.report() == []
    bench.copies.end()
    assert bench.report() == []
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 4, ("memory", "memory", "disk", "disk"))]
    assert bench.client.told == [wire.Ack(ticket, 0), wire.Ack(ticket, 1)]


def test_a_deadline_ends_where_a_copy_begins(bench: Bench) -> None:
    ticket = bench.load()
    bench.batch(ticket, 0, [0, 1])
    assert bench.report() == []
    bench.now += 2
    assert bench.report() == []
    bench.batch(ticket, 1, [2])  # too late: acknowledged without a copy
    assert bench.report() == []
    assert len(bench.copies.jobs) == 1
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 2, ("memory", "memory", "timeout", "timeout"))]
    bench.batch(ticket, 2, [3])  # later than that
    assert bench.report() == []
    assert bench.client.told == [
        wire.Release(ticket),
        wire.Ack(ticket, 1),
        wire.Ack(ticket, 0),
        wire.Ack(ticket, 2),
    ]


@pytest.mark.parametrize("ending", ["cancelled", "store away"])
def test_a_copy_under_way_outlives_whatever_ends_its_load(bench: Bench, ending: str) -> None:
    ticket = bench.load()
    bench.batch(ticket, 0, [0])
    bench.report()
    if ending == "cancelled":
        bench.half.start_step(StepMetadata(1, 0, cancelled=("r",)))
    else:
        bench.say(ticket, LOST)
    assert bench.report() == []
    bench.copies.end()
    (result,) = bench.report()
    assert result.loaded_blocks == 1
    assert set(result.sources[1:]) == {"cancelled" if ending == "cancelled" else "io_error"}


def test_blocks_behind_a_failed_one_do_not_count_as_loaded(bench: Bench) -> None:
    ticket = bench.load()
    bench.say(ticket, wire.Failed(((1, Miss.CORRUPT),)))
    bench.batch(ticket, 0, [0, 2, 3])
    bench.say(ticket, wire.Done())
    bench.report()
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 1, ("memory", "corrupt", "memory", "memory"))]


def test_a_copy_that_fails_brings_none_of_its_blocks(bench: Bench) -> None:
    ticket = bench.load()
    bench.batch(ticket, 0, [0, 1])
    bench.batch(ticket, 1, [2, 3])
    bench.say(ticket, wire.Done())
    bench.report()
    bench.copies.end(OSError("injected"))
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 0, ("io_error", "io_error", "memory", "memory"))]


@pytest.mark.parametrize(
    ("metadata", "arena"),
    [
        (StepMetadata(1, None, loads=(JOB,)), True),  # no namespace is open
        (StepMetadata(2, 0, loads=(JOB,)), True),  # planned for another store
        (StepMetadata(1, 0, loads=(JOB,)), False),
        (StepMetadata(1, 0, loads=(LoadJob("r", (), JOB.block_ids),)), True),  # cannot be
    ],
)
def test_without_a_store_a_load_fails_at_once(
    bench: Bench, metadata: StepMetadata, arena: bool
) -> None:
    if not arena:
        bench.client.arena = None
    bench.half.start_step(metadata)
    assert bench.report() == [LoadResult("r", 0, ("unknown",) * 4)]
    assert not bench.client.asked


def test_a_store_is_reported_when_its_copy_has_ended(bench: Bench) -> None:
    """The scheduler half commits: only there it is known what the other ranks did."""
    bench.store(1, 2)
    assert bench.half.finish_step().copied == []
    bench.copies.end()
    report = bench.half.finish_step()
    assert (report.copied, report.dropped) == ([1, 2], [])
    assert report.bytes_by_edge == {"device_to_memory": 2 * RECORD_BYTES}
    assert bench.half.finish_step().copied == []
    assert not bench.client.asked


@pytest.mark.parametrize("pinned", [None, True, False])
def test_p70_a_report_says_whether_copies_go_through_locked_memory(
    bench: Bench, pinned: bool | None
) -> None:
    bench.copies.pinned = pinned
    assert bench.half.finish_step().pinned is pinned


def test_a_copy_down_that_fails_is_dropped(bench: Bench) -> None:
    bench.store(1, 2)
    bench.copies.end(OSError("injected"))
    report = bench.half.finish_step()
    assert (report.copied, report.dropped) == ([], [1, 2])
    assert report.bytes_by_edge == {}


def test_a_copy_planned_for_a_store_that_has_gone_is_dropped(bench: Bench) -> None:
    """There the same numbers name other slots: garbage would get a valid digest."""
    bench.client.reach(arena_generation=2)
    bench.store(3, generation=1)
    assert bench.half.finish_step().dropped == [3]
    assert not bench.copies.jobs


def test_of_a_step_that_fails_only_copies_that_have_not_begun_are_dropped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is dropped is given to somebody else: a copy would still write to it."""
    monkeypatch.setattr("ebbtide.connectors.offload.worker.STORE_COPY_BYTES", 2 * RECORD_BYTES)
    bench.copies.refuse_from = 2
    bench.store(1, 2, 3, 4, 5)
    assert bench.half.faults.count == 1
    assert bench.half.finish_step().dropped == [5]
    bench.copies.end()
    bench.copies.end()
    report = bench.half.finish_step()
    assert (report.copied, report.dropped) == ([1, 2, 3, 4], [])


def test_of_a_step_that_fails_each_load_is_reported_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for several ranks would take the second report for another rank's."""
    void = LoadJob("void", (), (1, 2))
    submit = bench.client.submit

    def fails(message: wire.Message) -> int:
        if isinstance(message, wire.LoadKeys):
            raise RuntimeError("injected: cannot be sent")
        return submit(message)

    monkeypatch.setattr(bench.client, "submit", fails)
    bench.half.start_step(StepMetadata(1, 0, loads=(void, JOB)))
    assert [result.request_id for result in bench.report()] == ["void", "r"]


def test_stores_are_settled_before_anything_else_begins(bench: Bench) -> None:
    bench.half.start_step(StepMetadata(1, 0))
    assert bench.copies.settled == 0
    order: list[str] = []
    bench.copies.settle_stores = lambda: order.append("settle")  # type: ignore[method-assign]
    bench.client.submit = lambda message: order.append("load") or 1  # type: ignore[func-returns-value, method-assign]
    bench.half.start_step(StepMetadata(1, 0, loads=(JOB,), settle_stores=True))
    assert order == ["settle", "load"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_copies_its_own_shard_of_each_group(rank: int) -> None:
    bench = Bench((0, 1), rank=rank)
    shards = ((0, 100), (1000, 2100))
    keys = tuple(pack_key(bytes([n]) * 32, group) for n, group in ((1, 0), (2, 1), (3, 1)))
    ticket = bench.load(LoadJob("r", keys, (5, 6, 7)), shard_offsets=shards)
    bench.batch(ticket, 0, [0, 1, 2])
    assert bench.report() == []
    step = RECORD_BYTES
    expected = [
        ((ticket, 0), [5], [0 + shards[rank][0]]),
        ((ticket, 0), [6, 7], [step + shards[rank][1], 2 * step + shards[rank][1]]),
    ]
    found = [(tag, ids) for tag, ids, _ in bench.copies.jobs]
    assert found == [(tag, ids) for tag, ids, _ in expected]
    assert bench.copies.offsets == [offsets for _, _, offsets in expected]
    bench.copies.end()
    bench.say(ticket, wire.Done())
    assert bench.report() == []  # half of a batch is not a batch
    assert not bench.client.told
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 3, ("memory",) * 3)]
    assert bench.client.told == [wire.Ack(ticket, 0)]


def test_a_batch_of_which_one_group_fails_is_not_loaded() -> None:
    bench = Bench((0, 1))
    keys = tuple(pack_key(bytes([n]) * 32, n % 2) for n in range(4))
    ticket = bench.load(LoadJob("r", keys, (5, 6, 7, 8)))
    bench.batch(ticket, 0, [0, 1, 2, 3])
    bench.say(ticket, wire.Done())
    bench.report()
    bench.copies.end(OSError("injected"))
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 0, ("io_error",) * 4)]


def test_a_rank_without_a_groups_layers_has_nothing_to_bring_of_it() -> None:
    bench = Bench((1,), rank=1)
    keys = tuple(pack_key(bytes([n]) * 32, n % 2) for n in range(4))
    offsets = ((0, 0), (0, 64))
    ticket = bench.load(LoadJob("r", keys, (5, 6, 7, 8)), shard_offsets=offsets)
    bench.batch(ticket, 0, [0, 2])  # all of the other rank
    bench.batch(ticket, 1, [1, 3])
    bench.say(ticket, wire.Done())
    assert bench.report() == []
    bench.copies.end()
    assert bench.report() == [LoadResult("r", 4, ("memory",) * 4)]
    assert bench.client.told == [wire.Ack(ticket, 0), wire.Ack(ticket, 1)]


def test_a_rank_that_holds_a_replica_leaves_the_copy_down_to_another() -> None:
    bench = Bench((0, 1), rank=1, writes=(1,))
    jobs = (StoreJob(5, 0, 1, group=0), StoreJob(6, RECORD_BYTES, 2, group=1))
    bench.half.start_step(StepMetadata(1, 0, stores=jobs, shard_offsets=((0, 0), (8, 16))))
    assert bench.copies.jobs == [((1, (2,)), [6], False)]
    assert bench.copies.offsets == [[RECORD_BYTES + 16]]
    bench.copies.end()
    report = bench.half.finish_step()
    assert (report.rank, report.copied, report.dropped) == (1, [2], [])
    bench.half.start_step(StepMetadata(9, 0, stores=jobs))
    assert bench.half.finish_step().dropped == [2]  # the other was never its own


def test_closing_waits_for_copies_and_then_lets_go(bench: Bench) -> None:
    bench.store(1)
    polls = 0

    def wait(timeout_s: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            assert not bench.client.closed
            bench.copies.end()

    bench.client.wait = wait  # type: ignore[method-assign]
    bench.half.close()
    bench.half.close()
    assert polls == 3
    assert bench.copies.closed
    assert bench.client.closed


# -- layer by layer -------------------------------------------------------------------------------


@pytest.fixture
def layered(bench: Bench) -> Bench:
    bench.copies.by_layer = True
    return bench


def test_a_load_arrives_when_its_last_block_is_under_way(layered: Bench) -> None:
    ticket = layered.load()
    layered.batch(ticket, 0, [0, 1])
    assert layered.half.finish_step().arriving == []
    layered.batch(ticket, 1, [2, 3], D)
    assert layered.half.finish_step().arriving == ["r"]
    assert layered.copies.interleaved == [[(ticket, 0), (ticket, 1)]]
    assert layered.half.finish_step().arriving == []  # it was said
    layered.copies.end()
    layered.copies.end()
    assert layered.report() == [LoadResult("r", 4, ("memory", "memory", "disk", "disk"))]


def test_what_has_come_already_counts_as_under_way(layered: Bench) -> None:
    ticket = layered.load()
    layered.batch(ticket, 0, [0, 1])
    layered.report()
    layered.copies.end()
    layered.report()
    layered.batch(ticket, 1, [2, 3])
    assert layered.half.finish_step().arriving == ["r"]


def test_copies_that_come_whole_do_not_arrive(bench: Bench) -> None:
    ticket = bench.load()
    bench.batch(ticket, 0, [0, 1, 2, 3])
    assert bench.half.finish_step().arriving == []
    bench.half.wait_for_layer(0, 0)
    assert bench.copies.waits == []


@pytest.mark.parametrize("how", ["a block fails", "a copy failed", "given up", "reset", "refused"])
def test_a_load_that_cannot_be_whole_does_not_arrive(layered: Bench, how: str) -> None:
    ticket = layered.load()
    layered.batch(ticket, 0, [0, 1])
    layered.report()
    if how == "a block fails":
        layered.say(ticket, wire.Failed(((3, int(Miss.CORRUPT)),)))
        layered.batch(ticket, 1, [2])
    elif how == "a copy failed":
        layered.copies.end(OSError("injected"))
        layered.batch(ticket, 1, [2, 3])
    elif how == "given up":
        layered.half.start_step(StepMetadata(1, 0, cancelled=("r",)))
        layered.batch(ticket, 1, [2, 3])
    elif how == "reset":
        layered.half.start_step(StepMetadata(1, 0, void_loads=True))
        layered.batch(ticket, 1, [2, 3])
    else:
        layered.copies.refuse_from = 1
        layered.batch(ticket, 1, [2, 3])
    report = layered.half.finish_step()
    while not report.loads:
        assert report.arriving == []
        layered.copies.end()
        report = layered.half.finish_step()
    assert report.arriving == []
    assert report.loads[0].loaded_blocks < 4


def test_half_a_batch_that_is_copied_does_not_arrive() -> None:
    """The copies of one group have begun; those of the other could not."""
    bench = Bench((0, 1))
    bench.copies.by_layer = True
    bench.copies.refuse_from = 1
    keys = tuple(pack_key(bytes([n]) * 32, n % 2) for n in range(4))
    ticket = bench.load(LoadJob("r", keys, (10, 11, 12, 13)))
    bench.batch(ticket, 0, [0, 1, 2, 3])
    assert bench.half.finish_step().arriving == []
    bench.say(ticket, wire.Done())
    assert bench.half.finish_step().arriving == []
    bench.copies.end()
    report = bench.half.finish_step()
    assert (report.arriving, report.loads[0].loaded_blocks) == ([], 0)


def test_a_pass_waits_for_what_arrives_and_for_nothing_else(layered: Bench) -> None:
    ticket = layered.load()
    layered.batch(ticket, 0, [0, 1])
    layered.report()
    layered.half.wait_for_layer(0, 0)
    assert layered.copies.waits == []  # half of its blocks have no slot yet
    layered.batch(ticket, 1, [2, 3])
    assert layered.half.finish_step().arriving == ["r"]
    assert layered.copies.waits == []  # it was not used in that step
    for layer in range(2):
        layered.half.wait_for_layer(0, layer)
    tags = [(ticket, 0), (ticket, 1)]
    assert layered.copies.waits == [(tag, 0, layer) for layer in range(2) for tag in tags]
    assert layered.report() == [LoadResult("r", 4, ("memory",) * 4)]  # at once
    assert layered.copies.waits[4:] == [(tag,) for tag in tags]


@pytest.mark.parametrize("fault", [False, True])
def test_a_pass_that_could_not_wait_makes_the_load_a_failure(
    fault: bool, layered: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = layered.load()
    layered.batch(ticket, 0, [0, 1, 2, 3])
    assert layered.half.finish_step().arriving == ["r"]
    with monkeypatch.context() as patch:
        if fault:
            patch.setattr(layered.copies, "wait_for_layer", lambda *_: 1 / 0)
        layered.half.wait_for_layer(0, 0)
    layered.half.wait_for_layer(0, 1)
    (result,) = layered.report()
    assert result.sources == (("unknown",) if fault else ("memory",)) * 4
    assert layered.half.faults.count == fault
