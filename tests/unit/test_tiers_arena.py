"""The arena: nobody can shrink it, every process sees the same bytes, a forked child sees none."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ebbtide.errors import ConfigError
from ebbtide.tiers.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(4 * MIB)
    yield made
    made.close()


def test_it_has_exactly_the_capacity_and_starts_zeroed(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_size == arena.capacity_bytes == len(arena.buffer) == 4 * MIB
    assert arena.view(0, 4 * MIB) == bytes(4 * MIB)


@pytest.mark.parametrize("size", [0, 4096, 4 * MIB - 1, 4 * MIB + 1, 64 * MIB])
def test_its_size_is_sealed(arena: Arena, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)
    seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_another_process_sees_and_writes_the_same_bytes(arena: Arena) -> None:
    arena.view(12_288, 5)[:] = b"hello"
    code = (
        "import sys; from ebbtide.tiers.arena import Arena\n"
        "arena = Arena.attach(int(sys.argv[1]))\n"
        "assert bytes(arena.view(12288, 5)) == b'hello'\n"
        "arena.view(12288, 5)[:] = b'world'\n"
        "arena.close()"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", code, str(arena.fd)],
        pass_fds=[arena.fd],
        check=True,
        timeout=60,
    )
    assert bytes(arena.view(12_288, 5)) == b"world"


def test_a_forked_child_has_no_mapping(arena: Arena) -> None:
    mapped = "ebbtide-arena"
    with open("/proc/self/maps", encoding="ascii") as file:
        assert mapped in file.read()
    child = os.fork()
    if child == 0:
        try:
            with open("/proc/self/maps", encoding="ascii") as file:
                os._exit(mapped in file.read())
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_populating_covers_every_byte_and_changes_none() -> None:
    arena = Arena.create(150 * MIB)
    arena.view(70 * MIB, 3)[:] = b"abc"
    steps = arena.populate_steps()
    assert [start for start, _ in steps] == [0, 64 * MIB, 128 * MIB]
    assert sum(length for _, length in steps) == arena.capacity_bytes
    arena.populate(*steps[1])
    assert bytes(arena.view(70 * MIB, 3)) == b"abc"
    arena.close()


def test_closing_twice_is_no_error_and_the_fd_is_gone() -> None:
    arena = Arena.create(MIB)
    number = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_view_in_use_keeps_the_memory_until_it_is_gone() -> None:
    arena = Arena.create(MIB)
    view = arena.view(0, 3)
    arena.close()
    view[:] = b"abc"
    assert bytes(view) == b"abc"


@pytest.mark.parametrize("capacity", [1 << 62, mmap.PAGESIZE << 48])
def test_memory_that_cannot_be_had_is_an_error_with_a_way_out(capacity: int) -> None:
    with pytest.raises(ConfigError, match=r"Lower \[memory\] capacity"):
        Arena.create(capacity)
