"""Streams and events of the device, for copies that run beside the engine's own work.

A stream made here does not wait for the legacy default stream, nor does that one wait for it: what
has to come first is said with an event.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide.kernels.driver import Driver

_NON_BLOCKING = 1
_NO_TIMING = 2
_PRIORITY = -1
"""Above the default: a copy that a request waits for is short, and the forward pass is long."""


class Event:
    """A point in the work of a stream. `close` it when nobody waits for it any more."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.handle = ctypes.c_void_p()
        driver.call("cuEventCreate", ctypes.byref(self.handle), _NO_TIMING)

    def record(self, stream: int) -> None:
        """Stand for everything that `stream` holds by now. Any stream, the default one too."""
        self._driver.call("cuEventRecord", self.handle, stream)

    def hold_back(self, stream: int) -> None:
        """What any `stream` is given from now on runs behind this point. Returns at once."""
        self._driver.call("cuStreamWaitEvent", stream, self.handle, 0)

    def close(self) -> None:
        """Give it back. Who waits for it already still waits."""
        self._driver.call("cuEventDestroy_v2", self.handle)


class Stream:
    """A stream of ebbtide's own. `handle` is what CUDA, torch and Triton call a stream."""

    def __init__(self, driver: Driver) -> None:
        """Raises TierUnavailableError; the driver must be in use in this thread."""
        self._driver = driver
        made = ctypes.c_void_p()
        driver.call("cuStreamCreateWithPriority", ctypes.byref(made), _NON_BLOCKING, _PRIORITY)
        self.handle = made.value or 0

    def wait(self, event: Event) -> None:
        """What is queued from now on runs behind the event. Returns at once."""
        event.hold_back(self.handle)

    def synchronize(self) -> None:
        """Return when everything queued has ended; the interpreter lock is free meanwhile."""
        self._driver.call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Give it back; what is queued still ends."""
        self._driver.call("cuStreamDestroy_v2", self.handle)
