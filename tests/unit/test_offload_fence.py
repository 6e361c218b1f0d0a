"""A device block that is handed out while it is being copied down: the copy ends first."""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.controls import Reference, Rig, answers, conversations
from tests.rank_rig import RankRig
from tests.scripted import Bench

from ebbtide.allocator import pack_key
from ebbtide.connectors.reference.device_pool import ReferencePool
from ebbtide.connectors.seam import LoadJob, StepMetadata
from ebbtide.tiers.device import HostCopies
from ebbtide.tiers.device_streams import StreamCopies

if TYPE_CHECKING:
    from ebbtide.tiers.device import CopyJob, DeviceCopies

pytestmark = pytest.mark.usefixtures("single_thread")

KEYS = [pack_key(bytes([n]) * 32, 0) for n in range(4)]
SLOW_S = 0.05


def slow_stores(
    copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch, go: threading.Event
) -> list[str]:
    """Copies down begin with `go`, or when they must. Returns a list with "copied" at each end."""
    log: list[str] = []
    move = copies._move

    def slow(job: CopyJob) -> None:
        if not job.to_device and not isinstance(copies, HostCopies):
            go.wait()
        move(job)
        if not job.to_device:
            log.append("copied")

    monkeypatch.setattr(copies, "_move", slow)
    if isinstance(copies, HostCopies):
        slice_ = copies._slice
        monkeypatch.setattr(copies, "_slice", lambda: slice_() if go.is_set() else None)
    return log


def test_a_fence_is_asked_for_once_and_only_for_what_is_being_copied() -> None:
    bench = Bench(blocks=9)
    refs = bench.fill(4)
    bench.step(refs[:3])
    bench.grant(1, 3)
    metadata = bench.step()
    assert (len(metadata.stores), metadata.settle_stores) == (3, False)
    assert not bench.step().settle_stores
    bench.finish(refs)
    assert not bench.step().settle_stores  # free, but still what it was
    bench.pool.allocate(5)  # what was never used, and the one that was not being copied
    assert not bench.step().settle_stores
    bench.pool.allocate(1)
    assert bench.step().settle_stores
    assert not bench.step().settle_stores  # all that were copying then have ended
    bench.copied(3)
    bench.pool.allocate(1)
    assert bench.step().settle_stores  # another one
    bench.copied(1, 2)
    bench.pool.allocate(1)
    assert not bench.step().settle_stores


def test_copies_for_a_store_that_has_gone_are_fenced_too() -> None:
    bench = Bench(blocks=9)
    refs = bench.fill(2)
    bench.step(refs)
    bench.grant(1, 2)
    bench.step()
    bench.client.lose()
    bench.client.reach(arena_generation=2)
    bench.open_namespace()
    bench.finish(refs)
    assert not bench.step().settle_stores
    bench.pool.allocate(8)
    assert bench.step().settle_stores


def test_a_step_that_cannot_be_planned_waits_for_every_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.client, "poll", lambda: 1 / 0)
    assert bench.step().settle_stores
    assert bench.half.faults.count == 1


def handed_out_while_copying(
    kind: type[DeviceCopies], rig: RankRig, monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, bool]:
    """Block 1 ebbs slowly and is written to meanwhile.

    Returns whether the record is what the block held, and whether the write came after the copy.
    """
    go = threading.Event()
    rig.scheduler.on_new_request("live", [], 1)
    log = slow_stores(rig.workers[0]._copies, monkeypatch, go)
    refs, (before,) = rig.fill(KEYS[:1], first_block=1)
    rig.step(refs)
    rig.step_until(lambda: rig.steps[-1].stores)
    assert rig.pool.pins == []
    rig.pool.hand_out(1)
    timer = threading.Timer(SLOW_S, go.set)
    if kind is StreamCopies:  # the fence waits for the thread
        timer.start()
    ended_before: list[bool] = []

    def forward() -> None:
        ended_before.append(bool(log))
        rig.write(0, 1)

    rig.step(forward=forward)
    if kind is StreamCopies:
        timer.join()
    go.set()
    rig.settle()
    assert rig.scheduler.tally.demoted == 1
    (worker,) = rig.workers
    job = LoadJob("r", (KEYS[0],), (2,))
    worker.start_step(StepMetadata(1, rig.scheduler.namespace.handle, loads=(job,)))
    while not (loads := worker.finish_step().loads):
        rig.runtime.wait(0.01)
    assert loads[0].sources == ("memory",)
    return rig.read(0, 2) == before, ended_before == [True]


@pytest.mark.parametrize("kind", [HostCopies, StreamCopies])
def test_a_block_is_not_written_to_before_its_copy_has_ended(
    kind: type[DeviceCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RankRig(copies=kind) as rig:
        assert handed_out_while_copying(kind, rig, monkeypatch) == (True, True)
        assert [metadata.settle_stores for metadata in rig.steps].count(True) == 1
        assert rig.faults == 0


@pytest.mark.parametrize("kind", [HostCopies, StreamCopies])
def test_without_the_fence_its_bytes_would_be_wrong(
    kind: type[DeviceCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they were not, the test before this one would say nothing."""
    with RankRig(copies=kind) as rig:
        monkeypatch.setattr(rig.scheduler._demotions, "take_fence", lambda: False)
        assert handed_out_while_copying(kind, rig, monkeypatch) == (False, False)


def test_an_engine_under_pressure_with_slow_copies_stores_no_wrong_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = conversations(17, users=5, turns=3)
    right = Reference().answers(prompts)
    with Rig(blocks=26, memory_records=512, budget=64) as rig:
        copies = rig.worker._copies
        assert isinstance(copies, HostCopies)
        slice_, settle = copies._slice, copies.settle_stores
        draw = Random(17)
        monkeypatch.setattr(copies, "_slice", lambda: slice_() if draw.random() < 0.1 else None)
        fences: list[int] = []

        def counted() -> None:
            fences.append(len(copies._stores))
            settle()

        monkeypatch.setattr(copies, "settle_stores", counted)
        assert answers(rig.ask(prompts, one_by_one=False)) == right
        assert max(fences) > 0  # it was needed
        rig.forget_device()
        restored = rig.ask(prompts)
        assert answers(restored) == right
        assert sum(output.sources.memory for output in restored) > 1000
        assert rig.faults == 0
        rig.assert_idle()


def test_a_block_is_nobodys_content_while_it_is_being_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its hash is known when the step is planned, its bytes when the step has run."""
    with Rig() as rig:
        pool = ReferencePool(rig.engine.pool, rig.engine.being_computed)
        plan = rig.scheduler.build_step
        hashed: list[list[int]] = []

        def watched(newly_full: list[object]) -> object:
            blocks = [b.block_id for b in rig.engine.pool.blocks if b.key is not None]
            hashed.append([block_id for block_id in blocks if pool.content(block_id) is None])
            return plan(newly_full)  # type: ignore[arg-type]

        monkeypatch.setattr(rig.scheduler, "build_step", watched)
        rig.engine.add_request("r", [97] * 40, 1)
        rig.engine.step()
        assert [len(blocks) for blocks in hashed] == [2]
        assert all(pool.content(block_id) is not None for block_id in hashed[0])
        rig.engine.run()
