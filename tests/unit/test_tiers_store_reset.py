"""Resets and pins: what they end, what they spare, what they give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.books import assert_adds_up, survey_of

from ebbtide.testing import RecordingSink, SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import disk as disk_module
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import DIGEST, VERIFY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized
    from pathlib import Path

PAGE = 4096
ONE, TWO = b"engine-1", b"engine-2"


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


# -- reset ----------------------------------------------------------------------------------------


def reset(sim: SimStore, *spaces: Any) -> list[bool]:
    answers: list[bool] = []
    for space in spaces or (None,):
        sim.store.reset(space, answers.append)
    return answers


def test_a_reset_with_work_in_flight_publishes_none_of_it(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(1, 2), PAGE)
    held, _ = tiered.store.reserve(ONE, space, keys_of(3, 4), PAGE)
    tiered.runtime.hold(VERIFY)
    tiered.runtime.hold(DIGEST)
    replies: list[bytes] = []
    tiered.store.commit(ONE, [held[0].sequence], replies.append)
    sink = RecordingSink(2)
    tiered.store.load(ONE, space, keys_of(1, 2), sink)
    answers = reset(tiered, space)
    tiered.runtime.let_go(VERIFY)
    tiered.runtime.let_go(DIGEST)
    tiered.runtime.run_until(lambda: bool(answers and replies and sink.is_over))
    assert answers == [True]
    assert replies == [bytes([Miss.RESET])]
    assert sink.failures == {0: Miss.RESET, 1: Miss.RESET}
    tiered.store.commit(ONE, [held[1].sequence], replies.append)
    tiered.runtime.run_until(lambda: len(replies) == 2)
    assert replies[1] == bytes([Miss.RESET])
    assert tiered.store.lookup(space, keys_of(1, 2, 3, 4))[:2] == bytes([Miss.RESET] * 2)
    assert tiered.store.memory.space.used_bytes == 0
    tiered.store.check_integrity()


def test_a_reset_ends_a_load_that_waits_and_spares_what_was_granted(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(*range(8)), PAGE)
    sink = RecordingSink(8)
    load = tiered.store.load(ONE, space, keys_of(*range(8)), sink)
    tiered.runtime.settle()
    assert len(sink.granted) == 4  # a quarter of the arena is the window
    answers = reset(tiered, space)
    tiered.runtime.run_until(lambda: bool(answers))
    content = tiered.content(space, key_of(0), PAGE)
    assert tiered.store.arena.view(sink.granted[0].offset, PAGE) == content
    for batch in list(sink.open_batches):
        sink.acked(batch)
        load.ack(batch)
    assert sink.is_over
    assert set(sink.failures.values()) == {Miss.RESET}
    assert tiered.store.memory.space.used_bytes == 0


def test_slots_that_a_reset_leaves_with_their_writers_stay_counted(sim: SimStore) -> None:
    """Else stores could take every slot, and a load could wait for a writer that never answers."""
    space = sim.namespace()
    first, _ = sim.store.reserve(ONE, space, keys_of(*range(15)), PAGE)
    assert len(first) == 15
    reset(sim, space)
    assert sim.store.memory.reserved_bytes == 15 * PAGE
    assert sim.store.reserve(TWO, space, keys_of(1), PAGE) == ([], Miss.BUSY)
    assert sim.store.abort(ONE, [grant.sequence for grant in first]) == bytes(15)
    assert sim.store.memory.reserved_bytes == 0
    sim.store.check_integrity()


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimStore]:
    """20 records on disk, which a reset takes in pieces of two."""
    monkeypatch.setattr(disk_module, "RESET_PIECE", 2)
    with SimStore(3, 8 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=32 * PAGE) as sim:
        for number in range(20):
            sim.put(sim.namespace(), keys_of(number), PAGE)
        assert sim.drain()
        assert sim.store.disk is not None
        assert sim.store.disk.records == 20
        yield sim


def kept_by_epoch(sim: SimStore) -> list[int]:
    """How many entries each table has that is kept by reset epoch."""
    memory, disk = sim.store.memory, sim.store.disk
    assert disk is not None
    tables: list[Sized] = [
        sim.store.ledger.tallies._by_epoch,
        memory._index,
        memory.reserved_of,
        memory.payload_of,
    ]
    tables += [disk.digests, disk._leaving]
    for shares in (memory.space.shares, disk.space.shares):
        tables += [shares._quotas, shares.used_of]
    return [len(table) for table in tables]


def test_an_epoch_that_is_over_leaves_nothing_behind(large: SimStore) -> None:
    """Though a record of it is evicted for another one's sake while it still waits to leave."""
    one, two, disk = large.namespace(), large.namespace("two"), large.store.disk
    assert disk is not None
    kept = []
    for life in range(1, 5):
        large.put(two, keys_of(*range(10)), PAGE)
        large.put(one, keys_of(*range(20)), PAGE)
        assert large.drain()
        old_epoch = one.epoch
        reset(large, one)
        disk.evict(disk.index.rows_of(old_epoch).tolist()[-1:], two.epoch)
        large.runtime.pass_time(1.0)
        tally = large.store.ledger.tallies.of(one.epoch)
        assert tally.left_disk == {Miss.RESET: 20 * life}
        assert disk.evicted == 0
        disk.on_lost(old_epoch, key_of(1))  # as a commit that fails says, however late
        reset(large, two)
        large.runtime.pass_time(1.0)
        kept.append(kept_by_epoch(large))
        assert_adds_up(survey_of(large.store), at_rest=True)
    assert kept == kept[:1] * 4


