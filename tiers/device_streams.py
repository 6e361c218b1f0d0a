"""Copies of a device with streams: beside the forward pass, a thread and a stream each way.

What makes them safe:

* A copy waits for an event that stands for everything the compute stream had been given when the
  job was submitted: the work that wrote a block before it is read, and the work that read it under
  its former owner before it is written.
* A job has ended when its stream has: then alone are blocks and slots let go.
* The arena is registered with the device until the last copy that uses it has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.sizes import format_size
from ebbtide.tiers.device import CopyEnd, DeviceCopies
from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ebbtide.kernels.choice import Choice
    from ebbtide.kernels.driver import Driver
    from ebbtide.kernels.fragments import FragmentTable
    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.kernels.methods import Method
    from ebbtide.kernels.registration import Registration
    from ebbtide.kernels.streams import Event, Stream
    from ebbtide.tiers.arena import Arena
    from ebbtide.tiers.device import CopyJob

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class Device(NamedTuple):
    """Where the blocks are. `compute_stream` returns the stream that the engine works on."""

    driver: Driver
    ordinal: int
    compute_stream: Callable[[], int]


def stream_copies(layouts: Mapping[int, PagedLayout], wanted: str) -> StreamCopies:
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
    return StreamCopies(layouts, device, choices)


@dataclass(slots=True)
class _MappedArena:
    """An arena as the device knows it. `jobs` under the owner's lock."""

    arena: Arena
    tensor: torch.Tensor
    jobs: int = 0
    retired: bool = False  # another arena has come
    known: bool = False  # it was tried to register
    registration: Registration | None = None


class _Queued(NamedTuple):
    job: CopyJob
    mapped: _MappedArena
    ready: Event | None


class StreamCopies(DeviceCopies):
    """One lane from the device and one to it, so that neither waits for the other.

    Without `device` (blocks in host memory) both lanes copy in their threads.
    """

    def __init__(
        self,
        layouts: Mapping[int, PagedLayout],
        device: Device | None = None,
        choices: Mapping[int, Choice] | None = None,
    ) -> None:
        from ebbtide.kernels.fragments import FragmentTable

        super().__init__(layouts)
        self._device = device
        self._tables = {group: FragmentTable.of(layout) for group, layout in layouts.items()}
        self._arenas: dict[int, _MappedArena] = {}  # by identity; the last one is in use
        self._lock = threading.Lock()
        self._registering = threading.Lock()  # takes seconds: never with the other lock held
        stores = {group: choice.store for group, choice in (choices or {}).items()}
        loads = {group: choice.load for group, choice in (choices or {}).items()}
        self._stores = _Lane(self, "ebbtide-stores", stores)
        self._loads = _Lane(self, "ebbtide-loads", loads)

    def settle_stores(self) -> None:
        self._stores.settle()

    def close(self) -> bool:
        lanes = (self._loads, self._stores)
        for lane in lanes:
            lane.leave()
        ended = all(lane.join(CLOSE_TIMEOUT_S) for lane in lanes)
        if ended:
            for mapped in self._arenas.values():
                mapped.retired = True
            self._drop_retired()
            self._whole = None
        return ended

    def _accept(self, job: CopyJob) -> None:
        mapped, ready = self._map(job.arena), None
        if self._device is not None:
            from ebbtide.kernels.streams import Event

            self._device.driver.use(self._device.ordinal)
            ready = Event(self._device.driver)
            ready.record(self._device.compute_stream())
        (self._loads if job.to_device else self._stores).put(_Queued(job, mapped, ready))

    def _map(self, arena: Arena) -> _MappedArena:
        """For one more job. Quick: what is no longer used is dropped where a job ends."""
        with self._lock:
            for other in self._arenas.values():
                other.retired = other.arena is not arena
            mapped = self._arenas.get(id(arena))
            if mapped is None:
                mapped = self._arenas[id(arena)] = _MappedArena(arena, self._tensor(arena))
            mapped.jobs += 1
            return mapped

    def _unmap(self, mapped: _MappedArena) -> None:
        """Where a job has ended, in its lane's thread."""
        with self._lock:
            mapped.jobs -= 1
        self._drop_retired()

    def _drop_retired(self) -> None:
        with self._lock:
            places = [place for place, one in self._arenas.items() if one.retired and not one.jobs]
            gone = [self._arenas.pop(place).registration for place in places]
        for registration in gone:
            if registration is not None:
                assert self._device is not None
                self._device.driver.use(self._device.ordinal)
                registration.close()

    def _registered(self, mapped: _MappedArena) -> Registration | None:
        """None: copies go through memory that is not locked, slowly, and by torch."""
        assert self._device is not None
        from ebbtide.kernels.registration import Registration

        with self._registering:
            if not mapped.known:
                mapped.known = True
                address, size = mapped.tensor.data_ptr(), mapped.tensor.numel()
                try:
                    mapped.registration = Registration(self._device.driver, address, size)
                except TierUnavailableError as error:
                    # As text: the error itself would keep the arena mapped.
                    _log.warning(
                        "Copies are slow, pinned=false: memory.capacity is %s. %s",
                        format_size(size),
                        str(error),
                    )
                self.pinned = mapped.registration is not None
            return mapped.registration


