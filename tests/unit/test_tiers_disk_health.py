"""A disk tier that fails or hangs goes out of service, visibly, and comes back whole."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from ebbtide.errors import TierUnavailableError
from ebbtide.testing import Fault, SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import disk_health
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.disk_health import LOOK_S, RETRY_FIRST_S, STALL_S
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import COMMIT, READ, REOPEN, WRITE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.disk_health import DiskHealth
    from ebbtide.tiers.slab import Slab

PAGE = 4096
LENGTH = PAGE - 100
BACK_S = RETRY_FIRST_S + 2 * LOOK_S


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimStore]:
    """Memory of 16 slots over a disk of 64; everything is written soon."""
    with SimStore(
        7,
        16 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=64 * PAGE,
        commit_batch_bytes=4 * PAGE,
        bounds=Bounds.for_capacity(16 * PAGE, write_after_s=0.0),
        reopens=True,
    ) as store:
        yield store


def disk_of(sim: SimStore) -> DiskTier:
    assert sim.store.disk is not None
    return sim.store.disk


def health_of(sim: SimStore) -> DiskHealth:
    assert sim.health is not None
    return sim.health


def fail(sim: SimStore, operation: str, fault: Fault = Fault.EIO, times: int = 1) -> None:
    assert sim.slab is not None
    sim.slab.fail_next(operation, fault, times)


def keys(first: int, end: int) -> list[bytes]:
    return [key_of(n) for n in range(first, end)]


def contents(sim: SimStore, wanted: list[bytes]) -> list[bytes]:
    return [sim.content(sim.namespace(), key, LENGTH) for key in wanted]


def take_down(sim: SimStore, held: int, end: int, operation: str = "sync") -> None:
    """Store `held` keys on disk; then the drive fails while it is given those up to `end`."""
    sim.put(sim.namespace(), keys(0, held), LENGTH)
    assert sim.drain()
    fail(sim, operation)
    sim.put(sim.namespace(), keys(held, end), LENGTH)
    sim.runtime.pass_time(1.0)
    assert disk_of(sim).down


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_tier_that_failed_comes_back_with_all_that_was_committed(
    sim: SimStore, operation: str
) -> None:
    space = sim.namespace()
    take_down(sim, 20, 24, operation)  # more than memory holds
    assert sim.get(space, keys(0, 1)) == [Miss.IO_ERROR]
    assert sim.get(space, keys(20, 24)) == contents(sim, keys(20, 24))  # memory works on
    sim.runtime.pass_time(BACK_S)
    assert disk_of(sim).down is None
    assert health_of(sim).reopened == 1
    assert sim.get(space, keys(0, 24)) == contents(sim, keys(0, 24))
    assert sim.drain()
    sim.lose_power()
    assert sim.get(sim.namespace(), keys(0, 24)) == contents(sim, keys(0, 24))


def test_it_stays_down_while_a_probe_fails_and_asks_ever_less_often(sim: SimStore) -> None:
    space = sim.namespace()
    take_down(sim, 4, 6)
    before = health_of(sim)
    tries = 0

    def failing(reopen: object) -> object:
        def tried() -> object:
            nonlocal tries
            tries += 1
            raise OSError(errno.EIO, "injected")

        return tried

    working = before._reopen
    before._reopen = failing(working)  # type: ignore[assignment]
    sim.runtime.pass_time(100.0)
    assert disk_of(sim).down
    assert 3 <= tries <= 6
    before._reopen = working
    sim.runtime.pass_time(disk_health.RETRY_MAX_S + 2 * LOOK_S)
    assert disk_of(sim).down is None
    assert sim.get(space, keys(0, 6)) == contents(sim, keys(0, 6))


def test_a_tier_that_fails_again_and_again_as_soon_as_it_is_back_comes_back_ever_less_often(
    sim: SimStore,
) -> None:
    """A probe cannot see everything: an index without room takes a small commit and no large."""
    take_down(sim, 4, 6)
    waits = [0] * 6
    for number in range(len(waits)):
        while disk_of(sim).down:
            sim.runtime.pass_time(LOOK_S)
            waits[number] += 1
        disk_of(sim).go_down("injected")
    assert waits == sorted(waits)
    assert waits[0] < 2 * RETRY_FIRST_S < waits[1]
    assert disk_health.RETRY_MAX_S <= waits[-1] * LOOK_S < disk_health.RETRY_MAX_S + 3 * LOOK_S
    sim.runtime.pass_time(2 * disk_health.RETRY_MAX_S + 2 * BACK_S)  # well for long
    assert disk_of(sim).down is None
    disk_of(sim).go_down("injected")
    sim.runtime.pass_time(BACK_S)
    assert disk_of(sim).down is None


def test_a_drive_that_writes_other_bytes_than_it_was_given_does_not_come_back(
    sim: SimStore,
) -> None:
    take_down(sim, 4, 6)
    opened, on_device = sim.open_disk, sim._on_device
    assert opened is not None

    def flipping(file: Slab) -> Slab:
        slab = on_device(file)
        fail(sim, "write", Fault.FLIP, times=9)
        return slab

    opened._wrap_slab = flipping
    sim.runtime.pass_time(BACK_S)
    assert disk_of(sim).down
    opened._wrap_slab = on_device
    sim.runtime.pass_time(3 * BACK_S)
    assert disk_of(sim).down is None


@pytest.mark.parametrize("pool", [WRITE, COMMIT, READ])
def test_a_drive_that_hangs_is_put_out_of_service_and_comes_back_when_it_answers(
    sim: SimStore, pool: str
) -> None:
    space = sim.namespace()
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    sim.runtime.hold(pool)
    if pool == READ:
        sim.store.load(b"engine", space, keys(0, 2), Deaf())
    else:
        sim.put(space, keys(20, 24), LENGTH)
    sim.runtime.pass_time(STALL_S - 2 * LOOK_S)
    assert disk_of(sim).down is None
    sim.runtime.pass_time(4 * LOOK_S)
    assert "not answered" in (disk_of(sim).down or "")
    assert sim.store.lookup(space, keys(3, 4)) == bytes([Miss.IO_ERROR])
    sim.runtime.pass_time(100.0)
    assert disk_of(sim).down  # files are in use as long as a thread hangs in them
    sim.runtime.let_go(pool)
    sim.runtime.pass_time(BACK_S)
    assert disk_of(sim).down is None
    sim.store.engine_gone(b"engine")
    wanted = keys(0, 20 if pool == READ else 24)
    assert sim.get(space, wanted) == contents(sim, wanted)


@pytest.mark.parametrize("pool", [READ, WRITE, COMMIT])
def test_a_store_that_was_stopped_does_not_blame_its_drive(sim: SimStore, pool: str) -> None:
    space, runtime = sim.namespace(), sim.runtime
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    runtime.hold(pool)
    if pool == READ:
        sim.store.load(b"engine", space, keys(0, 2), Deaf())
    else:
        sim.put(space, keys(20, 24), LENGTH)
    runtime.pass_time(2 * LOOK_S)
    assert disk_of(sim).waiting_since() is not None
    runtime.stand_still(10 * STALL_S)
    runtime.pass_time(STALL_S - LOOK_S)
    assert disk_of(sim).down is None
    runtime.pass_time(3 * LOOK_S)  # it runs, and the drive has had its time
    assert "not answered for 11 s" in (disk_of(sim).down or "")
    runtime.let_go(pool)
    sim.store.engine_gone(b"engine")


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EDQUOT, Fault.EROFS])
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_p59_a_drive_that_takes_nothing_costs_the_tier_and_nothing_else(
    sim: SimStore, operation: str, fault: Fault
) -> None:
    """No room, no quota, a read-only file system: for a while, or until somebody sees to it."""
    space = sim.namespace()
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    sim.rates[operation, fault] = 1.0
    assert sim.put(space, keys(20, 24), LENGTH) == bytes(4)
    assert not sim.drain()
    assert fault.name in (disk_of(sim).down or "")
    assert sim.store.stats()["disk"]["down"] == disk_of(sim).down  # type: ignore[index]
    assert sim.get(space, keys(0, 1)) == [Miss.IO_ERROR]
    assert sim.get(space, keys(20, 24)) == contents(sim, keys(20, 24))
    assert sim.put(space, keys(24, 26), LENGTH) == bytes(2)  # memory works on
    assert sim.get(space, keys(24, 26)) == contents(sim, keys(24, 26))
    sim.runtime.pass_time(300.0)
    assert (bool(disk_of(sim).down), health_of(sim).reopened) == (True, 0)  # as long as it is so
    sim.rates.clear()
    sim.runtime.pass_time(disk_health.RETRY_MAX_S + 2 * LOOK_S)
    assert disk_of(sim).down is None
    assert sim.drain()
    assert sim.get(space, keys(0, 26)) == contents(sim, keys(0, 26))
    sim.lose_power()
    assert sim.get(sim.namespace(), keys(0, 26)) == contents(sim, keys(0, 26))


def test_p40_a_record_at_a_drives_early_end_is_a_miss_and_the_tier_stays(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    fail(sim, "read", Fault.SHORT)
    assert sim.get(space, keys(0, 1)) == [Miss.IO_ERROR]
    assert (disk_of(sim).down, disk_of(sim).corrupt) == (None, 0)
    assert sim.get(space, keys(1, 20)) == contents(sim, keys(1, 20))


@pytest.mark.parametrize("pool", [WRITE, COMMIT, READ])
@pytest.mark.parametrize("delay_s", [STALL_S / 2, 2 * STALL_S])
def test_a_slow_drive_is_waited_for_and_a_very_slow_one_goes_down_until_it_has_answered(
    sim: SimStore, pool: str, delay_s: float
) -> None:
    space = sim.namespace()
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    sim.runtime.slow(pool, delay_s)
    if pool == READ:
        sim.store.load(b"engine", space, keys(0, 2), Deaf())
    else:
        sim.put(space, keys(20, 24), LENGTH)
    sim.runtime.pass_time(STALL_S + 3 * LOOK_S)
    assert bool(disk_of(sim).down) == (delay_s > STALL_S)
    sim.runtime.slow(pool, 0.0)
    sim.runtime.pass_time(delay_s + BACK_S)
    assert (disk_of(sim).down, health_of(sim).reopened) == (None, int(delay_s > STALL_S))
    sim.store.engine_gone(b"engine")
    wanted = keys(0, 20 if pool == READ else 24)
    assert sim.get(space, wanted) == contents(sim, wanted)


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.REORDERED])
def test_p57_a_sync_that_lied_costs_records_at_a_power_cut_and_shows_none_wrong(
    sim: SimStore, fault: Fault
) -> None:
    sim.put(sim.namespace(), keys(0, 16), LENGTH)
    assert sim.drain()
    sim.rates["sync", fault] = 1.0
    sim.put(sim.namespace(), keys(16, 28), LENGTH)
    assert sim.drain()  # nobody is told
    sim.lose_power()
    space = sim.namespace()
    spoilt = len(sim.device.lost)
    assert 0 < spoilt < 12
    assert sim.get(space, keys(0, 16)) == contents(sim, keys(0, 16))
    answers = dict(zip(keys(16, 28), sim.get(space, keys(16, 28)), strict=True))
    served = [key for key, found in answers.items() if isinstance(found, bytes)]
    assert [answers[key] for key in served] == contents(sim, served)
    assert [answers[key] for key in answers if key not in served] == [Miss.CORRUPT] * spoilt
    assert disk_of(sim).corrupt == spoilt


def test_a_reset_while_it_was_down_holds_when_it_is_back(sim: SimStore) -> None:
    space = sim.namespace()
    take_down(sim, 20, 21)
    answers: list[bool] = []
    sim.store.reset(space, answers.append)
    sim.runtime.run_until(lambda: bool(answers))
    assert answers == [False]  # the drive still holds it
    sim.runtime.pass_time(BACK_S)
    assert disk_of(sim).down is None
    assert not any(isinstance(found, bytes) for found in sim.get(space, keys(0, 21)))
    assert sim.drain()
    sim.lose_power()
    assert not any(isinstance(found, bytes) for found in sim.get(sim.namespace(), keys(0, 21)))


def test_a_namespace_that_was_opened_while_it_was_down_is_stored_afterwards(sim: SimStore) -> None:
    take_down(sim, 1, 2)
    other = sim.namespace("seed:1")
    sim.put(other, keys(0, 3), LENGTH)
    sim.runtime.pass_time(BACK_S)
    assert sim.drain()
    sim.lose_power()
    other = sim.namespace("seed:1")
    assert sim.get(other, keys(0, 3)) == [sim.content(other, key, LENGTH) for key in keys(0, 3)]


def test_a_directory_that_is_another_one_now_is_left_alone(sim: SimStore, tmp_path: Path) -> None:
    """An unmounted file system: its mount point must not be filled."""
    space = sim.namespace()
    take_down(sim, 2, 3)
    (tmp_path / "d").rename(tmp_path / "away")
    (tmp_path / "d").mkdir()
    sim.runtime.pass_time(100.0)
    assert disk_of(sim).down
    assert os.listdir(tmp_path / "d") == []
    (tmp_path / "d").rmdir()
    (tmp_path / "away").rename(tmp_path / "d")
    sim.runtime.pass_time(100.0)
    assert disk_of(sim).down is None
    assert sim.get(space, keys(0, 3)) == contents(sim, keys(0, 3))


def test_closing_while_the_files_are_being_opened_leaves_none_open(sim: SimStore) -> None:
    sim.put(sim.namespace(), keys(0, 2), LENGTH)
    fail(sim, "sync")
    sim.runtime.hold(REOPEN)
    sim.runtime.pass_time(2 * BACK_S)
    assert health_of(sim).busy
    sim.runtime.let_go(REOPEN)
    sim.restart(clean=False)
    assert sim.drain()


def test_a_directory_is_not_given_up_while_a_thread_opens_it(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another store would take it, and the thread's probe would write into its slots."""
    monkeypatch.setattr("ebbtide.tiers.opening.REOPENING_PATIENCE_S", 0.05)
    opened = sim.open_disk
    assert opened is not None
    closed: list[bool] = []
    monkeypatch.setattr(opened.directory, "close", lambda: closed.append(True))
    with opened._reopening:
        opened.close()
        assert closed == []
    opened.close()
    assert closed == [True]
    opened._reopening.release()
    with pytest.raises(TierUnavailableError, match="closing"):
        opened.reopen()


