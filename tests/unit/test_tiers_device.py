"""Copies between device blocks and arena slots: whole, in order, and in slices on a host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from ebbtide.compiled import PURE_VARIABLE
from ebbtide.errors import ConfigError
from ebbtide.kernels.host_copy import copier
from ebbtide.kernels.layout import PagedLayout
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.device import (
    PIECE_BYTES,
    SLICE_MAX_S,
    SLICE_MIN_S,
    CopyEnd,
    HostCopies,
    device_copies,
)
from ebbtide.tiers.device_streams import StreamCopies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ebbtide.tiers.device import CopyJob, DeviceCopies

BLOCKS = 12
RECORD_BYTES = PIECE_BYTES // 2  # two records a piece
HANG_S = 20.0
KINDS = [HostCopies, StreamCopies]


@pytest.fixture
def layout() -> PagedLayout:
    shape = (2, BLOCKS, 16, 8, RECORD_BYTES // (2 * 16 * 8))
    return PagedLayout.from_tensors([torch.zeros(shape, dtype=torch.uint8)], block_dim=1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(BLOCKS * RECORD_BYTES)
    yield arena
    arena.close()


class Clock:
    """Every look at it takes `look_s`."""

    def __init__(self) -> None:
        self.now_s, self.look_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s


def submit(
    copies: DeviceCopies, arena: Arena, blocks: Sequence[int], tag: str, *, to_device: bool = False
) -> None:
    offsets = [block * RECORD_BYTES for block in blocks]
    copies.submit(tag, 0, list(blocks), offsets, to_device=to_device, arena=arena)


def all_ends(copies: DeviceCopies) -> list[CopyEnd]:
    ends: list[CopyEnd] = []
    deadline = time.monotonic() + HANG_S
    while copies.open_jobs:
        assert time.monotonic() < deadline
        ends += copies.poll()
    return ends


def watch(copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns a list that gets the blocks of each piece before it is moved."""
    pieces: list[tuple[int, ...]] = []
    move = copies._move

    def watched(job: CopyJob) -> None:
        pieces.append(job.block_ids)
        move(job)

    monkeypatch.setattr(copies, "_move", watched)
    return pieces


def test_a_device_that_is_host_memory_needs_no_thread(layout: PagedLayout) -> None:
    copies = device_copies({0: layout})
    assert isinstance(copies, HostCopies)
    assert copies.close()


def test_a_wrong_setting_shows_before_the_first_copy(
    layout: PagedLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PURE_VARIABLE, "yes")
    copier.cache_clear()
    with pytest.raises(ConfigError, match="EBBTIDE_PURE is 0 or 1"):
        device_copies({0: layout})


@pytest.mark.parametrize("kind", KINDS)
def test_what_went_down_comes_back(
    kind: type[DeviceCopies], layout: PagedLayout, arena: Arena
) -> None:
    copies = kind({0: layout})
    (tensor,) = layout.tensors
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    before = tensor.clone()
    submit(copies, arena, [1, 2, 7, 5, 6], "down")
    assert all_ends(copies) == [CopyEnd("down", False, None)]
    tensor.zero_()
    submit(copies, arena, [7, 5, 1], "up", to_device=True)
    assert all_ends(copies) == [CopyEnd("up", True, None)]
    for block in range(BLOCKS):
        expected = before[:, block] if block in (1, 5, 7) else torch.zeros_like(before[:, block])
        assert torch.equal(tensor[:, block], expected), block
    assert copies.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_fails_ends_with_its_error_and_the_next_one_is_done(
    kind: type[DeviceCopies], layout: PagedLayout, arena: Arena
) -> None:
    copies = kind({0: layout})
    submit(copies, arena, [1, 2, BLOCKS], "outside")
    submit(copies, arena, [3], "inside")
    first, second = all_ends(copies)
    assert (first.tag, type(first.error).__name__) == ("outside", "MisuseError")
    assert second == CopyEnd("inside", False, None)
    assert copies.close()


def test_a_slice_is_short_for_an_engine_with_short_steps(
    layout: PagedLayout, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    copies = HostCopies({0: layout}, now=clock)
    pieces = watch(copies, monkeypatch)
    submit(copies, arena, range(8), "down")
    clock.look_s = SLICE_MIN_S * 0.6
    assert copies.poll() == []
    assert pieces == [(0, 1), (2, 3)]
    clock.look_s = 0.0
    assert copies.poll() == [CopyEnd("down", False, None)]
    assert pieces == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_slice_moves_something_however_slow_it_is(
    layout: PagedLayout, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    copies = HostCopies({0: layout}, now=clock)
    pieces = watch(copies, monkeypatch)
    submit(copies, arena, range(8), "down")
    clock.look_s = 1.0
    copies.poll()
    assert pieces == [(0, 1)]


def test_a_slice_is_a_share_of_long_steps_and_bounded(
    layout: PagedLayout, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    copies = HostCopies({0: layout}, now=clock)
    pieces = watch(copies, monkeypatch)
    submit(copies, arena, range(BLOCKS), "down")
    clock.now_s += 0.6  # a step of 600 ms gives 30 ms
    clock.look_s = 0.012
    copies.poll()
    assert len(pieces) == 3
    clock.now_s += 3600.0
    clock.look_s = SLICE_MAX_S * 0.4
    copies.poll()
    assert len(pieces) == 6


def test_what_a_request_waits_for_goes_first(
    layout: PagedLayout, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = HostCopies({0: layout}, now=lambda: 0.0)
    pieces = watch(copies, monkeypatch)
    submit(copies, arena, [1], "down")
    submit(copies, arena, [2], "up", to_device=True)
    assert [end.tag for end in copies.poll()] == ["up", "down"]
    assert pieces == [(2,), (1,)]


def test_a_fence_ends_every_copy_down_and_no_other(
    layout: PagedLayout, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = HostCopies({0: layout})
    pieces = watch(copies, monkeypatch)
    submit(copies, arena, range(6), "down")
    submit(copies, arena, [6], "also")
    submit(copies, arena, [7], "up", to_device=True)
    copies.settle_stores()
    assert pieces == [(0, 1), (2, 3), (4, 5), (6,)]
    assert [end.tag for end in all_ends(copies)] == ["down", "also", "up"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_leaves_keeps_no_arena(
    kind: type[DeviceCopies], layout: PagedLayout, arena: Arena
) -> None:
    copies = kind({0: layout})
    submit(copies, arena, [1], "down")
    all_ends(copies)
    submit(copies, arena, [2], "late")
    assert copies.close()
    arena.close()


def test_an_arena_that_is_closed_stays_mapped_while_copies_may_use_it(
    layout: PagedLayout, arena: Arena
) -> None:
    copies = HostCopies({0: layout})
    submit(copies, arena, [1], "late")
    tensor = copies._tensor(arena)
    arena.close()
    assert mapped_at(tensor.data_ptr())
    assert copies.close()
    address = tensor.data_ptr()
    del tensor
    assert not mapped_at(address)


def mapped_at(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as file:
        spans = [line.split(" ", 1)[0].split("-") for line in file if "ebbtide-arena" in line]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)
