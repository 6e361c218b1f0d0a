"""Several ranks: a record is whole, and a load has ended, when it is so on all of them."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.rank_rig import ONE_GROUP, TWO_GROUPS, RankRig
from tests.scripted import Bench

from ebbtide.allocator import Request, pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.seam import LoadResult, StoreJob, WorkerReport
from ebbtide.tiers.device import device_copies
from ebbtide.tiers.device_streams import StreamCopies
from ebbtide.tiers.reasons import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.tiers.device import CopyJob, DeviceCopies

    Kind = Callable[[Mapping[int, PagedLayout]], DeviceCopies]

pytestmark = pytest.mark.usefixtures("single_thread")

M = Place.MEMORY
KINDS = pytest.mark.parametrize(
    "kind", [device_copies, partial(StreamCopies, by_layer=True)], ids=["whole", "by layer"]
)
READMISSION_SEEDS = 100


# -- the scheduler half alone ---------------------------------------------------------------------


def storing(ranks: int, count: int) -> Bench:
    """The ranks have been told to copy `count` blocks; the sequences count from 1."""
    bench = Bench(ranks=ranks, writers={0: ranks})
    bench.step(bench.fill(count))
    bench.grant(1, count)
    assert len(bench.step().stores) == count
    return bench


def test_a_slot_is_committed_when_every_rank_has_copied() -> None:
    bench = storing(3, 2)
    bench.copied(1, 2, rank=0)
    bench.copied(2, rank=2)
    assert not bench.client.open(wire.Commit)
    bench.copied(1, 2, rank=1)
    assert bench.commit() == (2,)
    bench.copied(1, rank=2)
    assert bench.commit() == (1,)
    bench.step()
    assert bench.half.tally.demoted == 2
    assert not bench.half.has_pending_work()


@pytest.mark.parametrize("dropping", [0, 1, 2])
def test_one_rank_that_drops_a_slot_spoils_it_for_all(dropping: int) -> None:
    """It goes back when no rank writes to it any more, and the block is tried again."""
    bench = storing(3, 1)
    for rank in range(3):
        assert not bench.client.asked
        (bench.dropped if rank == dropping else bench.copied)(1, rank=rank)
    assert bench.client.open(wire.Abort) == [wire.Abort((1,))]
    assert not bench.client.open(wire.Commit)
    bench.step()
    assert len(bench.client.open(wire.Reserve)) == 1
    bench.grant(7, 1)
    assert [job.sequence for job in bench.step().stores] == [7]
    for rank in range(3):
        bench.copied(7, rank=rank)
    assert bench.commit() == (7,)
    bench.step()
    assert bench.half.tally.demoted == 1


def test_where_ranks_hold_replicas_one_copy_is_enough() -> None:
    bench = Bench(ranks=4, writers={0: 1})
    bench.step(bench.fill(1))
    bench.grant(1, 1)
    bench.step()
    bench.copied(1, rank=0)
    assert bench.commit() == (1,)


def test_a_fault_counts_no_rank_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slot would be committed that one rank has not written to."""
    bench = storing(2, 2)
    bench.copied(1, rank=0)
    with monkeypatch.context() as patch:
        patch.setattr(bench.client, "submit", lambda message: 1 / 0)
        bench.copied(1, 2, rank=1)
    assert bench.half.faults.count == 1
    assert not bench.client.asked
    bench.copied(2, rank=0)
    assert bench.commit() == (2,)
    bench.step()
    assert bench.half.tally.demoted == 1
    assert not bench.half.has_pending_work()


def loading(ranks: int, blocks: int) -> Bench:
    bench = Bench(ranks=ranks)
    bench.arrive("r", 16 * blocks + 1)
    bench.held([M] * blocks)
    assert bench.half.matched_tokens("r", 0) == 16 * blocks
    bench.half.on_allocated("r", [range(1, blocks + 2)], 0, 16 * blocks)
    assert len(bench.step().loads) == 1
    return bench


def ends(bench: Bench, rank: int, *sources: str) -> list[LoadResult]:
    loaded = sources.index("io_error") if "io_error" in sources else len(sources)
    return bench.half.on_report(WorkerReport(rank, loads=[LoadResult("r", loaded, sources)]))


