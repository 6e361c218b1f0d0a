"""The compiled copier: when it is taken, what it refuses, that it touches no byte but its own."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.compiled import PURE_VARIABLE
from ebbtide.errors import MisuseError
from ebbtide.kernels import host_copy
from ebbtide.kernels.copy import gather_into, scatter_from
from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

GUARD = 0xA5
PAGE = mmap.PAGESIZE
NEVER = host_copy.NEVER
pytestmark = pytest.mark.usefixtures("compiled_afresh")


class Spy(ModuleType):
    """Copies as it should, but for what `damage` says, and remembers how it was asked."""

    def __init__(self, honest: host_copy.Copier, damage: str = "") -> None:
        super().__init__("spy")
        self.honest, self.damage = honest, damage
        self.asked: list[tuple[int, int]] = []  # stream_from, threads

    def copy_blocks(self, *arguments: Any) -> None:
        to_blocks, stream_from, threads = arguments[-3:]
        self.asked.append((stream_from, threads))
        facts = {
            "up": to_blocks,
            "down": not to_blocks,
            "streamed": stream_from == 0,
            "threads": threads > 1,
        }
        if not facts.get(self.damage, False):
            self.honest.copy_blocks(*arguments)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch, compiled_copier: host_copy.Copier) -> Spy:
    """The copier of this source, as if it had been installed."""
    module = Spy(compiled_copier)
    monkeypatch.setitem(sys.modules, host_copy.MODULE, module)
    assert host_copy.copier() is module
    module.asked.clear()
    return module


def small() -> tuple[PagedLayout, torch.Tensor]:
    tensor = torch.arange(2 * 7 * 4 * 3 * 8, dtype=torch.float32).view(2, 7, 4, 3, 8)
    layout = PagedLayout.from_tensors([tensor])
    return layout, torch.zeros(4 * layout.record_bytes, dtype=torch.uint8)


# -- when it is taken ------------------------------------------------------------------------------


def test_copies_go_through_it_where_it_is_built(spy: Spy) -> None:
    layout, arena = small()
    gather_into(layout, [3], arena, [0])
    scatter_from(layout, [1], arena, [0])
    assert spy.asked == [(NEVER, 1)] * 2


def test_copies_do_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, host_copy.MODULE, None)  # as Python marks what is not there
    assert host_copy.copier() is None
    layout, arena = small()
    gather_into(layout, [3], arena, [0])
    assert arena.any()


def test_the_variable_leaves_it_out(monkeypatch: pytest.MonkeyPatch, spy: Spy) -> None:
    host_copy.copier.cache_clear()
    monkeypatch.setenv(PURE_VARIABLE, "1")
    assert host_copy.copier() is None


@pytest.mark.parametrize("damage", ["up", "down", "streamed", "threads"])
def test_a_wrong_one_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    compiled_copier: host_copy.Copier,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, host_copy.MODULE, Spy(compiled_copier, damage))
    assert host_copy.copier() is None
    assert host_copy.copier() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert PURE_VARIABLE in caplog.text


def test_large_copies_stream_in_as_many_threads_as_torch_has(
    monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    layout, arena = small()
    monkeypatch.setattr(host_copy, "STREAM_BYTES_MIN", 2 * layout.record_bytes)
    monkeypatch.setattr(host_copy, "THREAD_BYTES_MIN", layout.record_bytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    for ids in ([3], [3, 4], [3, 4, 0, 1]):
        gather_into(layout, ids, arena, [n * layout.record_bytes for n in range(len(ids))])
    streamed = host_copy.STREAM_FRAGMENT_MIN
    assert spy.asked == [(NEVER, 1), (streamed, 2), (streamed, 3)]


def test_threads_of_torch_that_have_more_cores_are_left_to_copy(
    monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    layout, arena = small()
    monkeypatch.setattr(host_copy, "THREAD_BYTES_MIN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    gather_into(layout, [3], arena, [0])
    assert not spy.asked
    assert arena.any()


# -- memory that is not where it was ---------------------------------------------------------------


def test_a_storage_that_has_moved_is_found_again(spy: Spy) -> None:
    layout, arena = small()
    gather_into(layout, [3], arena, [0])
    before, storage = arena.clone(), layout.tensors[0].untyped_storage()
    old = storage.data_ptr()
    storage.resize_(64 << 20)  # grows elsewhere
    assert storage.data_ptr() != old
    arena.zero_()
    gather_into(layout, [3], arena, [0])
    assert torch.equal(arena, before)
    assert len(spy.asked) == 2


def test_a_storage_that_has_become_shorter_is_refused(spy: Spy) -> None:
    layout, arena = small()
    storage = layout.tensors[0].untyped_storage()
    for size in (storage.nbytes() - 1, 0):
        storage.resize_(size)
        for copy in (gather_into, scatter_from):
            with pytest.raises(MisuseError, match="lost memory"):
                copy(layout, [3], arena, [0])
    assert not spy.asked


# -- the bytes -------------------------------------------------------------------------------------


def copied(
    copier: host_copy.Copier,
    rows: list[tuple[int, int, int]],
    shift: int,
    *,
    to_blocks: bool,
    stream_from: int,
    threads: int,
) -> None:
    """Fragments of (length, gap before, padding), three blocks of five, all bytes compared."""
    lengths = np.array([length for length, _, _ in rows])
    places = np.cumsum(lengths) - lengths
    strides = lengths + [padding for _, _, padding in rows]
    ends = np.cumsum(5 * strides + [gap for _, gap, _ in rows])
    bases = ends - 5 * strides
    record_bytes = int(lengths.sum())
    draw = np.random.default_rng(record_bytes)
    pages = draw.integers(0, 256, int(ends[-1]) + 64, dtype=np.uint8)
    arena = draw.integers(0, 256, 4 * record_bytes + shift + 64, dtype=np.uint8)
    ids, offsets = np.array([4, 0, 3]), np.array([2, 0, 3]) * record_bytes + shift
    right_pages, right_arena = pages.copy(), arena.copy()
    for block, offset in zip(ids, offsets, strict=True):
        for base, stride, length, place in zip(bases, strides, lengths, places, strict=True):
            paged = right_pages[base + block * stride :][:length]
            flat = right_arena[offset + place :][:length]
            if to_blocks:
                paged[:] = flat
            else:
                flat[:] = paged
    table = np.stack([bases + pages.ctypes.data, strides, lengths, places])
    copier.copy_blocks(
        table,
        5,
        ids,
        arena.ctypes.data,
        len(arena),
        offsets,
        record_bytes,
        to_blocks,
        stream_from,
        threads,
    )
    assert np.array_equal(pages, right_pages)
    assert np.array_equal(arena, right_arena)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 700), st.integers(0, 70), st.integers(0, 70)),
        min_size=1,
        max_size=6,
    ),
    shift=st.integers(0, 70),
    to_blocks=st.booleans(),
    stream_from=st.sampled_from([0, 100, NEVER]),
    threads=st.integers(1, 5),
)
def test_any_alignment_is_exact_and_touches_nothing_else(
    compiled_copier: host_copy.Copier,
    rows: list[tuple[int, int, int]],
    shift: int,
    to_blocks: bool,
    stream_from: int,
    threads: int,
) -> None:
    copied(
        compiled_copier,
        rows,
        shift,
        to_blocks=to_blocks,
        stream_from=stream_from,
        threads=threads,
    )


@pytest.mark.parametrize("to_blocks", [False, True])
def test_long_fragments_are_exact(compiled_copier: host_copy.Copier, to_blocks: bool) -> None:
    rows = [(16384, 0, 0), (65536 + 3, 5, 9), (1, 0, 0), (300_000, 64, 64)]
    for threads in (1, 2, 64):
        copied(compiled_copier, rows, 7, to_blocks=to_blocks, stream_from=1024, threads=threads)


@pytest.mark.parametrize("stream_from", [0, NEVER])
@pytest.mark.parametrize("length", [1, 63, 64, 100, 4096])
def test_no_byte_behind_the_source_is_read(
    compiled_copier: host_copy.Copier, length: int, stream_from: int
) -> None:
    """The page behind it cannot be read: who tries ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    region = mmap.mmap(-1, 2 * PAGE)
    anchor = ctypes.c_char.from_buffer(region)
    start = ctypes.addressof(anchor)
    try:
        region[PAGE - length : PAGE] = bytes(range(1, length + 1) if length < 255 else [7] * length)
        assert libc.mprotect(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(PAGE), 0) == 0
        arena = np.full(length + 64, GUARD, dtype=np.uint8)
        table = np.array([[start + PAGE - length], [length], [length], [0]])
        for shift in (0, 1, 17):
            arena[:] = GUARD
            compiled_copier.copy_blocks(
                table,
                1,
                np.array([0]),
                arena.ctypes.data,
                len(arena),
                np.array([shift]),
                length,
                False,
                stream_from,
                1,
            )
            assert bytes(arena[shift : shift + length]) == region[PAGE - length : PAGE]
            assert (arena[:shift] == GUARD).all()
            assert (arena[shift + length :] == GUARD).all()
    finally:
        del anchor
        region.close()


