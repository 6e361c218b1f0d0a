"""Arenas as a device knows them: registered from the first copy until the last ended."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.errors import TierUnavailableError
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ebbtide.kernels.driver import Driver
    from ebbtide.kernels.registration import Registration
    from ebbtide.tiers.arena import Arena

_log = logging.getLogger(__name__)


class Device(NamedTuple):
    """Where the blocks are. `compute_stream` returns the stream that the engine works on."""

    driver: Driver
    ordinal: int
    compute_stream: Callable[[], int]


@dataclass(slots=True)
class MappedArena:
    """One arena. `jobs` under the lock of `MappedArenas`."""

    arena: Arena
    tensor: torch.Tensor
    jobs: int = 0
    retired: bool = False  # another arena has come
    known: bool = False  # it was tried to register
    registration: Registration | None = None


class MappedArenas:
    """The arena in use, and older ones that copies still use. Any thread.

    Without a device nothing is registered.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self.pinned: bool | None = None  # the latest one is locked; None: not known yet
        self._arenas: dict[int, MappedArena] = {}  # by identity
        self._lock = threading.Lock()
        self._registering = threading.Lock()  # takes seconds: never with the other lock held

    def map(self, arena: Arena, tensor: torch.Tensor) -> MappedArena:
        """For one more job. Quick: what is no longer used is dropped where a job ends."""
        with self._lock:
            for other in self._arenas.values():
                other.retired = other.arena is not arena
            mapped = self._arenas.get(id(arena))
            if mapped is None:
                mapped = self._arenas[id(arena)] = MappedArena(arena, tensor)
            mapped.jobs += 1
            return mapped

    def unmap(self, mapped: MappedArena) -> None:
        """Where a job has ended. Raises TierUnavailableError when the driver refuses."""
        with self._lock:
            mapped.jobs -= 1
        self._drop_retired()

    def registered(self, mapped: MappedArena) -> Registration | None:
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

    def close(self) -> None:
        """When no copy is left."""
        with self._lock:
            for mapped in self._arenas.values():
                mapped.retired = True
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