def test_a_reset_is_answered_at_once_and_the_slots_come_back_in_pieces(large: SimStore) -> None:
    space, keys, disk = large.namespace(), keys_of(*range(20)), large.store.disk
    assert disk is not None
    answers = reset(large, space)
    assert disk.records == 18  # no call takes longer than two records
    assert large.store.lookup(space, keys) == bytes([Miss.RESET]) * 20
    large.store.check_integrity()
    large.put(space, keys[5:6], PAGE)  # in the new life, while the old one leaves
    large.runtime.run_until(lambda: bool(answers) and disk.records <= 1)
    assert answers == [True]
    assert large.drain()
    assert [r.key for r in disk.index.records_of(space.epoch)] == keys[5:6]
    assert large.get(space, keys[5:6]) == [large.content(space, keys[5], PAGE)]
    found = large.store.lookup(space, keys)
    assert found == bytes([Miss.RESET] * 5 + [Place.MEMORY] + [Miss.RESET] * 14)
    large.store.check_integrity()


def test_two_resets_in_a_row_leave_nothing_and_know_the_reason(large: SimStore) -> None:
    space, keys, disk = large.namespace(), keys_of(*range(20)), large.store.disk
    assert disk is not None
    reset(large, space)
    left = {r.key for r in disk.index.records_of(space.epoch - 1)}
    reset(large, space)
    # What had left before the second reset has no reason in the life that it began.
    expected = bytes([Miss.RESET if key in left else Miss.NEVER_SEEN for key in keys])
    assert large.store.lookup(space, keys) == expected
    large.runtime.run_until(lambda: disk.records == 0)
    assert large.store.lookup(space, keys) == expected
    assert len(left) == 18
    assert disk._leaving == {}