def test_a_load_ends_with_its_slowest_rank_and_is_as_bad_as_its_worst() -> None:
    bench = loading(3, 4)
    assert ends(bench, 0, "memory", "memory", "disk", "memory") == []
    assert ends(bench, 1, "memory", "disk", "memory", "io_error") == []
    assert bench.half.has_pending_work()
    worst = ("memory", "disk", "disk", "io_error")
    assert ends(bench, 2, *["memory"] * 4) == [LoadResult("r", 3, worst)]
    assert not bench.half.has_pending_work()
    assert +bench.half.tally.tokens_by_source == {"memory": 16, "disk": 32, "computed": 17}
    assert ends(bench, 2, *["memory"] * 4) == []  # of no load that is known


def arriving(bench: Bench, rank: int, *names: str) -> bool:
    bench.half.on_report(WorkerReport(rank, arriving=list(names)))
    return bench.half.arrives("r")


def test_a_load_arrives_when_it_does_so_on_every_rank_or_has_ended_well() -> None:
    bench = loading(3, 4)
    assert not bench.half.arrives("r")
    assert not arriving(bench, 0, "r", "another")
    assert not arriving(bench, 0, "r")  # again
    assert ends(bench, 1, *["memory"] * 4) == []
    assert not bench.half.arrives("r")
    assert arriving(bench, 2, "r")
    assert len(ends(bench, 0, *["memory"] * 4)) + len(ends(bench, 2, *["memory"] * 4)) == 1
    assert not bench.half.arrives("r")  # it is over


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_failed_on_one_rank_arrives_on_none(failing: int) -> None:
    bench = loading(2, 2)
    for rank in range(2):
        if rank == failing:
            ends(bench, rank, "memory", "io_error")
        else:
            arriving(bench, rank, "r")
    assert not bench.half.arrives("r")
    (result,) = ends(bench, 1 - failing, "memory", "memory")
    assert result.loaded_blocks == 1


