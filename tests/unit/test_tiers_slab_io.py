"""The compiled slab I/O: when it is taken, what a run comes to, that calls do not mix."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from ebbtide.compiled import PURE_VARIABLE
from ebbtide.testing import keyed_bytes
from ebbtide.tiers import slab_io
from ebbtide.tiers.runs import Run
from ebbtide.tiers.slab import SlabFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PAGE = mmap.PAGESIZE
RUNS = 200  # more than three times what is under way at a time
pytestmark = pytest.mark.usefixtures("compiled_afresh")


class Spy(ModuleType):
    """Moves as it should, but for what `damage` says, and remembers how many runs it was given."""

    def __init__(self, honest: slab_io.SlabIO, damage: str = "") -> None:
        super().__init__("spy")
        self.honest, self.damage = honest, damage
        self.DEPTH = honest.DEPTH
        self.calls: list[tuple[int, bool]] = []

    def has_queues(self) -> bool:
        return self.damage != "no queues" and self.honest.has_queues()

    def transfer(self, fd: int, runs: Sequence[Run], writes: bool) -> list[int]:
        self.calls.append((len(runs), writes))
        if self.damage == "swapped" and len(runs) > 2:
            runs = [Run(runs[1].offset, runs[0].views), *runs[1:]]
        if self.damage == "first view only":
            runs = [Run(run.offset, run.views[:1]) for run in runs]
        moved = self.honest.transfer(fd, runs, writes)
        return [max(each, 1) for each in moved] if self.damage == "miscounted" else moved


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch, compiled_slab_io: slab_io.SlabIO) -> Spy:
    """The module of this source, as if it had been installed."""
    module = Spy(compiled_slab_io)
    monkeypatch.setitem(sys.modules, slab_io.MODULE, module)
    assert slab_io.slab_io() is module
    module.calls.clear()
    return module


@pytest.fixture
def slab(spy: Spy, tmp_path: Path) -> Iterator[SlabFile]:
    """A direct one of as many pages as there are runs, whose page `n` is `page(n)`."""
    with closing(SlabFile(str(tmp_path / "slab"), RUNS * PAGE)) as made:
        if not made.direct:
            pytest.skip("NO O_DIRECT on the file system of tmp_path")
        if not spy.has_queues():
            pytest.skip("NO asynchronous I/O on this kernel")
        memory = memoryview(mmap.mmap(-1, RUNS * PAGE))
        memory[:] = b"".join(map(page, range(RUNS)))
        assert made.write_runs(in_pages(range(RUNS), memory)) == [None] * RUNS
        yield made


def page(number: int) -> bytes:
    return keyed_bytes(number.to_bytes(4, "little"), PAGE)


def in_pages(numbers: Sequence[int], memory: memoryview) -> list[Run]:
    """One run for each of these pages of the file, with the next page of the memory."""
    return [
        Run(number * PAGE, [memory[at * PAGE : (at + 1) * PAGE]])
        for at, number in enumerate(numbers)
    ]


# -- when it is taken ------------------------------------------------------------------------------


def test_a_direct_slab_moves_many_runs_in_one_call(slab: SlabFile, spy: Spy) -> None:
    assert slab.runs_at_once == spy.DEPTH
    memory = memoryview(mmap.mmap(-1, 3 * PAGE))
    assert slab.read_runs(in_pages([5, 1, 7], memory)) == [None] * 3
    assert memory == page(5) + page(1) + page(7)
    assert slab.read_runs(in_pages([2], memory)) == [None]
    assert spy.calls == [(RUNS, True), (3, False)]  # one run needs no company


def test_a_buffered_slab_moves_run_by_run(
    spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.tiers.slab._direct_works", lambda fd, size: False)
    moved_right_by_hand(tmp_path)
    assert spy.calls == []


@pytest.mark.parametrize("why", ["not built", "EBBTIDE_PURE", "no queues"])
def test_a_slab_does_not_need_it(
    why: str, spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab_io.slab_io.cache_clear()
    if why == "not built":
        monkeypatch.setitem(sys.modules, slab_io.MODULE, None)
    elif why == "EBBTIDE_PURE":
        monkeypatch.setenv(PURE_VARIABLE, "1")
    else:
        assert slab_io.slab_io() is spy
        spy.damage = why
        spy.calls.clear()
    moved_right_by_hand(tmp_path)
    assert spy.calls == []


def moved_right_by_hand(tmp_path: Path) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))
    with closing(SlabFile(str(tmp_path / "by hand"), 8 * PAGE)) as slab:
        assert slab.runs_at_once == 1
        memory[: 2 * PAGE] = page(1) + page(2)
        assert slab.write_runs(in_pages([6, 3], memory)) == [None] * 2
        assert slab.read_runs(in_pages([3, 6], memory[2 * PAGE :])) == [None] * 2
        assert memory[2 * PAGE :] == page(2) + page(1)
        os.truncate(tmp_path / "by hand", 5 * PAGE)
        first, second = slab.read_runs(in_pages([3, 6], memory))
        assert first is None
        assert isinstance(second, OSError)
        assert "short read: 0 of 4096 bytes at 24576" in str(second)


@pytest.mark.parametrize("damage", ["swapped", "first view only", "miscounted"])
def test_a_wrong_one_is_left_out_with_a_warning(
    damage: str,
    compiled_slab_io: slab_io.SlabIO,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, slab_io.MODULE, Spy(compiled_slab_io, damage))
    assert slab_io.slab_io() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert PURE_VARIABLE in caplog.text


# -- what a run comes to ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1])
def test_every_run_goes_where_it_belongs(slab: SlabFile, seed: int) -> None:
    order = list(range(RUNS))
    Random(seed).shuffle(order)
    memory = memoryview(mmap.mmap(-1, RUNS * PAGE))
    assert slab.read_runs(in_pages(order, memory)) == [None] * RUNS
    assert memory == b"".join(map(page, order))
    assert slab.write_runs(in_pages(range(RUNS), memory)) == [None] * RUNS
    again = memoryview(mmap.mmap(-1, RUNS * PAGE))
    slab.read(0, [again])
    assert again == memory


def test_a_run_of_several_views_is_filled_in_order(slab: SlabFile) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))
    parts = [memory[at * PAGE : (at + 1) * PAGE] for at in (2, 0, 3, 1)]
    runs = [Run(10 * PAGE, parts[:3]), Run(0, parts[3:])]
    assert slab.read_runs(runs) == [None, None]
    assert [bytes(part) for part in parts] == [page(10), page(11), page(12), page(0)]


def test_a_short_run_fails_alone(slab: SlabFile, tmp_path: Path) -> None:
    os.truncate(tmp_path / "slab", 100 * PAGE + PAGE // 2)
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))
    found = slab.read_runs(in_pages([99, 100, 150, 0], memory))
    assert [error is None for error in found] == [True, False, False, True]
    assert memory[:PAGE] == page(99)
    assert memory[3 * PAGE :] == page(0)
    for error, text in zip(found[1:3], ("2048 of 4096 bytes", "0 of 4096 bytes"), strict=True):
        assert isinstance(error, OSError)
        assert error.errno == errno.EIO
        assert f"short read: {text}" in str(error)


def test_what_the_kernel_refuses_is_told_run_by_run(slab: SlabFile) -> None:
    memory = memoryview(mmap.mmap(-1, 3 * PAGE))
    runs = in_pages([1, 2, 3], memory)
    runs[1] = Run(2 * PAGE, [memory[PAGE + 8 : 2 * PAGE]])  # not aligned
    first, second, third = slab.read_runs(runs)
    assert (first, third) == (None, None)
    assert isinstance(second, OSError)
    assert second.errno == errno.EINVAL
    assert memory[:PAGE] == page(1)
    assert memory[2 * PAGE :] == page(3)


def test_a_closed_descriptor_is_an_error_for_each(compiled_slab_io: slab_io.SlabIO) -> None:
    runs = [Run(0, [memoryview(bytearray(8))])] * 3
    assert compiled_slab_io.transfer(1 << 20, runs, False) == [-errno.EBADF] * 3
    assert compiled_slab_io.transfer(1 << 20, runs, True) == [-errno.EBADF] * 3
    assert compiled_slab_io.transfer(1 << 20, [], True) == []


def test_what_may_not_be_filled_is_refused_before_a_byte_moves(
    slab: SlabFile, compiled_slab_io: slab_io.SlabIO
) -> None:
    whole = memoryview(mmap.mmap(-1, PAGE))
    for second in (memoryview(bytes(PAGE)), whole[::2], "text", 7):
        runs = [Run(0, [whole]), Run(PAGE, [second])]  # type: ignore[list-item]  # what is tested
        with pytest.raises((BufferError, TypeError)):
            compiled_slab_io.transfer(slab._fd, runs, False)
    assert bytes(whole) == bytes(PAGE)
    for wrong in (7, [7], [(0,)], [("x", [whole])], [(1 << 70, [whole])], [(0, 7)]):
        with pytest.raises((TypeError, IndexError, OverflowError)):
            compiled_slab_io.transfer(slab._fd, wrong, False)  # type: ignore[arg-type]  # as above
    whole.release()  # nothing holds it any more


# -- calls do not mix ------------------------------------------------------------------------------


def test_threads_are_told_of_their_own_runs(slab: SlabFile) -> None:
    def read(seed: int) -> bool:
        draw, memory = Random(seed), memoryview(mmap.mmap(-1, 100 * PAGE))
        right = True
        for _ in range(10):
            numbers = draw.sample(range(RUNS), draw.randrange(2, 100))
            right &= slab.read_runs(in_pages(numbers, memory)) == [None] * len(numbers)
            right &= memory[: len(numbers) * PAGE] == b"".join(map(page, numbers))
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(16)))


PROGRAM = """
import os, sys
from ebbtide.tiers.runs import Run
from ebbtide.tiers.slab_io import slab_io
{before}
module = slab_io()
if module is None:
    sys.exit("not built here")
{then}
runs = [Run(8 * at, [memoryview(bytes([at + 1]) * 8)]) for at in range(100)]
fd = os.memfd_create("slab")
assert module.transfer(fd, runs, True) == [8] * 100
assert os.pread(fd, 1000, 0) == b"".join(bytes([at + 1]) * 8 for at in range(100))
print("right", module.has_queues())
"""
FORK = """
assert module.has_queues()
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
"""
FORBID = """
import ctypes, struct
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, {number}), (RETURN, 0, 0, 0x50000 | {error})]
code = b"".join(struct.pack("HBBI", *step) for step in [*steps, (RETURN, 0, 0, 0x7FFF0000)])
held = ctypes.create_string_buffer(code)
program = Program(len(code) // 8, ctypes.addressof(held))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
"""


def ran(*, before: str = "", then: str = "") -> str:
    """What is printed by a process that moves a hundred runs, after this and that."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{before}", before).replace("{then}", then)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "not built here" in done.stderr:
        pytest.skip("the installed package has no compiled slab I/O")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_of_a_fork_has_queues_of_its_own() -> None:
    assert ran(then=FORK) == "right True\n" * 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of another machine")
@pytest.mark.parametrize(
    ("number", "queues"),
    [(206, False), (209, True), (208, True)],
    ids=["io_setup", "io_submit", "io_getevents"],
)
def test_a_sandbox_that_forbids_it_costs_time_only(number: int, queues: bool) -> None:
    forbid = FORBID.replace("{number}", str(number)).replace("{error}", str(errno.EPERM))
    assert ran(before=forbid) == f"right {queues}\n"