def test_a_row_that_was_given_out_again_meanwhile_is_not_the_resets(
    large: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, disk = large.namespace(), large.store.disk
    assert disk is not None
    monkeypatch.setattr(disk_module, "RESET_PIECE", 0)  # nothing leaves for now
    reset(large, space)
    (gone,) = [r for r in disk.index.records_of(space.epoch - 1) if r.key == key_of(7)]
    disk.discard(gone)  # as an eviction
    answers: list[bool] = []
    disk.flush(answers.append)
    large.runtime.run_until(lambda: bool(answers))
    large.put(space, keys_of(77), PAGE)
    large.store.flush(answers.append)
    large.runtime.run_until(lambda: disk.holds(space.epoch, key_of(77)))
    new = disk.index.find(space.epoch, key_of(77))
    assert new == gone.row
    large.runtime.run_until(lambda: disk.index.is_whole(new))
    monkeypatch.setattr(disk_module, "RESET_PIECE", 64)
    large.runtime.run_until(lambda: disk.records == 1)
    assert large.drain()
    assert large.store.lookup(space, keys_of(77)) == bytes([Place.MEMORY])
    assert disk.index.find(space.epoch, key_of(77)) == new
    large.store.check_integrity()


def test_a_power_cut_behind_the_answer_brings_nothing_back(large: SimStore) -> None:
    space, keys = large.namespace(), keys_of(*range(20))
    answers = reset(large, space)
    large.runtime.run_until(lambda: bool(answers))
    assert answers == [True]
    large.lose_power()
    assert large.store.disk is not None
    assert large.store.disk.records == 0
    assert large.get(large.namespace(), keys) == [Miss.NEVER_SEEN] * 20


def test_a_reset_of_all_resets_all_and_epochs_are_never_used_again(sim: SimStore) -> None:
    spaces = [sim.namespace(name) for name in ("a", "b", "c")]
    for space in spaces:
        sim.put(space, keys_of(1), PAGE)
    seen = {space.epoch for space in spaces}
    for _ in range(3):
        answers = reset(sim)
        sim.runtime.settle()
        assert answers == [True]
        now = {space.epoch for space in spaces}
        assert not now & seen
        seen |= now
    assert [sim.get(space, keys_of(1)) for space in spaces] == [[Miss.NEVER_SEEN]] * 3
    for space in spaces:
        sim.put(space, keys_of(1), PAGE)
        assert sim.get(space, keys_of(1)) == [sim.content(space, key_of(1), PAGE)]


def test_a_reset_of_a_store_without_namespaces_is_answered(sim: SimStore) -> None:
    assert reset(sim) == [True]


# -- pins -----------------------------------------------------------------------------------------


def test_a_pinned_record_stays_until_every_pin_is_given_back(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(1, 2), PAGE)
    assert sim.store.pin(ONE, space, keys_of(1, 99)) == 1
    assert sim.store.pin(ONE, space, keys_of(1)) == 1
    for number in range(100, 140):
        sim.put(space, keys_of(number), PAGE)
    assert sim.store.lookup(space, keys_of(1, 2)) == bytes([Place.MEMORY, Miss.EVICTED])
    assert sim.store.unpin(ONE, space, keys_of(1, 2)) == 1
    assert sim.store.memory.pinned_bytes == PAGE
    assert sim.store.unpin(ONE, space, keys_of(1, 1)) == 1
    assert sim.store.memory.pinned_bytes == 0


def test_pins_are_an_engines_own_and_end_with_it(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(1, 2), PAGE)
    assert sim.store.pin(ONE, space, keys_of(1, 2)) == sim.store.pin(ONE, space, keys_of(1, 2)) == 2
    assert sim.store.pin(TWO, space, keys_of(1)) == 1
    assert sim.store.unpin(TWO, space, keys_of(1, 1, 2)) == 1
    assert sim.store.pin(TWO, space, keys_of(1)) == 1
    sim.store.engine_gone(ONE)
    assert sim.store.pins.kept_bytes == sim.store.memory.pinned_bytes == PAGE
    assert sim.store.unpin(ONE, space, keys_of(1)) == 0
    sim.store.engine_gone(TWO)
    assert sim.store.pins.kept_bytes == sim.store.memory.pinned_bytes == 0


def test_pins_never_hold_more_than_their_bound(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(*range(16)), PAGE)
    assert sim.store.pin(ONE, space, keys_of(*range(16))) == 8
    assert sim.store.memory.pinned_bytes == sim.store.bounds.pinned_max_bytes == 8 * PAGE


def test_a_reset_gives_all_pins_back(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(1), PAGE)
    for _ in range(3):
        sim.store.pin(ONE, space, keys_of(1))
    reset(sim, space)
    assert sim.store.memory.pinned_bytes == 0
    assert sim.store.memory.space.used_bytes == 0
    assert sim.store.unpin(ONE, space, keys_of(1)) == 0


def test_a_pinned_record_that_turns_out_corrupt_does_not_keep_its_slot(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(1), PAGE)
    sim.store.pin(ONE, space, keys_of(1))
    sim.store.pin(ONE, space, keys_of(1))
    record = sim.store.memory.find(space.epoch, key_of(1))
    assert record is not None
    sim.store.view(record, PAGE)[0] ^= 1
    assert sim.get(space, keys_of(1)) == [Miss.CORRUPT]
    assert sim.store.memory.pinned_bytes == 0
    sim.put(space, keys_of(*range(8)), PAGE)
    assert sim.store.pin(ONE, space, keys_of(*range(8))) == 8  # none of the bound is lost
