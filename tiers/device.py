"""The device edge: copies between paged device blocks and arena slots, beside the forward pass.

The only module of this room that needs torch, imported when the first copy engine is built. A copy
never waits for the engine and the engine never for a copy: jobs go to a thread, ends are polled.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.tiers.arena import Arena

CLOSE_TIMEOUT_S = 10.0


class CopyJob(NamedTuple):
    """Records at `offsets` in the arena and device blocks, pairwise. The end carries `tag`."""

    tag: Hashable
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

    On a GPU the copies run on a stream of their own, behind the work that the compute stream had
    been given when the job was submitted (never the legacy default stream). On a CPU they run in
    the thread, with the interpreter lock free.
    """

    def __init__(self, layout: PagedLayout) -> None:
        from ebbtide.kernels import copy

        self.layout = layout
        self._copy = copy
        self._cuda = layout.device.type == "cuda"
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._ends: deque[CopyEnd] = deque()
        self._whole: tuple[Arena, torch.Tensor] | None = None
        self.open_jobs = 0
        self._thread = threading.Thread(target=self._run, name="ebbtide-copies", daemon=True)
        self._thread.start()

    def submit(
        self,
        tag: Hashable,
        block_ids: Sequence[int],
        offsets: Sequence[int],
        *,
        to_device: bool,
        arena: Arena,
    ) -> None:
        """Start a copy. The blocks and the slots must stay put until its end is polled."""
        self.open_jobs += 1
        ready = self._compute_event()
        self._jobs.put(CopyJob(tag, tuple(block_ids), tuple(offsets), to_device, arena, ready))

    def poll(self) -> list[CopyEnd]:
        """The copies that have ended since the last call. O(ended)."""
        ends: list[CopyEnd] = []
        while self._ends:
            ends.append(self._ends.popleft())
        self.open_jobs -= len(ends)
        return ends

    def close(self) -> bool:
        """End the thread after what it is doing. False when it did not end in time."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._whole = None
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = outcome_of(self._copy_one, job)
            self._ends.append(CopyEnd(job.tag, job.to_device, error))

    def _copy_one(self, job: CopyJob) -> None:
        import torch

        if not self._cuda:
            self._move(job)
            return
        stream = torch.cuda.Stream(self.layout.device)  # type: ignore[no-untyped-call]  # torch
        with torch.cuda.stream(stream):
            if job.ready is not None:
                stream.wait_event(job.ready)
            self._move(job)
        stream.synchronize()

    def _move(self, job: CopyJob) -> None:
        size = self.layout.record_bytes
        arena = self._tensor(job.arena)
        records = [arena[offset : offset + size] for offset in job.offsets]
        move = self._copy.scatter if job.to_device else self._copy.gather
        move(self.layout, job.block_ids, records)

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
        event.record(torch.cuda.current_stream(self.layout.device))
        return event