# -- slots that show wrong bytes -------------------------------------------------------------------


def test_a_slot_that_showed_wrong_bytes_is_not_used_again(sim: SimStore) -> None:
    space, disk = sim.namespace(), disk_of(sim)
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    record = disk.find(space.epoch, key_of(0))
    assert record is not None
    bad = record.offset
    fail(sim, "read", Fault.FLIP)
    assert sim.get(space, keys(0, 1)) == [Miss.CORRUPT]
    assert (disk.corrupt, disk.quarantined_bytes) == (1, PAGE)
    for n in range(100, 300):
        sim.put(space, [key_of(n)], LENGTH)
        sim.runtime.settle()
    assert sim.drain()
    assert disk.down is None
    used = {each.offset for each in disk.index.records_of(space.epoch)}
    assert len(used) > 50
    assert bad not in used
    disk.check_integrity()


def test_a_size_that_no_segment_will_ever_hold_is_refused(sim: SimStore) -> None:
    """The slab is one segment here: a slot of it that is never freed keeps it at its size."""
    space, disk = sim.namespace(), disk_of(sim)
    sim.put(space, keys(0, 20), LENGTH)
    assert sim.drain()
    fail(sim, "read", Fault.FLIP)
    assert sim.get(space, keys(0, 1)) == [Miss.CORRUPT]
    assert disk.takes(space.epoch, LENGTH)
    assert not disk.takes(space.epoch, 2 * PAGE)
    sim.put(space, [key_of(500)], 2 * PAGE)
    sim.put(space, [key_of(501)], LENGTH)
    assert sim.drain()  # it would wait for ever
    assert disk.find(space.epoch, key_of(500)) is None
    assert disk.find(space.epoch, key_of(501)) is not None
    assert sim.restart()
    sim.put(sim.namespace(), [key_of(500)], 2 * PAGE)
    assert sim.drain()
    assert disk_of(sim).corrupt == 0


def test_a_drive_with_many_bad_slots_goes_out_of_service(sim: SimStore) -> None:
    space, disk = sim.namespace(), disk_of(sim)
    sim.put(space, keys(0, 40), LENGTH)
    assert sim.drain()
    fail(sim, "read", Fault.FLIP, times=100)
    for n in range(8):
        assert sim.get(space, keys(n, n + 1)) in ([Miss.CORRUPT], [Miss.IO_ERROR])
    assert "nobody wrote" in (disk.down or "")
    sim.runtime.pass_time(BACK_S)
    assert disk_of(sim).down is None
    assert sim.store.lookup(space, keys(20, 21)) == bytes([Place.DISK])
    assert sim.get(space, keys(20, 24)) == contents(sim, keys(20, 24))


class Deaf:
    """A sink that hears nothing."""

    def batch(self, *_: object) -> None: ...
    def failed(self, *_: object) -> None: ...
    def done(self) -> None: ...
    def over(self) -> None: ...
