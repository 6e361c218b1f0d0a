"""The disk tier: what a fault costs, what a reader may rely on, what a restart keeps."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.disk_rig import EPOCH, DiskRig
from tests.index_rows import changed_index, key_in

from ebbtide.testing import FAULTS, Fault, RecordingSink, SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.testing.store import disk_bytes_for
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import COMMIT, READ, WRITE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ebbtide.tiers.disk import DiskTier


PAGE = 4096
LENGTH = PAGE - 100  # padding, so that lengths and strides cannot be mixed up


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimStore]:
    """Memory of 8 slots over a disk of 24; everything is written soon."""
    with SimStore(
        5,
        8 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=24 * PAGE,
        commit_batch_bytes=4 * PAGE,
        bounds=Bounds.for_capacity(8 * PAGE, write_after_s=0.0),
    ) as store:
        yield store


def disk_of(sim: SimStore) -> DiskTier:
    assert sim.store.disk is not None
    return sim.store.disk


def held(sim: SimStore) -> set[bytes]:
    return set(disk_of(sim).keys(sim.namespace().epoch))


# -- failing devices ------------------------------------------------------------------------------


def test_a_failed_sync_drops_the_batch_takes_the_tier_down_and_retries_nothing(
    sim: SimStore,
) -> None:
    space, keys = sim.namespace(), [key_of(n) for n in range(3)]
    sim.put(space, keys[:1], LENGTH)
    assert sim.drain()
    assert sim.slab is not None
    sim.slab.fail_next("sync")
    sim.runtime.hold(COMMIT)
    sim.put(space, keys[1:], LENGTH)
    sim.runtime.pass_time(1.0)
    sim.runtime.let_go(COMMIT)
    assert not sim.drain()
    disk = disk_of(sim)
    assert disk.down is not None
    assert disk.lost_batches == 1
    sim.slab.log.clear()
    sim.put(space, [key_of(n) for n in range(10, 30)], LENGTH)  # memory serves on
    sim.runtime.pass_time(100.0)
    assert sim.slab.log == []
    lost = [event.key for event in sim.store.ledger.events if event.kind == "lost"]
    assert sorted(lost) == sorted(keys[1:])
    sim.restart(clean=False)
    assert held(sim) == {keys[0]}


def test_p59_a_record_whose_write_failed_is_not_there_after_a_restart(sim: SimStore) -> None:
    space, keys = sim.namespace(), [key_of(n) for n in range(6)]
    assert sim.slab is not None
    sim.put(space, keys[:3], LENGTH)
    assert sim.drain()
    sim.slab.fail_next("write", Fault.TORN)
    sim.put(space, keys[3:], LENGTH)
    assert not sim.drain()
    assert sim.get(space, keys) == [sim.content(space, key, LENGTH) for key in keys]  # memory
    sim.lose_power()
    space = sim.namespace()
    assert held(sim) == set(keys[:3])
    found = sim.get(space, keys)
    assert found[:3] == [sim.content(space, key, LENGTH) for key in keys[:3]]
    assert found[3:] == [Miss.NEVER_SEEN] * 3


def test_changes_gathered_behind_a_failing_commit_are_lost_and_said_to_be(sim: SimStore) -> None:
    space = sim.namespace()
    assert sim.slab is not None
    sim.runtime.hold(COMMIT)
    sim.put(space, [key_of(n) for n in range(4)], LENGTH)  # a full batch
    sim.runtime.settle()
    sim.put(space, [key_of(n) for n in range(4, 7)], LENGTH)  # the next one gathers
    sim.runtime.settle()
    sim.slab.fail_next("sync")
    sim.runtime.let_go(COMMIT)
    sim.runtime.pass_time(1.0)
    lost = [event.key for event in sim.store.ledger.events if event.kind == "lost"]
    assert sorted(lost) == sorted(key_of(n) for n in range(7))
    assert sim.store.memory.dirty_bytes == 7 * PAGE
    assert disk_of(sim).lost_batches == 2


def test_what_only_a_broken_disk_holds_is_missed_as_an_io_error(sim: SimStore) -> None:
    space = sim.namespace()
    for n in range(12):
        sim.put(space, [key_of(n)], LENGTH)
    assert sim.drain()
    assert sim.store.lookup(space, [key_of(0)]) == bytes([Place.DISK])
    assert sim.slab is not None
    sim.slab.fail_next("sync")
    sim.put(space, [key_of(50)], LENGTH)
    assert not sim.drain()
    assert sim.store.lookup(space, [key_of(0)]) == bytes([Miss.IO_ERROR])
    assert sim.get(space, [key_of(0)]) == [Miss.IO_ERROR]


@pytest.mark.parametrize("fault", FAULTS["read"])
def test_p40_a_record_that_cannot_be_read_is_tried_once_and_then_a_miss(
    sim: SimStore, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    sim.put(sim.namespace(), [key_of(1)], LENGTH)
    sim.restart()
    space = sim.namespace()
    assert sim.slab is not None
    sim.slab.fail_next("read", fault)
    reason = Miss.CORRUPT if fault is Fault.FLIP else Miss.IO_ERROR
    # Flips hit the padding sometimes, where they do no harm: the record here is nearly a page.
    with caplog.at_level(logging.CRITICAL):
        assert sim.get(space, [key_of(1)]) == [reason]
    assert sim.store.lookup(space, [key_of(1)]) == bytes([reason])
    reads = len([entry for entry in sim.slab.log if entry.name == "read"])
    assert reads == 1
    sim.get(space, [key_of(1)])
    assert len([entry for entry in sim.slab.log if entry.name == "read"]) == reads
    assert sim.put(space, [key_of(1)], LENGTH) == bytes(1)
    sim.restart()
    space = sim.namespace()
    assert sim.get(space, [key_of(1)]) == [sim.content(space, key_of(1), LENGTH)]


def test_bytes_of_another_record_do_not_verify(sim: SimStore) -> None:
    """An entry that a fault attaches to another slot: right form, wrong bytes."""
    sim.put(sim.namespace(), [key_of(1), key_of(2)], LENGTH)
    sim.restart()
    space, disk = sim.namespace(), disk_of(sim)
    one, two = (disk.find(space.epoch, key_of(n)) for n in (1, 2))
    assert one is not None
    assert two is not None
    start, other = one.offset, two.offset
    sim.device.image[start : start + PAGE] = sim.device.image[other : other + PAGE]
    assert sim.get(space, [key_of(1), key_of(2)]) == [
        Miss.CORRUPT,
        sim.content(space, key_of(2), LENGTH),
    ]
    assert disk.corrupt == 1


# -- reading while things change ------------------------------------------------------------------


def test_p36_a_record_evicted_while_it_is_read_arrives_whole(sim: SimStore) -> None:
    sim.put(sim.namespace(), [key_of(1)], LENGTH)
    sim.restart()
    space, disk = sim.namespace(), disk_of(sim)
    sim.runtime.hold(READ)
    sink = RecordingSink(1)
    load = sim.store.load(b"e", space, [key_of(1)], sink)
    record = disk.find(space.epoch, key_of(1))
    assert record is not None
    disk.discard(record)
    for n in range(40):  # would take the slot, if it were free
        sim.put(space, [key_of(100 + n)], LENGTH)
    sim.runtime.let_go(READ)
    sim.runtime.run_until(lambda: sink.is_done)
    granted = sink.granted[0]
    view = sim.store.arena.view(granted.offset, LENGTH)
    assert view == sim.content(space, key_of(1), LENGTH)
    sink.acked(0)
    load.ack(0)
    assert sim.drain()
    sim.store.check_integrity()
    assert disk.space.used_bytes == disk.records * PAGE


def test_p37_removing_what_the_index_does_not_hold_is_no_error(sim: SimStore) -> None:
    disk = disk_of(sim)
    disk._committer.remove(np.array([7 * PAGE]), np.array([PAGE]))
    assert sim.flush()
    assert disk.down is None


def test_p91_a_load_does_not_wait_behind_stores(tmp_path: Path) -> None:
    """Writes hang; what is read needs no write."""
    bounds = replace(Bounds.for_capacity(128 * PAGE, write_after_s=0.0), dirty_max_bytes=PAGE)
    with SimStore(
        1, 128 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=256 * PAGE, bounds=bounds
    ) as sim:
        sim.put(sim.namespace(), [key_of(1)], LENGTH)
        sim.restart()
        space = sim.namespace()
        sim.runtime.hold(WRITE)
        sim.put(space, [key_of(n) for n in range(10, 110)], LENGTH)
        assert sim.runtime.waiting(WRITE)
        assert sim.get(space, [key_of(1)]) == [sim.content(space, key_of(1), LENGTH)]


# -- resets and restarts --------------------------------------------------------------------------


def test_a_reset_is_durable_before_it_is_answered(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, [key_of(n) for n in range(6)], LENGTH)
    assert sim.drain()
    answers: list[bool] = []
    sim.runtime.hold(COMMIT)
    sim.store.reset(space, answers.append)
    sim.runtime.pass_time(10.0)
    assert answers == []
    assert sim.get(space, [key_of(1)]) == [Miss.RESET]  # not served any more all the same
    sim.runtime.let_go(COMMIT)
    sim.runtime.run_until(lambda: bool(answers))
    assert answers == [True]
    sim.lose_power()
    assert held(sim) == set()


def test_a_reset_of_everything_reaches_namespaces_that_nobody_opened(sim: SimStore) -> None:
    sim.put(sim.namespace("old"), [key_of(1)], LENGTH)
    assert sim.restart()
    answers: list[bool] = []
    sim.store.reset(None, answers.append)
    sim.runtime.run_until(lambda: bool(answers))
    sim.lose_power()
    assert sim.store.lookup(sim.namespace("old"), [key_of(1)]) == bytes([Miss.NEVER_SEEN])


def test_a_reset_that_a_broken_disk_cannot_keep_is_answered_no(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, [key_of(1)], LENGTH)
    assert sim.drain()
    assert sim.slab is not None
    sim.slab.fail_next("sync")
    sim.put(space, [key_of(2)], LENGTH)
    assert not sim.drain()
    answers: list[bool] = []
    sim.store.reset(space, answers.append)
    sim.runtime.run_until(lambda: bool(answers))
    assert answers == [False]


def test_a_restart_keeps_records_and_the_order_of_eviction(tmp_path: Path) -> None:
    slots = 160
    with SimStore(
        5,
        32 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=slots * PAGE,
        bounds=Bounds.for_capacity(32 * PAGE, write_after_s=0.0),
    ) as sim:
        space = sim.namespace()
        for n in range(140):
            sim.put(space, [key_of(n)], LENGTH)
        touched = [key_of(n) for n in range(0, 140, 2)]
        for key in reversed(touched):
            sim.store.touch(space, [key])
        assert sim.restart()
        assert len(held(sim)) == 140
        space = sim.namespace()
        for n in range(1000, 1000 + slots // 4):
            sim.put(space, [key_of(n)], LENGTH)
        assert sim.drain()
        alive = held(sim) & set(touched)
        assert len(alive) >= 0.95 * len(touched)
        assert len(held(sim)) < 140 + slots // 4


def test_the_touched_half_of_a_full_disk_outlives_a_restart(tmp_path: Path) -> None:
    """Filled, half of it touched in reverse, restarted, and a quarter put anew."""
    slots = 400
    with SimStore(
        9,
        64 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=slots * PAGE,
        bounds=Bounds.for_capacity(64 * PAGE, write_after_s=0.0),
    ) as sim:
        for n in range(slots):
            sim.put(sim.namespace(), [key_of(n)], LENGTH)
        assert sim.drain()
        there = sorted(held(sim))  # a sixteenth is evicted ahead
        touched = there[::2]
        for key in reversed(touched):
            sim.store.touch(sim.namespace(), [key])
        assert sim.restart()
        assert held(sim) == set(there)
        for n in range(slots, slots + slots // 4):
            sim.put(sim.namespace(), [key_of(n)], LENGTH)
        assert sim.drain()
        alive = held(sim)
        assert len(alive & set(touched)) >= 0.95 * len(touched)
        assert len(alive & set(there[1::2])) < 0.75 * len(there[1::2])  # it is them that went


def test_a_power_cut_keeps_what_was_committed_and_nothing_torn(sim: SimStore) -> None:
    space = sim.namespace()
    for n in range(60):
        sim.put(space, [key_of(n)], LENGTH)
    assert sim.flush()
    committed = held(sim)
    for n in range(60, 70):
        sim.put(space, [key_of(n)], LENGTH)
    sim.lose_power()
    space = sim.namespace()
    for key in held(sim):
        assert sim.get(space, [key]) == [sim.content(space, key, LENGTH)]
    assert len(held(sim) & committed) > len(committed) // 2


def test_p61_records_are_bounded_in_number_too(tmp_path: Path) -> None:
    """Small records must not outgrow the index, and a full index can be rewritten for ever."""
    with SimStore(
        1,
        64 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=400 * PAGE,
        records_max=100,
        bounds=Bounds.for_capacity(64 * PAGE, write_after_s=0.0),
    ) as sim:
        space = sim.namespace()
        for n in range(300):
            sim.put(space, [key_of(n)], 100)
        assert sim.drain()
        assert 90 <= disk_of(sim).records <= 100


def test_p51_a_full_index_takes_every_rewrite(tmp_path: Path) -> None:
    slots = 3000  # more slots than a 1 MiB index has records
    with SimStore(
        1,
        64 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=slots * PAGE,
        bounds=Bounds.for_capacity(64 * PAGE, write_after_s=0.0),
    ) as sim:
        disk, space = disk_of(sim), sim.namespace()
        for n in range(0, 6000, 32):
            keys = [(n + i).to_bytes(4, "little") * 8 + bytes(4) for i in range(32)]
            sim.put(space, keys, 100)
        assert sim.drain()
        assert disk.down is None
        assert disk.records > 0.9 * disk.records_max
        assert sim.restart()
        assert disk_of(sim).records > 0.9 * disk.records_max


def test_p21_a_record_of_an_unknown_codec_is_dropped_and_the_rest_is_served(tmp_path: Path) -> None:
    """Each entry names its own codec: the chain ends before the one that nobody can decode."""
    place, capacity = tmp_path / "d", disk_bytes_for(24 * PAGE)
    with DiskRig(place, capacity, LENGTH) as rig:
        assert rig.put(range(6)) == [None] * 6
        assert rig.flush()
        record = rig.disk.tier.find(EPOCH, key_of(4))
        assert record is not None
    with changed_index(place / "index") as rows:
        rows["head"][[key_in(row) == record.key for row in rows]] |= 99  # its first byte
    with DiskRig(place, capacity, LENGTH) as rig:
        assert rig.disk.dropped == 1
        assert rig.held == {key_of(n) for n in (0, 1, 2, 3, 5)}
        assert rig.put([4]) == [None]  # stored again as any other
        assert rig.held == {key_of(n) for n in range(6)}