class _Lane:
    """One direction: a queue, a thread, and on a device a stream."""

    def __init__(self, owner: StreamCopies, name: str, methods: Mapping[int, str]) -> None:
        self._owner = owner
        self._names = methods  # by group
        # Of the lane's thread alone:
        self._stream: Stream | None = None
        self._methods: dict[tuple[int, str], Method] = {}
        self._queue: deque[_Queued] = deque()
        self._left = 0  # begun or not; under the condition, like the queue
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, queued: _Queued) -> None:
        with self._changed:
            self._left += 1
            self._queue.append(queued)
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until nothing is left."""
        with self._changed:
            while self._left:
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
            fault = outcome_of(self._owner._unmap, queued.mapped)
            if fault is not None:
                _log.warning("An arena is still registered with the device: %s", str(fault))
            self._owner._ends.append(CopyEnd(queued.job.tag, queued.job.to_device, error))
            with self._changed:
                self._left -= 1
                self._changed.notify_all()
        if self._stream is not None:
            outcome_of(lambda stream: stream.close(), self._stream)

    def _next(self) -> _Queued | None:
        """The next job; None when all are done and the engine leaves."""
        with self._changed:
            while not (self._queue or self._closing):
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _copy(self, queued: _Queued) -> None:
        device = self._owner._device
        if device is None or queued.ready is None:
            self._owner._move(queued.job)
            return
        try:
            self._copy_on_stream(queued, device, queued.ready)
        finally:
            queued.ready.close()

    def _copy_on_stream(self, queued: _Queued, device: Device, ready: Event) -> None:
        from ebbtide.kernels.methods import current_stream
        from ebbtide.kernels.streams import Stream

        device.driver.use(device.ordinal)
        registration = self._owner._registered(queued.mapped)
        job, table = queued.job, self._owner._tables[queued.job.group]
        table.check_current()
        stream = self._stream = self._stream or Stream(device.driver)
        try:
            stream.wait(ready)
            with current_stream(table, stream.handle):
                method = self._method(job.group, table, registered=registration is not None)
                move = method.scatter if job.to_device else method.gather
                move(
                    job.block_ids,
                    queued.mapped.tensor,
                    job.offsets,
                    stream=stream.handle,
                    registration=registration,
                )
        finally:
            # Also after a fault: what was queued before it may still touch blocks and slots.
            stream.synchronize()

    def _method(self, group: int, table: FragmentTable, *, registered: bool) -> Method:
        from ebbtide.kernels.choice import ENGINE, TORCH
        from ebbtide.kernels.methods import make_method

        assert self._owner._device is not None
        driver = self._owner._device.driver
        name = self._names.get(group, TORCH) if registered else TORCH
        made = self._methods.get((group, name))
        if made is None:
            try:
                made = make_method(name, driver, table)
            except TierUnavailableError as error:
                _log.warning("Copies by %s cannot be had any more: %s", name, str(error))
                made = make_method(ENGINE, driver, table)  # needs nothing but the driver
            self._methods[group, name] = made
        return made
