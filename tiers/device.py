"""The device edge: copies between paged device blocks and arena slots, beside the forward pass.

The only module of this room that needs torch, imported when the first copy engine is built. A copy
never waits for the engine and the engine never for a copy: jobs go to a thread, ends are polled.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.tiers.arena import Arena

CLOSE_TIMEOUT_S = 10.0


class CopyJob(NamedTuple):
    """Records at `offsets` in the arena and device blocks, pairwise. The end carries `tag`."""

    tag: Hashable
    group: int
    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    to_device: bool
    arena: Arena
    ready: torch.cuda.Event | None  # the compute stream's work up to the submission


class CopyEnd(NamedTuple):
    """`error` None: every byte of the job is where it belongs."""

    tag: Hashable
    to_device: bool
    error: BaseException | None


class DeviceCopies:
    """Copies for one worker. `submit` and `poll` from the worker's thread; one copy thread.

    `layouts`: per KV group how a block of this rank lies in the device tensors. Copies to the
    device go first: a request waits for them, and for the others nobody does. On a GPU the copies
    run on a stream of their own, behind the work that the compute stream had been given when the
    job was submitted (never the legacy default stream). On a CPU they run in the thread, with the
    interpreter lock free.
    """

    def __init__(self, layouts: Mapping[int, PagedLayout]) -> None:
        from ebbtide.kernels import copy

        self.layouts = dict(layouts)
        self._copy = copy
        self._device = next(iter(self.layouts.values())).device
        self._cuda = self._device.type == "cuda"
        self._loads: deque[CopyJob] = deque()
        self._stores: deque[CopyJob] = deque()
        self._stores_left = 0  # begun or not; under the condition, like both queues
        self._closing = False
        self._changed = threading.Condition()
        self._ends: deque[CopyEnd] = deque()
        self._whole: tuple[Arena, torch.Tensor] | None = None
        self.open_jobs = 0
        self._thread = threading.Thread(target=self._run, name="ebbtide-copies", daemon=True)
        self._thread.start()

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
        ready = self._compute_event()
        job = CopyJob(tag, group, tuple(block_ids), tuple(offsets), to_device, arena, ready)
        self.open_jobs += 1
        with self._changed:
            if not to_device:
                self._stores_left += 1
            (self._loads if to_device else self._stores).append(job)
            self._changed.notify_all()

    def poll(self) -> list[CopyEnd]:
        """The copies that have ended since the last call. O(ended)."""
        ends: list[CopyEnd] = []
        while self._ends:
            ends.append(self._ends.popleft())
        self.open_jobs -= len(ends)
        return ends

    def settle_stores(self) -> None:
        """Wait until no submitted copy reads a device block any more. As long as those take."""
        with self._changed:
            while self._stores_left:
                self._changed.wait()

    def close(self) -> bool:
        """End the thread after what it is doing. False when it did not end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._whole = None
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            error = outcome_of(self._copy_one, job)
            self._ends.append(CopyEnd(job.tag, job.to_device, error))
            if not job.to_device:
                with self._changed:
                    self._stores_left -= 1
                    self._changed.notify_all()

    def _next(self) -> CopyJob | None:
        """The next job; None when all are done and the engine leaves."""
        with self._changed:
            while not (self._loads or self._stores or self._closing):
                self._changed.wait()
            if self._loads:
                return self._loads.popleft()
            return self._stores.popleft() if self._stores else None

    def _copy_one(self, job: CopyJob) -> None:
        import torch

        if not self._cuda:
            self._move(job)
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch
        with torch.cuda.stream(stream):
            if job.ready is not None:
                stream.wait_event(job.ready)
            self._move(job)
        stream.synchronize()

    def _move(self, job: CopyJob) -> None:
        layout = self.layouts[job.group]
        size = layout.record_bytes
        arena = self._tensor(job.arena)
        records = [arena[offset : offset + size] for offset in job.offsets]
        move = self._copy.scatter if job.to_device else self._copy.gather
        move(layout, job.block_ids, records)

    def _tensor(self, arena: Arena) -> torch.Tensor:
        """The arena as one uint8 tensor; the last one is kept until another arena comes."""
        import torch

        if self._whole is None or self._whole[0] is not arena:
            self._whole = (arena, torch.frombuffer(arena.buffer, dtype=torch.uint8))
        return self._whole[1]

    def _compute_event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
        event.record(torch.cuda.current_stream(self._device))
        return event