def test_a_fault_in_a_report_of_arrivals_lets_the_engine_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = loading(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(bench.half._demotions, "settle", lambda report: 1 / 0)
        assert not arriving(bench, 0, "r")
    assert bench.half.faults.count == 1
    assert len(ends(bench, 0, "memory", "memory")) == 1


@pytest.mark.parametrize("broken", ["settle", "count"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_while_a_rank_reports_loses_no_load_and_hides_no_failure(
    broken: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = loading(2, 2)
    owner, name = {
        "settle": (bench.half._demotions, "settle"),
        "count": (bench.half, "_load_ended"),
    }[broken]
    ended: list[LoadResult] = []
    for number in range(2):
        with monkeypatch.context() as patch:
            if number == rank or broken == "count":
                patch.setattr(owner, name, lambda *_: 1 / 0)
            ended += ends(bench, number, "memory", "memory" if number else "io_error")
        assert len(ended) == number
    (result,) = ended
    assert result.loaded_blocks == (1 if broken == "count" else 0)
    assert bench.half.faults.count == 1
    assert not bench.half.has_pending_work()


def test_a_fault_over_one_load_counts_no_rank_of_another_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would run while a rank still writes to its blocks."""
    bench = Bench(ranks=2)
    both = []
    for name, first in (("a", 1), ("b", 11)):
        bench.arrive(name, 33)
        bench.held([M, M])
        assert bench.half.matched_tokens(name, 0) == 32
        bench.half.on_allocated(name, [range(first, first + 3)], 0, 32)
        both.append(LoadResult(name, 2, ("memory", "memory")))
    assert len(bench.step().loads) == 2
    assert bench.half.on_report(WorkerReport(1, loads=[both[1]])) == []
    with monkeypatch.context() as patch:
        patch.setattr(bench.half, "_load_ended", lambda load: 1 / 0)
        assert bench.half.on_report(WorkerReport(0, loads=list(both))) == [both[1]]
    assert bench.half.faults.count == 1
    assert bench.half.on_report(WorkerReport(1, loads=[both[0]])) == [both[0]]


@pytest.mark.parametrize("seed", range(READMISSION_SEEDS))
def test_p24_a_readmitted_request_meets_its_own_late_transfers(seed: int) -> None:
    """Stores and loads are pending while it is preempted and comes back, three times."""
    draw = Random(seed)
    bench = Bench(blocks=129, ranks=2, writers={0: 2})
    late: list[WorkerReport] = []
    ended: list[str] = []
    committed: list[int] = []
    sequences = 0

    def plan(newly_full: Sequence[Any] = ()) -> None:
        """A step; everything that it starts ends on each rank at some time."""
        nonlocal sequences
        for reserve in bench.client.open(wire.Reserve):
            assert isinstance(reserve, wire.Reserve)
            bench.grant(sequences + 1, len(reserve.keys))
            sequences += len(reserve.keys)
        metadata = bench.step(newly_full)
        for rank in range(2):
            late.extend(_report_of(job, rank, draw) for job in metadata.stores)
            for load in metadata.loads:
                sources = ("memory",) * len(load.block_ids)
                result = LoadResult(load.request_id, len(sources), sources)
                late.append(WorkerReport(rank, loads=[result]))

    def deliver(report: WorkerReport) -> None:
        late.remove(report)
        ended.extend(result.request_id for result in bench.half.on_report(report))
        if bench.client.open(wire.Commit) and draw.random() < 0.5:
            committed.extend(bench.commit())

    names = bench.arrive("r", 65)
    others = bench.arrive("aborted", 65, seed=1)
    for _ in range(2):
        bench.held([M] * 4)
    assert bench.half.matched_tokens("aborted", 0) == 64
    bench.half.on_allocated("aborted", [range(60, 65)], 0, 64)
    plan(filled := bench.fill(3, seed=100))
    for round_ in range(3):
        if round_:
            assert bench.half.matched_tokens("r", 0) is None
            bench.held([M] * 4)
        assert bench.half.matched_tokens("r", 0) == 64
        bench.half.on_allocated("r", [range(70, 75)], 0, 64)
        plan()
        mine = [one for one in late if one.loads and one.loads[0].request_id == "r"]
        assert len(mine) == 2
        for report in mine:  # it runs when both ranks have said so
            deliver(report)
        new = bench.fill(3, seed=round_)
        plan(new)
        if late and draw.random() < 0.5:
            deliver(draw.choice(late))
        bench.finish(new)  # preempted; its stores are pending
    bench.half.request_finished("r", names)
    bench.half.request_finished("aborted", others)
    bench.finish(filled)
    for _ in range(8):
        plan()
    while late or bench.half.has_pending_work():
        if late:
            deliver(draw.choice(late))
        plan()
        while bench.client.open(wire.Commit):
            committed.extend(bench.commit())
    assert sorted(ended) == ["aborted", "r", "r", "r"]
    assert len(committed) == len(set(committed))
    assert bench.half.tally.demoted == len(committed)
    assert bench.half.tally.shed + bench.half.tally.demoted == 12
    assert bench.pinned == 0
    bench.pool.check_integrity()
    assert bench.half.faults.count == 0


def _report_of(job: StoreJob, rank: int, draw: Random) -> WorkerReport:
    if draw.random() < 0.1:
        return WorkerReport(rank, dropped=[job.sequence])
    return WorkerReport(rank, copied=[job.sequence])


# -- real tensors, a real store -------------------------------------------------------------------


def hashes(tokens: int) -> list[bytes]:
    return list(Request("hashes", list(range(tokens)), hash_block_size=16).block_hashes)


def admit(rig: RankRig, tables: Sequence[Sequence[int]], tokens: int) -> int | None:
    """A request of `tokens` full blocks and one token more, to be loaded into `tables`."""
    rig.scheduler.on_new_request("r", hashes(tokens + 1), tokens + 1)
    rig.runtime.run_ready()
    matched = rig.scheduler.matched_tokens("r", 0)
    assert matched
    rig.scheduler.on_allocated("r", tables, 0, matched)
    rig.step_until(lambda: rig.ended)
    return matched


@KINDS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_back_what_it_gave(ranks: int, kind: Kind) -> None:
    """Two groups, records and shards of different sizes, all shards of a block in one record."""
    with RankRig(ranks, TWO_GROUPS, copies=kind) as rig:
        names = hashes(128)
        full, windowed = rig.groups.all
        assert full.record_bytes != windowed.record_bytes
        keys = [*rig.groups.keys(full, names, 0, 8), *rig.groups.keys(windowed, names, 0, 4)]
        refs, written = rig.fill(keys, first_block=1)
        rig.step(refs)
        rig.settle()
        assert rig.scheduler.tally.demoted == 12
        lengths = [full.record_bytes] * 8 + [windowed.record_bytes] * 4
        assert rig.scheduler.tally.bytes_by_edge["device_to_memory"] == sum(lengths)
        assert rig.store.memory.reserved_bytes == 0
        tables = [range(31, 40), [0, 0, 51, 52, 53]]
        assert admit(rig, tables, 128) == 128
        (result,) = rig.ended
        assert (result.loaded_blocks, set(result.sources)) == (10, {"memory"})
        for number in range(8):
            assert rig.read(0, 31 + number) == written[number]
        for number in (2, 3):
            assert rig.read(1, 49 + number) == written[8 + number]
        for block_id in (50, 53):  # beside them
            assert all(set(record) == {0} for record in rig.read(1, block_id))
        rig.settle()
        assert rig.faults == 0


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO_GROUPS])
def test_a_copy_that_fails_on_one_rank_publishes_nothing(
    groups: Sequence[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RankRig(2, groups) as rig:
        keys = rig.groups.keys(rig.groups.all[0], hashes(64), 0, 4)
        refs, written = rig.fill(keys, first_block=1)
        copies = rig.workers[1]._copies
        move = copies._move
        failures = 1

        def fails(job: CopyJob) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EIO, "injected: the copy from the device")
            move(job)

        monkeypatch.setattr(copies, "_move", fails)
        rig.step(refs)
        rig.step_until(lambda: not failures)
        assert rig.scheduler.tally.demoted == 0
        rig.settle()  # tried again
        assert rig.scheduler.tally.demoted == 4
        assert rig.store.memory.reserved_bytes == 0
        if groups is ONE_GROUP:
            assert admit(rig, [range(31, 36)], 64) == 64
            assert [rig.read(0, 31 + number) for number in range(4)] == written
        assert rig.faults == 0


@KINDS
def test_p43_ranks_agree_on_what_the_worst_of_them_has(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 of 4 cannot bring the blocks from the sixth on, or their second layer."""
    failed_from, blocks = 5, 8
    with RankRig(4, copies=kind) as rig:
        refs, written = rig.fill(rig.groups.keys(rig.groups.all[0], hashes(128), 0, blocks), 1)
        rig.step(refs)
        rig.settle()
        record_bytes = rig.groups.all[0].record_bytes
        rig.store.bounds = replace(rig.store.bounds, job_bytes=record_bytes)  # a batch a record
        copies = rig.workers[2]._copies
        move = copies._move

        def fails(job: CopyJob) -> None:
            if job.to_device and job.layer != 0 and max(job.block_ids) >= 31 + failed_from:
                raise OSError(errno.EIO, "injected: the copy to the device")
            move(job)

        monkeypatch.setattr(copies, "_move", fails)
        assert admit(rig, [range(31, 31 + blocks + 1)], 16 * blocks) == 16 * blocks
        (result,) = rig.ended  # one answer for all
        assert result.loaded_blocks == failed_from
        assert result.sources == ("memory",) * failed_from + ("io_error",) * (blocks - failed_from)
        for number in range(failed_from):
            assert rig.read(0, 31 + number) == written[number]  # every rank has these
        assert rig.scheduler.misses_by_reason("r") == {
            "io_error": 1,
            "behind_miss": blocks - failed_from - 1,
            "partial_block": 1,
        }
        tally = rig.scheduler.tally
        assert +tally.tokens_by_source == {"memory": 16 * failed_from, "computed": 49}
        rig.settle()
        assert rig.faults == 0


def test_keys_of_another_group_name_other_records() -> None:
    with RankRig(1, TWO_GROUPS) as rig:
        name = hashes(32)[1]
        refs, _ = rig.fill([pack_key(name, 0)], first_block=1)
        rig.step(refs)
        rig.settle()
        rig.scheduler.on_new_request("r", hashes(33), 33)
        assert rig.scheduler.matched_tokens("r", 0) == 0
        assert rig.faults == 0
