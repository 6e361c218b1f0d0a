"""The device edge: copies between paged device blocks and arena slots.

This module and `device_streams` alone need torch, imported when the first copies are built. Jobs
are submitted and their ends polled; `device_copies` chooses who copies meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch

    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.tiers.arena import Arena

PIECE_BYTES = 4 << 20  # a host copies so much between two looks at the clock
SLICE_SHARE = 0.05  # of the time since the last poll
SLICE_MIN_S = 0.005
SLICE_MAX_S = 0.1


class CopyJob(NamedTuple):
    """Records at `offsets` in the arena and device blocks, pairwise. The end carries `tag`."""

    tag: Hashable
    group: int
    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    to_device: bool
    arena: Arena


class CopyEnd(NamedTuple):
    """`error` None: every byte of the job is where it belongs."""

    tag: Hashable
    to_device: bool
    error: BaseException | None


class DeviceCopies(ABC):
    """Copies for one worker, all methods from the worker's thread.

    `layouts`: per KV group how a block of this rank lies in the device tensors. Copies to the
    device go first: a request waits for them, and for the others nobody does.
    """

    def __init__(self, layouts: Mapping[int, PagedLayout]) -> None:
        from ebbtide.kernels import copy

        self.layouts = dict(layouts)
        self.open_jobs = 0
        self.pinned: bool | None = None  # the arena is locked for a device; None: none, or not yet
        self._copy = copy
        self._ends: deque[CopyEnd] = deque()
        self._whole: tuple[Arena, torch.Tensor] | None = None

    def submit(
        self,
        tag: Hashable,
        group: int,
        block_ids: Sequence[int],
        offsets: Sequence[int],
        *,
        to_device: bool,
        arena: Arena,
    ) -> None:
        """Start a copy. The blocks and the slots must stay put until its end is polled."""
        job = CopyJob(tag, group, tuple(block_ids), tuple(offsets), to_device, arena)
        self.open_jobs += 1
        self._accept(job)

    def poll(self) -> list[CopyEnd]:
        """The copies that have ended since the last call. O(ended)."""
        ends: list[CopyEnd] = []
        while self._ends:
            ends.append(self._ends.popleft())
        self.open_jobs -= len(ends)
        return ends

    @abstractmethod
    def settle_stores(self) -> None:
        """Wait until no submitted copy reads a device block any more. As long as those take."""

    @abstractmethod
    def close(self) -> bool:
        """End what has begun, and begin nothing more. False when it did not end in time."""

    @abstractmethod
    def _accept(self, job: CopyJob) -> None:
        """Take a job over."""

    def _move(self, job: CopyJob) -> None:
        move = self._copy.scatter_from if job.to_device else self._copy.gather_into
        move(self.layouts[job.group], job.block_ids, self._tensor(job.arena), job.offsets)

    def _tensor(self, arena: Arena) -> torch.Tensor:
        """The arena as one uint8 tensor; the last one is kept until another arena comes."""
        import torch

        whole = self._whole  # other threads may come with another arena
        if whole is None or whole[0] is not arena:
            # A view of its own, which nobody releases: the mapping lives as long as the tensor.
            view = memoryview(arena.buffer)
            whole = self._whole = (arena, torch.frombuffer(view, dtype=torch.uint8))
        return whole[1]


def device_copies(layouts: Mapping[int, PagedLayout], method: str = "auto") -> DeviceCopies:
    """The copies that suit the device of these layouts; `method` as in `connector.copy`.

    Call it before the engine uses its blocks. Raises ConfigError for a method that cannot be had.
    """
    from ebbtide.kernels.choice import AUTO, TORCH, choose

    device = next(iter(layouts.values())).device
    if device.type != "cpu":
        from ebbtide.tiers.device_streams import stream_copies

        return stream_copies(layouts, method)
    if method not in (AUTO, TORCH):
        choose(method, (), {method: "the blocks are in host memory"})
    return HostCopies(layouts)


# -- a device that is host memory ------------------------------------------------------------------


@dataclass(slots=True)
class _Moving:
    job: CopyJob
    moved: int = 0  # records


class HostCopies(DeviceCopies):
    """Copies in the worker's own thread, a slice at every poll.

    A thread of its own would be slower by far: a copy is many small ones, after each of which it
    would have to win the interpreter lock back from an engine that steps without a pause. And the
    cores that it would use are those of the forward pass.

    A slice lasts about a twentieth of the time since the last poll, within bounds: an engine with
    long steps gives long slices, and is slowed down by a twentieth at most.
    """

    def __init__(
        self, layouts: Mapping[int, PagedLayout], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(layouts)
        self._now = now
        self._polled_s = now()
        self._loads: deque[_Moving] = deque()
        self._stores: deque[_Moving] = deque()

    def poll(self) -> list[CopyEnd]:
        if self.open_jobs:
            self._slice()
        self._polled_s = self._now()
        return super().poll()

    def settle_stores(self) -> None:
        while self._stores:
            self._move_piece(self._stores)

    def close(self) -> bool:
        self._loads.clear()
        self._stores.clear()
        self._whole = None
        return True

    def _accept(self, job: CopyJob) -> None:
        (self._loads if job.to_device else self._stores).append(_Moving(job))

    def _slice(self) -> None:
        now = self._now()
        length_s = min(max(SLICE_SHARE * (now - self._polled_s), SLICE_MIN_S), SLICE_MAX_S)
        while queue := self._loads or self._stores:
            self._move_piece(queue)
            if self._now() - now >= length_s:
                return

    def _move_piece(self, queue: deque[_Moving]) -> None:
        """Some records of the oldest job, or its end."""
        moving = queue[0]
        job, start = moving.job, moving.moved
        count = max(1, PIECE_BYTES // self.layouts[job.group].record_bytes)
        piece = job._replace(
            block_ids=job.block_ids[start : start + count],
            offsets=job.offsets[start : start + count],
        )
        error = outcome_of(self._move, piece)
        moving.moved += count
        if error is not None or moving.moved >= len(job.block_ids):
            queue.popleft()
            self._ends.append(CopyEnd(job.tag, job.to_device, error))