# -- what it refuses -------------------------------------------------------------------------------

FINE: dict[str, Any] = {
    "fragments": [[0, 64], [8, 8], [8, 8], [0, 8]],  # addresses are added
    "num_blocks": 8,
    "block_ids": [0, 7],
    "arena_bytes": 64,
    "offsets": [48, 0],
    "record_bytes": 16,
    "stream_from": 0,
    "threads": 1,
}


@pytest.mark.parametrize("to_blocks", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_ids": [0, 8]}, "no such block"),
        ({"block_ids": [-1, 0]}, "no such block"),
        ({"block_ids": [0]}, "pair up"),
        ({"offsets": [0, 49]}, "outside the arena"),
        ({"offsets": [0, -1]}, "outside the arena"),
        ({"offsets": [0, 2**63 - 1]}, "outside the arena"),
        ({"arena_bytes": 15}, "no record fits"),
        ({"record_bytes": -1}, "no record fits"),
        ({"record_bytes": 15}, "outside the record"),
        ({"fragments": [[0], [8], [8], [-1]]}, "outside the record"),
        ({"fragments": [[0], [8], [-8], [0]]}, "outside the record"),
        ({"fragments": [[0], [8], [8], [2**63 - 1]]}, "outside the record"),
        ({"fragments": [[0], [8], [8]]}, "four numbers"),
        ({"threads": 0}, "threads"),
        ({"threads": 65}, "threads"),
    ],
)
def test_what_would_reach_elsewhere_is_refused_before_a_byte_moves(
    compiled_copier: host_copy.Copier, wrong: dict[str, Any], message: str, to_blocks: bool
) -> None:
    pages, arena = np.arange(128, dtype=np.uint8), np.full(64, GUARD, dtype=np.uint8)

    def call(**changed: Any) -> None:
        given = FINE | changed
        table = np.array(given["fragments"], dtype=np.int64)
        table[0] += pages.ctypes.data
        compiled_copier.copy_blocks(
            table,
            given["num_blocks"],
            np.array(given["block_ids"], dtype=np.int64),
            arena.ctypes.data,
            given["arena_bytes"],
            np.array(given["offsets"], dtype=np.int64),
            given["record_bytes"],
            to_blocks,
            given["stream_from"],
            given["threads"],
        )

    with pytest.raises(ValueError, match=message):
        call(**wrong)
    assert np.array_equal(pages, np.arange(128))
    assert (arena == GUARD).all()
    call()
    assert not (arena == GUARD).all() or not np.array_equal(pages, np.arange(128))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 1), np.int32),
        np.zeros((4, 1), np.uint64),
        np.zeros((4, 2), np.int64)[:, ::2],
        [[0], [0], [0], [0]],
        None,
    ],
)
def test_other_arrays_are_errors_and_no_crash(
    compiled_copier: host_copy.Copier, array: Any
) -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises((TypeError, ValueError, BufferError)):
        compiled_copier.copy_blocks(array, 1, none, 0, 0, none, 0, False, 0, 1)
    with pytest.raises((TypeError, ValueError, BufferError)):
        compiled_copier.copy_blocks(np.zeros((4, 1), np.int64), 1, none, 0, 0, array, 0, True, 0, 1)


# -- beside other threads --------------------------------------------------------------------------


def test_no_thread_is_left_and_signals_are_as_they_were(compiled_copier: host_copy.Copier) -> None:
    before = set(os.listdir("/proc/self/task"))
    rows = [(50_000, 0, 0)] * 4
    copied(compiled_copier, rows, 3, to_blocks=False, stream_from=0, threads=4)
    assert set(os.listdir("/proc/self/task")) <= before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_no_reference_is_kept(compiled_copier: host_copy.Copier) -> None:
    arrays = [np.zeros((4, 0), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)]
    before = [sys.getrefcount(array) for array in arrays]
    table, ids, offsets = arrays
    for _ in range(20):
        compiled_copier.copy_blocks(table, 1, ids, 0, 0, offsets, 0, False, 0, 1)
        with pytest.raises(ValueError, match="threads"):
            compiled_copier.copy_blocks(table, 1, ids, 0, 0, offsets, 0, False, 0, 0)
        wrong: Any = None
        with pytest.raises(TypeError):
            compiled_copier.copy_blocks(table, 1, ids, 0, 0, wrong, 0, False, 0, 1)
    del table, ids, offsets
    assert [sys.getrefcount(array) for array in arrays] == before
