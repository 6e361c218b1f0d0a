"""Copies of a device with streams: beside the forward pass, a thread and a stream each way.

What makes them safe:

* A copy waits for an event that stands for everything the compute stream had been given when the
  job was submitted: the work that wrote a block before it is read, and the work that read it under
  its former owner before it is written.
* A job has ended when its stream has: then alone are blocks and slots let go.
* The arena is registered with the device until the last copy that uses it has ended.
* Layer by layer, a copy leaves a mark behind each layer: an event of its stream. The compute stream
  is made to wait for the mark, and only a mark that has been set can be waited for: until then the
  engine's thread waits. After a fault no further mark comes, but the job's end, and nobody waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.tiers.device import CopyEnd, DeviceCopies
from ebbtide.tiers.mapped_arenas import Device, MappedArena, MappedArenas
from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    import torch

    from ebbtide.kernels.choice import Choice
    from ebbtide.kernels.fragments import FragmentTable
    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.kernels.methods import Method
    from ebbtide.kernels.streams import Event, Stream
    from ebbtide.tiers.device import CopyJob

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


def stream_copies(
    layouts: Mapping[int, PagedLayout], wanted: str, *, by_layer: bool = False
) -> StreamCopies:
    """Copies for blocks on a CUDA device, each group by the method that is best for its layout.

    Raises ConfigError when the wanted method cannot be had, or the device has no CUDA driver.
    """
    import torch

    from ebbtide.kernels.driver import Driver
    from ebbtide.kernels.fragments import FragmentTable
    from ebbtide.kernels.methods import choose_method

    where = next(iter(layouts.values())).device
    ordinal = torch.cuda.current_device() if where.index is None else where.index

    def compute_stream() -> int:
        return int(torch.cuda.current_stream(where).cuda_stream)

    try:
        device = Device(Driver(), ordinal, compute_stream)
        device.driver.use(ordinal)
        torch.cuda.synchronize(where)  # what still writes the blocks, such as zeros of their maker
        choices = {
            group: choose_method(wanted, device.driver, FragmentTable.of(layout))
            for group, layout in layouts.items()
        }
    except TierUnavailableError as error:
        raise ConfigError(
            "Blocks of this device cannot be copied",
            next_step="Run on an NVIDIA GPU or a CPU, or without ebbtide.",
            device=where,
            reason=error,
        ) from error
    return StreamCopies(layouts, device, choices, by_layer=by_layer)


@dataclass(slots=True, eq=False)
class _Queued:
    job: CopyJob
    mapped: MappedArena
    ready: Event | None
    parts: deque[CopyJob]  # still to be moved


class StreamCopies(DeviceCopies):
    """One lane from the device and one to it, so that neither waits for the other.

    Without `device` (blocks in host memory) both lanes copy in their threads.
    """

    def __init__(
        self,
        layouts: Mapping[int, PagedLayout],
        device: Device | None = None,
        choices: Mapping[int, Choice] | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        from ebbtide.kernels.fragments import FragmentTable

        super().__init__(layouts, by_layer=by_layer)
        self._device = device
        self._tables: dict[tuple[int, int | None], FragmentTable] = {}  # by group and layer
        for group, layout in layouts.items():
            self._tables[group, None] = FragmentTable.of(layout)
            for number, layer in enumerate(self._layers[group]):
                self._tables[group, number] = FragmentTable.of(layer.layout)
        self._arenas = MappedArenas(device)
        stores = {group: choice.store for group, choice in (choices or {}).items()}
        loads = {group: choice.load for group, choice in (choices or {}).items()}
        self._stores = _Lane(self, "ebbtide-stores", stores)
        self._loads = _Lane(self, "ebbtide-loads", loads)

    @property
    def pinned(self) -> bool | None:
        return self._arenas.pinned

    def interleave(self, tags: Collection[Hashable]) -> None:
        self._loads.interleave(tags)

    def wait_for_layer(self, tag: Hashable, group: int, layer: int) -> None:
        self._loads.wait_for_layer((tag, group), layer)

    def wait_for_end(self, tag: Hashable) -> None:
        for group in self.layouts:
            self._loads.wait_for_end((tag, group))

    def settle_stores(self) -> None:
        self._stores.settle()

    def close(self) -> bool:
        lanes = (self._loads, self._stores)
        for lane in lanes:
            lane.leave()
        ended = all(lane.join(CLOSE_TIMEOUT_S) for lane in lanes)
        if ended:
            self._arenas.close()
            self._whole = None
        return ended

    def _accept(self, job: CopyJob) -> None:
        mapped, ready = self._arenas.map(job.arena, self._tensor(job.arena)), None
        if self._device is not None:
            from ebbtide.kernels.streams import Event

            self._device.driver.use(self._device.ordinal)
            ready = Event(self._device.driver)
            ready.record(self._device.compute_stream())
        parts = deque([job])
        if self.by_layer and job.to_device:
            layers = range(len(self._layers[job.group]))
            parts = deque(job._replace(layer=layer) for layer in layers)
        queued = _Queued(job, mapped, ready, parts)
        (self._loads if job.to_device else self._stores).put(queued)


_Marks = dict[int, "Event | None"]  # by layer, of those that are queued; None: it is there


class _Lane:
    """Copies one job after the other. `methods`: what copies on a device, by group."""

    def __init__(self, owner: StreamCopies, name: str, methods: Mapping[int, str]) -> None:
        self._owner = owner
        self._names = methods  # by group
        # Of the lane's thread alone:
        self._stream: Stream | None = None
        self._methods: dict[tuple[int, int | None, str], Method] = {}
        self._staging: torch.Tensor | None = None
        # Under the condition:
        self._queue: deque[_Queued] = deque()
        self._interleaved: set[Hashable] = set()  # tags
        self._marks: dict[tuple[Hashable, int], _Marks] = {}  # by tag and group, until the end
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, queued: _Queued) -> None:
        with self._changed:
            if self._owner.by_layer:
                self._marks[queued.job.tag, queued.job.group] = {}
            self._queue.append(queued)
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until nothing is left."""
        with self._changed:
            while self._queue:
                self._changed.wait()

    def interleave(self, tags: Collection[Hashable]) -> None:
        with self._changed:
            self._interleaved.update({one.job.tag for one in self._queue}.intersection(tags))

    def wait_for_layer(self, name: tuple[Hashable, int], layer: int) -> None:
        with self._changed:
            while (marks := self._marks.get(name)) is not None and layer not in marks:
                self._changed.wait()
            mark = marks[layer] if marks is not None else None
            if mark is not None:  # while it is here nobody closes it
                device = self._owner._device
                assert device is not None
                device.driver.use(device.ordinal)
                mark.hold_back(device.compute_stream())

    def wait_for_end(self, name: tuple[Hashable, int]) -> None:
        with self._changed:
            while name in self._marks:
                self._changed.wait()

    def leave(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (queued := self._next()) is not None:
            error = outcome_of(self._copy, queued)
            if error is not None or not queued.parts:
                # Also after a fault: what was queued before it may still touch blocks and slots.
                fault = outcome_of(self._settle_stream, queued)
                self._end(queued, error or fault)
        if self._stream is not None:
            outcome_of(lambda stream: stream.close(), self._stream)

    def _next(self) -> _Queued | None:
        """The job of which a part is to be moved; None when all are done and the engine leaves."""
        with self._changed:
            while not (self._queue or self._closing):
                self._changed.wait()
            if not self._queue or self._queue[0].job.tag not in self._interleaved:
                return self._queue[0] if self._queue else None
            together = (one for one in self._queue if one.job.tag in self._interleaved)
            return min(together, key=lambda one: one.parts[0].layer or 0)

    def _end(self, queued: _Queued, error: BaseException | None) -> None:
        job = queued.job
        fault = outcome_of(self._owner._arenas.unmap, queued.mapped)
        if fault is not None:
            _log.warning("An arena is still registered with the device: %s", str(fault))
        self._owner._ends.append(CopyEnd(job.tag, job.to_device, error))
        with self._changed:
            self._queue.remove(queued)
            marks = self._marks.pop((job.tag, job.group), {})
            if all(one.job.tag != job.tag for one in self._queue):
                self._interleaved.discard(job.tag)
            self._changed.notify_all()
        for event in (queued.ready, *marks.values()):
            if event is not None:
                outcome_of(lambda one: one.close(), event)

    def _settle_stream(self, queued: _Queued) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, queued: _Queued) -> None:
        part, device = queued.parts.popleft(), self._owner._device
        if device is None or queued.ready is None:
            self._owner._move(part)
        else:
            self._copy_on_stream(queued, part, device, queued.ready)
        if part.layer is not None:
            self._mark(part)

    def _copy_on_stream(self, queued: _Queued, part: CopyJob, device: Device, ready: Event) -> None:
        from ebbtide.kernels.arena_records import ArenaRecords
        from ebbtide.kernels.methods import current_stream
        from ebbtide.kernels.streams import Stream

        device.driver.use(device.ordinal)
        registration = self._owner._arenas.registered(queued.mapped)
        table = self._owner._tables[part.group, part.layer]
        table.check_current()
        stream = self._stream = self._stream or Stream(device.driver)
        if not part.layer:  # the first part, or all of it
            stream.wait(ready)
        with current_stream(table, stream.handle):
            method = self._method(part, table, registered=registration is not None)
            move = method.scatter if part.to_device else method.gather
            records = ArenaRecords(
                part.block_ids, queued.mapped.tensor, self._owner._offsets(part), registration
            )
            move(records, stream=stream.handle)

    def _mark(self, part: CopyJob) -> None:
        """Say that a layer is queued on the stream or, without one, that it is there."""
        assert part.layer is not None
        mark = None
        if self._stream is not None and self._owner._device is not None:
            from ebbtide.kernels.streams import Event

            mark = Event(self._owner._device.driver)
            mark.record(self._stream.handle)
        with self._changed:
            self._marks[part.tag, part.group][part.layer] = mark
            self._changed.notify_all()

    def _method(self, part: CopyJob, table: FragmentTable, *, registered: bool) -> Method:
        from ebbtide.kernels.choice import ENGINE, TORCH
        from ebbtide.kernels.methods import make_method

        assert self._owner._device is not None
        driver = self._owner._device.driver
        name = self._names.get(part.group, TORCH) if registered else TORCH
        made = self._methods.get((part.group, part.layer, name))
        if made is None:
            try:
                made = make_method(name, driver, table, self._staging)
            except TierUnavailableError as error:
                _log.warning("Copies by %s cannot be had any more: %s", name, str(error))
                made = make_method(ENGINE, driver, table)  # needs nothing but the driver
            self._methods[part.group, part.layer, name] = made
            self._staging = made.staging if made.staging is not None else self._staging
        return made
