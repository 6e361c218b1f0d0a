"""The faulty slabs, which other tests rely on: each fault does what it says and nothing else."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import FAULTS, Fault, FaultSlab, MemorySlab, keyed_bytes
from ebbtide.tiers.slab import SlabFile

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
PIECES = 64
ERRNOS = {Fault.ENOSPC: errno.ENOSPC, Fault.EDQUOT: errno.EDQUOT, Fault.EROFS: errno.EROFS}


@pytest.fixture
def device() -> MemorySlab:
    return MemorySlab(PIECES * PAGE)


def pages(content: bytes, count: int = PIECES) -> list[memoryview]:
    return [memoryview(content * (count * PAGE))]


def piece_contents(device: MemorySlab) -> list[bytes]:
    """Per piece the one byte that it is full of."""
    found = [bytes(device.image[at : at + PAGE]) for at in range(0, PIECES * PAGE, PAGE)]
    assert all(piece == piece[:1] * PAGE for piece in found), "a piece is torn"
    return [piece[:1] for piece in found]


@pytest.mark.parametrize("fault", ERRNOS)
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_refusal_has_its_error_number_and_changes_nothing(
    device: MemorySlab, operation: str, fault: Fault
) -> None:
    slab = FaultSlab(device)
    slab.write(0, pages(b"o"))
    slab.fail_next(operation, fault)
    with pytest.raises(OSError, match=fault.name) as caught:
        slab.write(0, pages(b"n")) if operation == "write" else slab.sync()
    assert caught.value.errno == ERRNOS[fault]
    assert piece_contents(device) == [b"o"] * PIECES
    device.lose_power(Random(1))
    assert b"\0" in piece_contents(device)  # nothing was synced


@pytest.mark.parametrize("operation", FAULTS)
def test_a_fault_that_the_operation_cannot_meet_is_refused(
    device: MemorySlab, operation: str
) -> None:
    slab = FaultSlab(device)
    for fault in Fault:
        if fault in FAULTS[operation]:
            slab.fail_next(operation, fault)
        else:
            with pytest.raises(ValueError, match=fault.name):
                slab.fail_next(operation, fault)


def test_a_short_read_looks_as_that_of_a_file_that_was_cut(tmp_path: Path) -> None:
    with (
        mmap.mmap(-1, 8 * PAGE) as buffer,
        memoryview(buffer) as view,
        closing(SlabFile(str(tmp_path / "slab"), 8 * PAGE)) as file,
    ):
        file.write(0, [view])
        os.truncate(tmp_path / "slab", 3 * PAGE)
        with pytest.raises(OSError, match=r"short read: 12288 of 32768 bytes at 0") as real:
            file.read(0, [view])
    slab = FaultSlab(MemorySlab(8 * PAGE), seed=1)
    slab.write(0, pages(b"x", 8))
    slab.fail_next("read", Fault.SHORT)
    target = memoryview(bytearray(8 * PAGE))
    halves = [target[: 4 * PAGE], target[4 * PAGE :]]
    with pytest.raises(OSError, match=r"short read: \d+ of 32768 bytes at 0") as injected:
        slab.read(0, halves)
    assert injected.value.errno == real.value.errno == errno.EIO
    got = int(str(injected.value).split()[4])
    assert 0 < got < 8 * PAGE
    assert target.tobytes() == b"x" * got + bytes(8 * PAGE - got)


def test_a_short_write_leaves_its_first_part(device: MemorySlab) -> None:
    slab = FaultSlab(device, seed=1)
    slab.fail_next("write", Fault.SHORT)
    with pytest.raises(OSError, match=r"short write: \d+ of 262144 bytes at 0") as caught:
        slab.write(0, pages(b"n"))
    written = int(str(caught.value).split()[4]) // PAGE
    assert 0 < written < PIECES
    assert piece_contents(device) == [b"n"] * written + [b"\0"] * (PIECES - written)


def test_a_lost_sync_covers_nothing_until_an_honest_one_does(device: MemorySlab) -> None:
    slab = FaultSlab(device)
    slab.write(0, pages(b"o"))
    slab.fail_next("sync", Fault.LOST)
    slab.sync()
    device.lose_power(Random(1))
    assert set(piece_contents(device)) == {b"\0", b"o"}
    assert device.lost == {n * PAGE for n in range(PIECES) if device.image[n * PAGE] == 0}
    slab.write(0, pages(b"n"))
    slab.fail_next("sync", Fault.LOST)
    slab.sync()
    slab.sync()
    device.lose_power(Random(2))
    assert (piece_contents(device), device.lost) == ([b"n"] * PIECES, set())


def test_a_reordered_sync_covers_some_pieces_and_leaves_the_rest_to_chance() -> None:
    """Whatever a piece shows after the cut, it is never older than what a sync covered."""
    seen: set[tuple[bytes, ...]] = set()
    for seed in range(20):
        device = MemorySlab(PIECES * PAGE)
        slab = FaultSlab(device, seed=seed)
        slab.write(0, pages(b"a"))
        slab.sync()
        slab.write(0, pages(b"b"))
        slab.write(0, pages(b"c"))
        slab.fail_next("sync", Fault.REORDERED)
        slab.sync()
        assert piece_contents(device) == [b"c"] * PIECES  # the cache still has it all
        device.lose_power(Random(100 + seed))
        found = piece_contents(device)
        assert found.count(b"c") > PIECES // 2  # a cut without that sync keeps half
        seen.add(tuple(found))
    assert len(seen) == 20
    assert {content for found in seen for content in found} == {b"a", b"b", b"c"}


def test_a_reordered_sync_never_brings_back_what_was_written_before() -> None:
    """A drive that has put the second write on its medium does not put the first there later."""
    for seed in range(20):
        device = MemorySlab(PAGE)
        device.write(0, pages(b"a", 1))
        device.write(0, pages(b"b", 1))
        device.sync_some(Random(seed))
        covered = bytes(device._stable[:1])
        device.lose_power(Random(100 + seed))
        assert bytes(device.image[:1]) >= covered


def test_a_devices_faults_outlast_the_slab_that_is_opened_over_it(device: MemorySlab) -> None:
    rates: dict[tuple[str, Fault], float] = {}
    first, second = FaultSlab(device, rates=rates), FaultSlab(device, rates=rates)
    first.write(0, [memoryview(keyed_bytes(b"x", PAGE))])
    rates["write", Fault.EROFS] = 1.0
    for slab in (first, second):
        with pytest.raises(OSError, match="EROFS"):
            slab.write(0, pages(b"n"))
    rates.clear()
    second.write(0, pages(b"n"))
