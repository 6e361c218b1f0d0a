"""The worker half alone: a load is reported when no copy of it can still write, come what may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.scripted import RECORD_BYTES, ScriptedClient

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.offload.worker import OffloadWorker
from ebbtide.connectors.seam import LoadJob, LoadResult, StepMetadata, StoreJob
from ebbtide.tiers.device import CopyEnd, DeviceCopies
from ebbtide.tiers.reasons import Miss, Place

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ebbtide.tiers.arena import Arena

M, D = Place.MEMORY, Place.DISK
JOB = LoadJob("r", tuple(bytes([n]) * 32 for n in range(4)), (10, 11, 12, 13))


class HandCopies:
    """Copies that end when the test says so."""

    layout = SimpleNamespace(record_bytes=RECORD_BYTES)

    def __init__(self) -> None:
        self.jobs: list[tuple[Hashable, list[int], bool]] = []
        self.ends: list[CopyEnd] = []
        self.open_jobs = 0
        self.closed = False

    def submit(self, tag: Hashable, block_ids: list[int], *_: object, **how: Any) -> None:
        self.jobs.append((tag, list(block_ids), how["to_device"]))
        self.open_jobs += 1

    def end(self, error: BaseException | None = None) -> None:
        """The oldest copy ends."""
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

    def __init__(self) -> None:
        self.client, self.copies, self.now = ScriptedClient(), HandCopies(), 100.0
        self.client.arena = cast("Arena", object())
        self.half = OffloadWorker(
            self.client,
            cast("DeviceCopies", self.copies),
            descriptor=[["model", "m"]],
            load_timeout_s=1.0,
            store_timeout_s=1.0,
            now=lambda: self.now,
        )
        self.client.answer(wire.OpenNamespace, wire.NamespaceOpened(0, b"d" * 32, 0, 0))
        self.half.finish_step()

    def load(self) -> int:
        """Returns the load's ticket."""
        self.half.start_step(StepMetadata(1, loads=(JOB,)))
        (ticket,) = (t for t, m in self.client.asked.items() if isinstance(m, wire.LoadKeys))
        return ticket

    def store(self, *sequences: int, generation: int = 1) -> None:
        jobs = tuple(StoreJob(number, number * RECORD_BYTES, number) for number in sequences)
        self.half.start_step(StepMetadata(generation, stores=jobs))

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
        bench.half.start_step(StepMetadata(1, cancelled=("r",)))
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


def test_without_a_store_a_load_fails_at_once(bench: Bench) -> None:
    bench.say(999, LOST)
    bench.half.start_step(StepMetadata(1, loads=(JOB,)))
    assert bench.report() == [LoadResult("r", 0, ("unknown",) * 4)]


def test_a_store_is_reported_when_its_commit_is_answered(bench: Bench) -> None:
    bench.store(1, 2)
    assert bench.half.finish_step().stored == []
    bench.copies.end()
    assert bench.half.finish_step().stored == []
    bench.client.answer(wire.Commit, wire.Settled(bytes([0, Miss.RESET])))
    report = bench.half.finish_step()
    assert (report.stored, report.dropped) == ([1], [2])
    assert report.bytes_by_edge == {}


def test_a_copy_that_ends_under_the_next_store_is_not_committed_there(bench: Bench) -> None:
    """There the same numbers name other slots: garbage would get a valid digest."""
    bench.store(1, 2)
    bench.client.lose()
    bench.client.reach(arena_generation=2)
    bench.copies.end()
    report = bench.half.finish_step()
    if not report.dropped:
        report = bench.half.finish_step()
    assert report.dropped == [1, 2]
    assert not bench.client.open(wire.Commit)
    bench.store(3, generation=1)  # planned for the store that has gone
    assert bench.half.finish_step().dropped == [3]
    assert not bench.copies.jobs


def test_a_commit_without_answer_lets_its_blocks_go(bench: Bench) -> None:
    bench.store(1, 2)
    bench.copies.end()
    bench.half.finish_step()
    bench.now += 1.1
    assert bench.half.finish_step().dropped == [1, 2]
    bench.client.answer(wire.Commit, wire.Settled(bytes(2)))  # late
    report = bench.half.finish_step()
    assert (report.stored, report.dropped) == ([], [])
    assert bench.half.faults.count == 0


def test_closing_waits_for_copies_and_then_lets_go(bench: Bench) -> None:
    bench.store(1)
    polls = 0

    def wait(timeout_s: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            assert not bench.client.closed
            bench.copies.end()
        elif polls == 6:
            bench.client.answer(wire.Commit, wire.Settled(bytes(1)))

    bench.client.wait = wait  # type: ignore[method-assign]
    bench.half.close()
    bench.half.close()
    assert polls >= 6
    assert bench.copies.closed
    assert bench.client.closed
