"""The slab file, direct and buffered."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING

import pytest

from ebbtide.errors import ConfigError
from ebbtide.testing import Fault, FaultSlab, MemorySlab, keyed_bytes
from ebbtide.tiers import slab as slab_module
from ebbtide.tiers.slab import SlabFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PAGE = 4096


@pytest.fixture
def pages() -> memoryview:
    """16 aligned pages, as the arena's are."""
    return memoryview(mmap.mmap(-1, 16 * PAGE))


@pytest.fixture(params=["direct", "no flag", "flag but no I/O"])
def slab(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlabFile]:
    real = slab_module._open
    if request.param == "no flag":
        monkeypatch.setattr(slab_module, "_open", lambda p, flags: -1 if flags else real(p, 0))
    if request.param == "flag but no I/O":
        monkeypatch.setattr(slab_module, "_direct_works", lambda fd, size: False)
    with closing(SlabFile(str(tmp_path / "slab"), 64 * PAGE)) as made:
        if request.param == "direct" and not made.direct:
            pytest.skip("NO O_DIRECT on the file system of tmp_path")
        assert made.direct is (request.param == "direct")
        yield made


def test_a_run_of_views_is_written_and_read_back(slab: SlabFile, pages: memoryview) -> None:
    parts = [pages[:PAGE], pages[3 * PAGE : 5 * PAGE], pages[8 * PAGE : 9 * PAGE]]
    for number, part in enumerate(parts):
        part[:] = keyed_bytes(bytes([number]), len(part))
    slab.write(8 * PAGE, parts)
    slab.sync()
    for part in parts:
        part[:] = bytes(len(part))
    slab.read(8 * PAGE, parts)
    for number, part in enumerate(parts):
        assert part == keyed_bytes(bytes([number]), len(part))


def test_it_is_allocated_in_full_and_private(slab: SlabFile, tmp_path: Path) -> None:
    found = (tmp_path / "slab").stat()
    assert found.st_size == 64 * PAGE
    assert found.st_blocks * 512 >= 64 * PAGE
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_a_short_read_is_an_io_error(slab: SlabFile, pages: memoryview, tmp_path: Path) -> None:
    os.truncate(tmp_path / "slab", 10 * PAGE)
    for offset in (9 * PAGE, 10 * PAGE, 40 * PAGE):
        with pytest.raises(OSError, match="short read") as caught:
            slab.read(offset, [pages[: 4 * PAGE]])
        assert caught.value.errno == errno.EIO


def test_a_short_write_is_an_io_error(
    slab: SlabFile, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real(fd, list(views)[:1], at))
    with pytest.raises(OSError, match="short write") as caught:
        slab.write(0, [pages[:PAGE], pages[PAGE : 2 * PAGE]])
    assert caught.value.errno == errno.EIO


def test_a_new_size_keeps_what_is_inside(tmp_path: Path, pages: memoryview) -> None:
    pages[:PAGE] = keyed_bytes(b"x", PAGE)
    for size in (32, 8, 64):
        with closing(SlabFile(str(tmp_path / "slab"), size * PAGE)) as slab:
            if size == 32:
                slab.write(4 * PAGE, [pages[:PAGE]])
            slab.read(4 * PAGE, [pages[PAGE : 2 * PAGE]])
            assert pages[PAGE : 2 * PAGE] == pages[:PAGE]
        assert os.path.getsize(tmp_path / "slab") == size * PAGE


def test_a_device_or_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slab")
    with pytest.raises((ConfigError, OSError)):
        SlabFile(str(tmp_path / "slab"), 4 * PAGE)


def test_no_space_is_an_error_at_once_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no room.*slab_bytes=1125899906842624.*Free space"):
        SlabFile(str(tmp_path / "slab"), 1 << 50)
    assert (tmp_path / "slab").stat().st_blocks == 0


def test_closing_twice_is_no_error(tmp_path: Path) -> None:
    slab = SlabFile(str(tmp_path / "slab"), 4 * PAGE)
    slab.close()
    slab.close()


# -- the faulty slabs, which other tests rely on --------------------------------------------------


def test_a_power_cut_keeps_what_was_synced_and_some_pieces_of_the_rest() -> None:
    slab, old, new = MemorySlab(64 * PAGE), b"o" * 32 * PAGE, b"n" * 64 * PAGE
    slab.write(0, [memoryview(old)])
    slab.sync()
    slab.write(0, [memoryview(new)])
    assert slab.image == new
    slab.lose_power(Random(1))
    pieces = [slab.image[at : at + PAGE] for at in range(0, 64 * PAGE, PAGE)]
    assert {bytes(set(piece)) for piece in pieces[:32]} == {b"o", b"n"}
    assert {bytes(set(piece)) for piece in pieces[32:]} == {b"\0", b"n"}


@pytest.mark.parametrize("over", ["memory", "file"])
def test_faults_happen_as_planned_and_only_then(
    over: str, tmp_path: Path, pages: memoryview
) -> None:
    inner = MemorySlab(16 * PAGE) if over == "memory" else SlabFile(str(tmp_path / "s"), 16 * PAGE)
    slab = FaultSlab(inner, seed=1)
    data, back = pages[: 2 * PAGE], pages[4 * PAGE : 6 * PAGE]
    data[:] = keyed_bytes(b"x", 2 * PAGE)
    slab.write(0, [data])
    slab.sync()
    for operation in ("write", "read", "sync"):
        slab.fail_next(operation)
    with pytest.raises(OSError, match="injected: write"):
        slab.write(0, [back])
    with pytest.raises(OSError, match="injected: read"):
        slab.read(0, [back])
    with pytest.raises(OSError, match="injected: sync"):
        slab.sync()
    slab.read(0, [back])
    assert back == data
    slab.flip_at_rest(PAGE + 7, bit=3)
    slab.read(0, [back])
    assert differing_bits(back, data) == [(PAGE + 7, 1 << 3)]
    slab.flip_at_rest(PAGE + 7, bit=3)
    slab.fail_next("read", Fault.FLIP)
    slab.read(0, [back])
    assert len(differing_bits(back, data)) == 1
    assert [entry.name for entry in slab.log].count("read") == 4
    assert slab.counts == {Fault.EIO: 3, Fault.FLIP: 1}
    slab.close()


def differing_bits(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    return [(at, a ^ b) for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_a_torn_write_leaves_the_first_part(pages: memoryview) -> None:
    slab = FaultSlab(MemorySlab(16 * PAGE))
    pages[: 4 * PAGE] = b"x" * 4 * PAGE
    slab.fail_next("write", Fault.TORN)
    with pytest.raises(OSError, match="TORN"):
        slab.write(0, [pages[n * PAGE : (n + 1) * PAGE] for n in range(4)])
    slab.read(0, [pages[: 4 * PAGE]])
    assert pages[: 4 * PAGE] == b"x" * 2 * PAGE + bytes(2 * PAGE)
