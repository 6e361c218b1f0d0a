"""A purge beside a store's work: nothing of the namespace is left, and no other is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.errors import EbbtideError, MisuseError, NoSpaceError, TierUnavailableError
from ebbtide.testing import RecordingSink
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import purge as purge_module
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.runtime import COMMIT, READ, WRITE

if TYPE_CHECKING:
    from ebbtide.testing import SimStore
    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.namespace import Namespace

PAGE = 4096
LENGTH = PAGE - 100
ENGINE = b"engine-1"

Answers = list[dict[str, Any] | EbbtideError]


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def disk_of(sim: SimStore) -> DiskTier:
    assert sim.store.disk is not None
    return sim.store.disk


def begin(sim: SimStore, space: Namespace) -> Answers:
    answers: Answers = []
    sim.store.care.purges.purge(space.digest, answers.append)
    return answers


def purge(sim: SimStore, space: Namespace) -> dict[str, Any]:
    answers = begin(sim, space)
    sim.runtime.run_until(lambda: bool(answers))
    (answer,) = answers
    assert isinstance(answer, dict), answer
    return answer


def offsets(sim: SimStore, space: Namespace) -> list[int]:
    return [record.offset for record in disk_of(sim).index.records_of(space.epoch)]


def on_device(sim: SimStore, offset: int) -> bytes:
    return bytes(sim.device.image[offset : offset + PAGE])


def traces(sim: SimStore, space: Namespace, keys: list[bytes]) -> int:
    """How many of these payloads lie anywhere, in the arena or in the slab."""
    arena = bytes(sim.store.arena.buffer)
    contents = [sim.content(space, key, LENGTH) for key in keys]
    return sum(content in arena or content in sim.device.image for content in contents)


def test_nothing_of_the_namespace_is_left_and_nothing_of_another_is_touched(
    tiered: SimStore,
) -> None:
    one, two = tiered.namespace("one"), tiered.namespace("two")
    tiered.put(one, keys_of(*range(20)), LENGTH)
    tiered.put(two, keys_of(*range(10)), LENGTH)
    assert tiered.drain()
    places = offsets(tiered, one)
    in_memory = len(tiered.store.memory.index(one.epoch))
    assert traces(tiered, one, keys_of(*range(20))) == 20
    report = purge(tiered, one)
    assert report == {
        "memory_records": in_memory,
        "memory_bytes": in_memory * LENGTH,
        "disk_records": 20,
        "disk_bytes": 20 * LENGTH,
        "held_slots": 0,
    }
    assert traces(tiered, one, keys_of(*range(20))) == 0
    assert {on_device(tiered, offset) for offset in places} == {bytes(PAGE)}
    assert set(tiered.get(one, keys_of(*range(20)))) == {Miss.RESET}
    assert tiered.get(two, keys_of(*range(10))) == [
        tiered.content(two, key, LENGTH) for key in keys_of(*range(10))
    ]
    assert tiered.flush()
    assert disk_of(tiered).space.used_bytes == 10 * PAGE
    tiered.store.check_integrity()


def test_it_holds_after_a_power_cut_right_behind_the_answer(tiered: SimStore) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(20)), LENGTH)
    assert tiered.drain()
    purge(tiered, one)
    tiered.lose_power()
    one = tiered.namespace("one")
    assert disk_of(tiered).keys(one.epoch) == []
    assert traces(tiered, one, keys_of(*range(20))) == 0


def test_no_slot_is_overwritten_before_the_namespace_is_forgotten_for_good(
    tiered: SimStore,
) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(8)), LENGTH)
    assert tiered.drain()
    tiered.runtime.hold(COMMIT)
    answers = begin(tiered, one)
    tiered.runtime.pass_time(5.0)
    assert traces(tiered, one, keys_of(*range(8))) == 8
    assert not answers
    tiered.lose_power()  # nothing was committed: all of it is still there, and whole
    one = tiered.namespace("one")
    right = [tiered.content(one, key, LENGTH) for key in keys_of(*range(8))]
    assert tiered.get(one, keys_of(*range(8))) == right


def test_a_power_cut_between_forgetting_and_overwriting_brings_nothing_back(
    tiered: SimStore,
) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(8)), LENGTH)
    assert tiered.drain()
    tiered.runtime.hold(WRITE)
    answers = begin(tiered, one)
    tiered.runtime.run_until(lambda: tiered.runtime.waiting(WRITE) > 0)
    assert not answers
    tiered.lose_power()
    one = tiered.namespace("one")
    assert disk_of(tiered).keys(one.epoch) == []
    assert set(tiered.get(one, keys_of(*range(8)))) == {Miss.NEVER_SEEN}


def test_a_slot_that_is_not_overwritten_yet_is_not_handed_out(tiered: SimStore) -> None:
    one, two = tiered.namespace("one"), tiered.namespace("two")
    tiered.put(one, keys_of(*range(56)), LENGTH)
    assert tiered.drain()
    places = set(offsets(tiered, one))
    tiered.runtime.hold(WRITE)
    answers = begin(tiered, one)
    tiered.runtime.run_until(lambda: tiered.runtime.waiting(WRITE) > 0)
    tiered.put(two, keys_of(*range(6)), LENGTH)
    tiered.runtime.pass_time(1.0)
    assert not places & set(offsets(tiered, two))
    tiered.runtime.let_go(WRITE)
    tiered.runtime.run_until(lambda: bool(answers))
    assert tiered.drain()
    assert tiered.get(two, keys_of(*range(6))) == [
        tiered.content(two, key, LENGTH) for key in keys_of(*range(6))
    ]
    tiered.put(two, keys_of(*range(6, 40)), LENGTH)
    assert tiered.drain()
    assert places & set(offsets(tiered, two))  # and now they are
    assert tiered.restart()
    two = tiered.namespace("two")
    found = tiered.get(two, keys_of(*range(40)))
    assert found == [tiered.content(two, key, LENGTH) for key in keys_of(*range(40))]


def test_a_record_that_is_being_written_to_disk_is_overwritten_too(tiered: SimStore) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(4)), LENGTH)
    drained: list[bool] = []
    tiered.runtime.hold(WRITE)
    tiered.store.drain(600.0, drained.append)
    tiered.runtime.run_until(lambda: tiered.runtime.waiting(WRITE) > 0)
    places = offsets(tiered, one)
    assert places
    answers = begin(tiered, one)
    tiered.runtime.pass_time(1.0)
    assert not answers
    tiered.runtime.let_go(WRITE)
    tiered.runtime.run_until(lambda: bool(answers and drained))
    assert traces(tiered, one, keys_of(*range(4))) == 0
    assert {on_device(tiered, offset) for offset in places} == {bytes(PAGE)}
    assert tiered.flush()
    assert disk_of(tiered).space.used_bytes == 0
    tiered.store.check_integrity()


def test_a_reader_sees_no_zeros_and_condemns_no_slot(tiered: SimStore) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(4)), LENGTH)
    assert tiered.restart()
    one = tiered.namespace("one")
    tiered.runtime.hold(READ)
    sink = RecordingSink(4)
    tiered.store.load(ENGINE, one, keys_of(*range(4)), sink)
    tiered.runtime.settle()
    assert tiered.runtime.waiting(READ)
    answers = begin(tiered, one)
    tiered.runtime.pass_time(2.0)
    assert not answers
    tiered.runtime.let_go(READ)
    tiered.runtime.run_until(lambda: bool(answers) and sink.is_over)
    assert set(sink.failures.values()) == {Miss.RESET}
    assert (disk_of(tiered).corrupt, disk_of(tiered).quarantined_bytes) == (0, 0)
    assert traces(tiered, one, keys_of(*range(4))) == 0
    tiered.store.check_integrity()


def test_what_an_engine_copies_is_overwritten_when_its_copy_has_ended(sim: SimStore) -> None:
    one = sim.namespace("one")
    sim.put(one, keys_of(1, 2), LENGTH)
    sink = RecordingSink(1)
    load = sim.store.load(ENGINE, one, keys_of(1), sink)
    sim.runtime.settle()
    answers = begin(sim, one)
    sim.runtime.pass_time(1.0)
    assert not answers  # an engine gets a moment
    sim.runtime.pass_time(purge_module.HELD_PATIENCE_S + 1.0)
    (answer,) = answers
    assert isinstance(answer, dict)
    assert (answer["memory_records"], answer["held_slots"]) == (2, 1)
    content = sim.content(one, key_of(1), LENGTH)
    assert sim.store.arena.view(sink.granted[0].offset, LENGTH) == content
    assert traces(sim, one, keys_of(2)) == 0
    (batch,) = sink.open_batches
    sink.acked(batch)
    load.ack(batch)
    sim.runtime.pass_time(2.0)
    assert traces(sim, one, keys_of(1)) == 0
    assert sim.store.memory.space.used_bytes == 0
    sim.store.check_integrity()


def test_a_slot_that_an_engine_writes_is_overwritten_when_it_gives_it_back(sim: SimStore) -> None:
    one = sim.namespace("one")
    grants, _ = sim.store.reserve(ENGINE, one, keys_of(1), LENGTH)
    answers = begin(sim, one)
    sim.store.arena.view(grants[0].offset, LENGTH)[:] = sim.content(one, key_of(1), LENGTH)
    assert sim.store.abort(ENGINE, [grants[0].sequence]) == b"\0"
    sim.runtime.run_until(lambda: bool(answers))
    assert traces(sim, one, keys_of(1)) == 0
    assert sim.store.memory.reserved_bytes == sim.store.memory.space.used_bytes == 0
    sim.store.check_integrity()


def test_a_bad_slot_is_overwritten_and_stays_out_of_use(tiered: SimStore) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(4)), LENGTH)
    assert tiered.restart()
    one = tiered.namespace("one")
    (place, *_) = offsets(tiered, one)
    assert tiered.slab is not None
    tiered.slab.flip_at_rest(place + 5)
    found = tiered.get(one, keys_of(*range(4)))
    assert found.count(Miss.CORRUPT) == 1
    purge(tiered, one)
    assert on_device(tiered, place) == bytes(PAGE)
    assert tiered.flush()
    assert disk_of(tiered).space.used_bytes == disk_of(tiered).quarantined_bytes == PAGE
    tiered.store.check_integrity()


def test_a_namespace_that_nobody_has_opened_is_purged(tiered: SimStore) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(4)), LENGTH)
    assert tiered.restart()
    assert purge(tiered, one)["disk_records"] == 4
    assert traces(tiered, one, keys_of(*range(4))) == 0


def test_many_records_are_overwritten_in_small_pieces(
    tiered: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge_module, "PIECE_RECORDS", 5)
    monkeypatch.setattr(purge_module, "PIECE_BYTES", 3 * PAGE)
    monkeypatch.setattr(purge_module, "LOOK_ROWS", 7)
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(40)), LENGTH)
    assert tiered.drain()
    assert tiered.slab is not None
    tiered.slab.log.clear()
    assert purge(tiered, one)["disk_records"] == 40
    writes = [operation for operation in tiered.slab.log if operation.name == "write"]
    assert sum(write.length for write in writes) == 40 * PAGE
    assert max(write.length for write in writes) <= 3 * PAGE
    assert traces(tiered, one, keys_of(*range(40))) == 0
    tiered.store.check_integrity()


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_drive_that_fails_is_an_error_and_no_promise(tiered: SimStore, operation: str) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(4)), LENGTH)
    assert tiered.drain()
    assert tiered.slab is not None
    tiered.slab.fail_next(operation)
    answers = begin(tiered, one)
    tiered.runtime.run_until(lambda: bool(answers))
    (answer,) = answers
    assert isinstance(answer, TierUnavailableError)
    assert "may still lie" in str(answer)
    assert disk_of(tiered).down
    assert set(tiered.get(one, keys_of(*range(4)))) == {Miss.RESET}


def test_a_tier_that_is_down_already_is_an_error_and_memory_is_overwritten(
    tiered: SimStore,
) -> None:
    one = tiered.namespace("one")
    tiered.put(one, keys_of(*range(4)), LENGTH)
    disk_of(tiered).go_down("made up")
    answers = begin(tiered, one)
    tiered.runtime.run_until(lambda: bool(answers))
    assert isinstance(answers[0], TierUnavailableError)
    tiered.runtime.settle()
    assert traces(tiered, one, keys_of(*range(4))) == 0


def test_an_unknown_namespace_and_too_many_purges_are_refused(sim: SimStore) -> None:
    with pytest.raises(MisuseError, match="unknown"):
        sim.store.care.purges.purge(bytes(32), lambda found: None)
    spaces = [sim.namespace(str(number)) for number in range(purge_module.RUNNING_MAX + 1)]
    for space in spaces:
        sim.store.reserve(ENGINE, space, keys_of(1), LENGTH)
    answers = [begin(sim, space) for space in spaces[:-1]]
    with pytest.raises(NoSpaceError):
        begin(sim, spaces[-1])
    sim.store.engine_gone(ENGINE)
    sim.runtime.run_until(lambda: all(answers))
    assert purge(sim, spaces[-1])["held_slots"] == 0
    sim.store.check_integrity()
