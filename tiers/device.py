"""The device edge: copies between paged device blocks and arena slots.

This module, `device_streams` and `mapped_arenas` alone need torch, imported when the first copies
are built. Jobs are submitted and their ends polled; `device_copies` chooses who copies meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    import torch

    from ebbtide.config_schema import Layerwise
    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.tiers.arena import Arena

PIECE_BYTES = 4 << 20  # a host copies so much between two looks at the clock
SLICE_SHARE = 0.05  # of the time since the last poll
SLICE_MIN_S = 0.005
SLICE_MAX_S = 0.1


class CopyJob(NamedTuple):
    """Records at `offsets` in the arena and device blocks, pairwise. The end carries `tag`.

    `layer`: only that layer of them.
    """

    tag: Hashable
    group: int
    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    to_device: bool
    arena: Arena
    layer: int | None = None


class CopyEnd(NamedTuple):
    """`error` None: every byte of the job is where it belongs."""

    tag: Hashable
    to_device: bool
    error: BaseException | None


class DeviceCopies(ABC):
    """Copies for one worker, all methods from the worker's thread.

    `layouts`: per KV group how a block of this rank lies in the device tensors. Copies to the
    device go first: a request waits for them, and for the others nobody does.

    `by_layer`: copies to the device bring one layer after the other, and `wait_for_layer` tells
    when a forward pass may read one. Such jobs have tags of their own. The methods for it are there
    only then.
    """

    def __init__(self, layouts: Mapping[int, PagedLayout], *, by_layer: bool = False) -> None:
        from ebbtide.kernels import copy, layers

        self.layouts = dict(layouts)
        self.by_layer = by_layer
        self.open_jobs = 0
        self._copy = copy
        self._layers = {
            group: layers.layers_of(layout) if by_layer else ()
            for group, layout in self.layouts.items()
        }
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

    def interleave(self, tags: Collection[Hashable]) -> None:
        """What is left of these jobs to the device goes by layer: one of all, then the next."""
        raise NotImplementedError

    def wait_for_layer(self, tag: Hashable, group: int, layer: int) -> None:
        """Let the compute stream go on when this layer of a job to the device is there.

        `layer`: number of a tensor of the group's layout. Also returns when the job has ended,
        well or not: what is there is known by its end alone. As long as the copy takes, or until it
        is queued where the compute stream can wait by itself.
        """
        raise NotImplementedError

    def wait_for_end(self, tag: Hashable) -> None:
        """Wait until the tag's jobs to the device have ended."""
        raise NotImplementedError

    @property
    def pinned(self) -> bool | None:
        """Whether the arena is locked for a device. None: there is none, or no copy yet."""
        return None

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
        layout, offsets = self.layouts[job.group], self._offsets(job)
        if job.layer is not None:
            layout = self._layers[job.group][job.layer].layout
        move(layout, job.block_ids, self._tensor(job.arena), offsets)

    def _offsets(self, job: CopyJob) -> Sequence[int]:
        """Where the job's bytes begin in its records."""
        if job.layer is None:
            return job.offsets
        return self._layers[job.group][job.layer].offsets(job.offsets)

    def _tensor(self, arena: Arena) -> torch.Tensor:
        """The arena as one uint8 tensor; the last one is kept until another arena comes."""
        import torch

        whole = self._whole  # other threads may come with another arena
        if whole is None or whole[0] is not arena:
            # A view of its own, which nobody releases: the mapping lives as long as the tensor.
            view = memoryview(arena.buffer)
            whole = self._whole = (arena, torch.frombuffer(view, dtype=torch.uint8))
        return whole[1]


def device_copies(
    layouts: Mapping[int, PagedLayout], method: str = "auto", *, layerwise: Layerwise = "off"
) -> DeviceCopies:
    """The copies that suit the device of these layouts; `method` as in `connector.copy`.

    `layerwise` as in `connector.layerwise`, off unless the engine's forward pass waits for layers.
    Call it before the engine uses its blocks. Raises ConfigError for a method that cannot be had.
    """
    from ebbtide.kernels.choice import AUTO, TORCH, choose
    from ebbtide.kernels.host_copy import copier

    device = next(iter(layouts.values())).device
    if device.type != "cpu":
        from ebbtide.tiers.device_streams import stream_copies

        return stream_copies(layouts, method, by_layer=layerwise != "off")
    if method not in (AUTO, TORCH):
        choose(method, (), {method: "the blocks are in host memory"})
    copier()  # checked, and its setting refused, now and not at the first copy
    if layerwise == "on":  # the thread that waits cannot be the one that copies
        from ebbtide.tiers.device_streams import StreamCopies

        return StreamCopies(layouts, by_layer=True)
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
