"""Records verified beside a store that serves: every one once, none of them used or stalled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.errors import EbbtideError, NoSpaceError, TierUnavailableError
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import check as check_module
from ebbtide.tiers.runtime import READ

if TYPE_CHECKING:
    from ebbtide.testing import SimStore
    from ebbtide.tiers.disk import DiskTier

PAGE = 4096
LENGTH = PAGE - 100
RECORDS = 40


def disk_of(sim: SimStore) -> DiskTier:
    assert sim.store.disk is not None
    return sim.store.disk


def fill(sim: SimStore, count: int = RECORDS) -> None:
    sim.put(sim.namespace(), [key_of(number) for number in range(count)], LENGTH)
    assert sim.drain()


def piece(sim: SimStore, start: int) -> dict[str, Any] | EbbtideError:
    answers: list[dict[str, Any] | EbbtideError] = []
    sim.store.care.checks.check(start, answers.append)
    sim.runtime.run_until(lambda: bool(answers))
    return answers[0]


def check_all(sim: SimStore) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    start: int | None = 0
    while start is not None:
        found = piece(sim, start)
        assert isinstance(found, dict)
        pieces.append(found)
        start = found["next"]
    return pieces


def total(pieces: list[dict[str, Any]], what: str) -> int:
    return sum(piece[what] for piece in pieces)


def test_every_record_is_verified_once_in_small_pieces(tiered: SimStore) -> None:
    fill(tiered)
    pieces = check_all(tiered)
    assert [piece["records"] for piece in pieces] == [16, 16, 8]
    assert total(pieces, "sound") == RECORDS
    assert total(pieces, "payload_bytes") == RECORDS * LENGTH
    assert total(pieces, "slot_bytes") == RECORDS * PAGE
    assert pieces[0]["bad"] == {}


def test_a_piece_is_bounded_in_bytes_and_a_larger_record_is_a_piece(
    tiered: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tiered, 6)
    monkeypatch.setattr(check_module, "BYTES_MAX", 2 * PAGE + 1)
    assert [piece["records"] for piece in check_all(tiered)] == [2, 2, 2]
    monkeypatch.setattr(check_module, "BYTES_MAX", 1)
    assert [piece["records"] for piece in check_all(tiered)] == [1] * 6


def test_a_stretch_without_records_is_passed_over(
    tiered: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tiered)
    disk = disk_of(tiered)
    epoch = tiered.namespace().epoch
    for number in range(20):
        record = disk.find(epoch, key_of(number))
        assert record is not None
        disk.discard(record)
    monkeypatch.setattr(check_module, "ROWS_MAX", 8)
    pieces = check_all(tiered)
    assert total(pieces, "records") == RECORDS - 20
    assert any(not piece["records"] for piece in pieces)


@pytest.mark.parametrize("start", [RECORDS, 1 << 40, (1 << 64) - 1])
def test_behind_the_last_record_there_is_nothing(tiered: SimStore, start: int) -> None:
    fill(tiered)
    found = piece(tiered, start)
    assert isinstance(found, dict)
    assert (found["records"], found["next"]) == (0, None)


def test_a_corrupt_record_is_reported_and_a_miss_from_then_on(tiered: SimStore) -> None:
    fill(tiered)
    disk, space = disk_of(tiered), tiered.namespace()
    record = disk.find(space.epoch, key_of(3))
    assert record is not None
    assert tiered.slab is not None
    tiered.slab.flip_at_rest(record.offset + 7)
    pieces = check_all(tiered)
    assert [piece["bad"] for piece in pieces if piece["bad"]] == [{"corrupt": 1}]
    assert total(pieces, "sound") == RECORDS - 1
    assert disk.find(space.epoch, key_of(3)) is None
    assert disk.quarantined_bytes == PAGE
    assert total(check_all(tiered), "sound") == RECORDS - 1


def test_a_record_that_cannot_be_read_costs_no_neighbour(tiered: SimStore) -> None:
    fill(tiered)
    assert tiered.slab is not None
    tiered.slab.fail_next("read")
    pieces = check_all(tiered)
    assert [piece["bad"] for piece in pieces if piece["bad"]] == [{"unreadable": 1}]
    assert total(pieces, "sound") == RECORDS - 1


def test_to_be_checked_is_no_use_of_a_record(tiered: SimStore) -> None:
    fill(tiered)
    disk = disk_of(tiered)
    before = disk.index.recency()().tolist()
    check_all(tiered)
    assert disk.index.recency()().tolist() == before
    assert not disk.index.table.pins.any()
    disk.check_integrity()


def test_a_record_that_is_evicted_while_it_is_read_is_no_error(tiered: SimStore) -> None:
    fill(tiered, 8)
    disk = disk_of(tiered)
    answers: list[dict[str, Any] | EbbtideError] = []
    tiered.runtime.hold(READ)
    tiered.store.care.checks.check(0, answers.append)
    tiered.runtime.settle()
    for record in disk.index.records_of(tiered.namespace().epoch):
        disk.evict([record.row], record.epoch)
    assert tiered.flush()
    used = disk.space.used_bytes
    assert used == 8 * PAGE  # nobody is given a slot that is being read
    tiered.runtime.let_go(READ)
    tiered.runtime.run_until(lambda: bool(answers))
    (found,) = answers
    assert isinstance(found, dict)
    assert (found["sound"], found["bad"]) == (8, {})
    assert tiered.flush()
    assert disk.space.used_bytes == 0
    disk.check_integrity()


def test_a_namespace_that_is_reset_while_it_is_read_is_no_error(tiered: SimStore) -> None:
    fill(tiered, 8)
    answers: list[dict[str, Any] | EbbtideError] = []
    tiered.runtime.hold(READ)
    tiered.store.care.checks.check(0, answers.append)
    tiered.store.reset(tiered.namespace(), lambda ok: None)
    tiered.runtime.let_go(READ)
    tiered.runtime.run_until(lambda: bool(answers))
    (found,) = answers
    assert isinstance(found, dict)
    assert (found["sound"], found["garbage"], found["bad"]) == (0, 8, {})


def test_a_load_pins_what_is_being_checked_against_eviction(tiered: SimStore) -> None:
    fill(tiered, 4)
    disk, space = disk_of(tiered), tiered.namespace()
    record = disk.find(space.epoch, key_of(0))
    assert record is not None
    disk.pin(record, hide=False)
    disk.pin(record)
    assert record.row not in disk.space.coldest_first()
    assert not disk.index.unpin(record.row)
    assert not disk.index.unpin(record.row)
    assert record.row in disk.space.coldest_first()


def test_pieces_wait_for_each_other_and_too_many_are_refused(tiered: SimStore) -> None:
    fill(tiered)
    answers: list[dict[str, Any] | EbbtideError] = []
    tiered.runtime.hold(READ)
    for _ in range(1 + check_module.WAITING_MAX):
        tiered.store.care.checks.check(0, answers.append)
    with pytest.raises(NoSpaceError):
        tiered.store.care.checks.check(0, answers.append)
    tiered.runtime.settle()
    assert tiered.runtime.waiting(READ) == check_module.RECORDS_MAX
    tiered.runtime.let_go(READ)
    tiered.runtime.run_until(lambda: len(answers) == 1 + check_module.WAITING_MAX)


def test_a_tier_that_is_down_or_not_there_is_an_error_and_not_a_report(
    tiered: SimStore, sim: SimStore
) -> None:
    assert isinstance(piece(sim, 0), TierUnavailableError)
    disk_of(tiered).go_down("made up")
    found = piece(tiered, 0)
    assert isinstance(found, TierUnavailableError)
    assert "made up" in str(found)


def test_a_tier_that_goes_down_under_a_piece_fails_it(tiered: SimStore) -> None:
    fill(tiered)
    answers: list[dict[str, Any] | EbbtideError] = []
    tiered.runtime.hold(READ)
    tiered.store.care.checks.check(0, answers.append)
    disk_of(tiered).go_down("made up")
    tiered.runtime.let_go(READ)
    tiered.runtime.run_until(lambda: bool(answers))
    assert isinstance(answers[0], TierUnavailableError)
