"""Writes hold back while somebody reads, and never for good."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from ebbtide.tiers import reads_first
from ebbtide.tiers.reads_first import BESIDE_READS_BYTES, ReadsFirst

PATIENCE_S = 30.0
HALF = BESIDE_READS_BYTES // 2


@pytest.fixture(autouse=True)
def no_lull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads must say so here: time plays no part."""
    monkeypatch.setattr(reads_first, "LULL_S", 0.001)


class Write:
    """One in a thread, that lasts until `end`."""

    def __init__(self, reads: ReadsFirst, size_bytes: int) -> None:
        self.begun, self._over = Event(), Event()

        def write() -> None:
            with reads.write(size_bytes):
                self.begun.set()
                self._over.wait(PATIENCE_S)

        self._thread = Thread(target=write)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)


def test_without_a_read_writes_go_side_by_side() -> None:
    reads = ReadsFirst()
    writes = [Write(reads, 4 * BESIDE_READS_BYTES) for _ in range(4)]
    assert all(write.begun.wait(PATIENCE_S) for write in writes)
    for write in writes:
        write.end()


def test_beside_a_read_few_bytes_are_written_and_the_next_go_in_turn() -> None:
    reads = ReadsFirst()
    reads.read_began()
    first, second = Write(reads, HALF), Write(reads, HALF)
    assert first.begun.wait(PATIENCE_S)
    assert second.begun.wait(PATIENCE_S)
    third = Write(reads, HALF)
    assert not third.begun.wait(0.05)
    first.end()
    assert third.begun.wait(PATIENCE_S)
    second.end()
    third.end()


def test_one_write_goes_however_large_it_is_and_however_long_somebody_reads() -> None:
    reads = ReadsFirst()
    reads.read_began()
    for _ in range(3):
        write = Write(reads, 100 * BESIDE_READS_BYTES)
        assert write.begun.wait(PATIENCE_S)
        write.end()


def test_when_the_last_read_has_ended_the_others_go_too() -> None:
    reads = ReadsFirst()
    reads.read_began()
    reads.read_began()
    first = Write(reads, BESIDE_READS_BYTES)
    assert first.begun.wait(PATIENCE_S)
    second = Write(reads, BESIDE_READS_BYTES)
    reads.read_ended()
    assert not second.begun.wait(0.05)
    reads.read_ended()
    assert second.begun.wait(PATIENCE_S)
    first.end()
    second.end()


def test_a_write_that_fails_makes_way() -> None:
    reads = ReadsFirst()
    reads.read_began()
    with pytest.raises(OSError, match="drive"), reads.write(BESIDE_READS_BYTES):
        raise OSError("drive")
    write = Write(reads, BESIDE_READS_BYTES)
    assert write.begun.wait(PATIENCE_S)
    write.end()


def test_who_reads_one_record_after_the_other_is_still_reading_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads_first, "LULL_S", 1000.0)
    reads = ReadsFirst()
    assert not reads.reading
    reads.read_began()
    reads.read_ended()
    assert reads.reading
