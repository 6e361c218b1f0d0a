"""Many puts at once: in small pieces, each key once, whatever their order."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.disk_record import Put
from ebbtide.tiers.disk_writer import PUTS_AT_A_TIME, PUTS_BESIDE_READS
from ebbtide.tiers.reads_first import BESIDE_READS_BYTES
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.runtime import WRITE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.runs import Outcomes, Run

PAGE = 4096
MANY = 3 * PUTS_AT_A_TIME + 5


class Puts:
    """Puts at a disk tier, and what became of them."""

    def __init__(self, sim: SimStore) -> None:
        self.sim = sim
        self.space = sim.namespace()
        self.ended: Counter[tuple[bytes, Miss | None]] = Counter()

    @property
    def disk(self) -> DiskTier:
        assert self.sim.store.disk is not None
        return self.sim.store.disk

    def put(self, number: int, pages: int = 1, *, epoch: int | None = None) -> Put:
        key = key_of(number)
        view = memoryview(key.ljust(pages * PAGE, b"x"))
        digest = record_digest(view, record_seed(self.space.digest, key))

        def done(failure: Miss | None) -> None:
            self.ended[key, failure] += 1

        return Put(epoch or self.space.epoch, key, pages * PAGE, digest, view, done)

    def settled(self) -> dict[tuple[bytes, Miss | None], int]:
        """How each ended, once all have."""
        self.sim.runtime.run_until(lambda: self.disk.quiet)
        self.disk.check_integrity()
        return dict(self.ended)


@contextmanager
def puts_on(path: Path, slab_bytes: int) -> Iterator[Puts]:
    bounds = Bounds.for_capacity(8 * PAGE, write_after_s=0.0)
    with SimStore(1, 8 * PAGE, disk_path=str(path), slab_bytes=slab_bytes, bounds=bounds) as sim:
        yield Puts(sim)


@pytest.fixture
def puts(tmp_path: Path) -> Iterator[Puts]:
    with puts_on(tmp_path / "d", 2 * MANY * PAGE) as made:
        yield made


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Puts]:
    """On a slab of several segments."""
    with puts_on(tmp_path / "d", 16 << 20) as made:
        yield made


def test_many_puts_are_placed_a_few_at_a_time_and_others_come_between(puts: Puts) -> None:
    seen: list[int] = []
    puts.disk.put([puts.put(n) for n in range(MANY)])
    seen.append(puts.disk.records)
    for delay_s in (0.0, 0.0):
        puts.sim.runtime.call_later(delay_s, lambda: seen.append(puts.disk.records))
    ended = puts.settled()
    assert seen[0] == PUTS_AT_A_TIME
    assert PUTS_AT_A_TIME <= seen[1] < MANY
    assert ended == {(key_of(n), None): 1 for n in range(MANY)}


def test_beside_a_read_fewer_are_placed_at_a_time(puts: Puts) -> None:
    puts.disk.reads_first.read_began()
    puts.disk.put([puts.put(n) for n in range(MANY)])
    assert puts.disk.records == PUTS_BESIDE_READS < PUTS_AT_A_TIME
    assert len(puts.settled()) == MANY


@pytest.mark.parametrize("reading", [False, True])
def test_beside_a_read_a_call_writes_fewer_bytes(wide: Puts, reading: bool) -> None:
    puts, slab, reads_first = wide, wide.disk.slab, wide.disk.reads_first
    calls, turns = list[int](), list[int]()
    slab.runs_at_once = 64
    real = slab.write_runs

    def write_runs(runs: Sequence[Run]) -> Outcomes:
        calls.append(sum(run.size_bytes for run in runs))
        return real(runs)

    def take_turn(size_bytes: int) -> AbstractContextManager[None]:
        turns.append(size_bytes)
        return reads_first.write(size_bytes)

    slab.write_runs = write_runs  # type: ignore[method-assign]
    puts.disk.reads_first = Mock(wraps=reads_first, write=take_turn, reading=reading)
    sizes = (50, 51, 52)  # pages: slots of different sizes are no neighbours
    puts.disk.put([puts.put(pages, pages) for pages in sizes])
    assert puts.settled() == {(key_of(pages), None): 1 for pages in sizes}
    assert sum(calls) == sum(sizes) * PAGE > BESIDE_READS_BYTES
    assert turns == calls
    assert len(calls) == (2 if reading else 1)
    assert not reading or max(calls) <= BESIDE_READS_BYTES


def test_the_next_piece_waits_for_no_write(puts: Puts) -> None:
    puts.sim.runtime.hold(WRITE)
    puts.disk.put([puts.put(n) for n in range(MANY)])
    puts.sim.runtime.run_until(lambda: puts.disk.records == MANY)
    assert not puts.ended
    puts.sim.runtime.let_go(WRITE)
    assert len(puts.settled()) == MANY


def test_a_put_behind_a_pile_does_not_pass_it(puts: Puts) -> None:
    puts.disk.put([puts.put(n) for n in range(MANY)])
    puts.disk.put([puts.put(MANY)])
    assert puts.disk.records == PUTS_AT_A_TIME
    assert len(puts.settled()) == MANY + 1


def test_a_key_that_comes_twice_is_written_once(puts: Puts) -> None:
    puts.disk.put([puts.put(0)])
    puts.settled()
    puts.disk.put([puts.put(n) for n in (1, 0, 2, 1, 2, 0, 3)])
    assert puts.settled() == {(key_of(n), None): 2 if n < 3 else 1 for n in range(4)} | {
        (key_of(0), None): 3
    }
    assert puts.disk.write_bytes == 4 * PAGE
    written = sorted(puts.disk.index.records_of(puts.space.epoch), key=lambda r: r.sequence)
    assert [record.key for record in written] == [key_of(n) for n in range(4)]


def test_lengths_epochs_and_refusals_in_any_order(puts: Puts) -> None:
    unknown, huge = 999, puts.disk.space.largest_bytes // PAGE + 1
    mixed = [
        puts.put(0),
        puts.put(1, 3),
        puts.put(2, epoch=unknown),
        puts.put(3, 3),
        puts.put(4, huge),
        puts.put(5),
        puts.put(6, epoch=unknown),
    ]
    puts.disk.put(mixed)
    expected = {0: None, 1: None, 2: Miss.RESET, 3: None, 4: Miss.OVER_QUOTA, 5: None}
    expected[6] = Miss.RESET
    assert puts.settled() == {(key_of(n), reason): 1 for n, reason in expected.items()}


def test_a_tier_that_goes_down_between_two_pieces_fails_the_rest(puts: Puts) -> None:
    puts.disk.put([puts.put(n) for n in range(MANY)])
    puts.disk.go_down("pulled out")
    puts.sim.runtime.settle()
    assert sum(puts.ended.values()) == MANY
    assert {reason for _, reason in puts.ended} == {Miss.IO_ERROR}


def test_far_more_than_fits_is_written_as_the_coldest_go(puts: Puts) -> None:
    count = 8 * MANY
    puts.disk.put([puts.put(n) for n in range(count)])
    assert puts.settled() == {(key_of(n), None): 1 for n in range(count)}
    held = set(puts.disk.keys(puts.space.epoch))
    assert held.isdisjoint(key_of(n) for n in range(count - 3 * MANY))
    assert puts.disk.evicted == count - len(held)
