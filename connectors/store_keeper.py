"""Keeping a private store alive: whoever started its process restarts it when it dies."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from ebbtide.connectors.process import ensure_store
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

_log = logging.getLogger("ebbtide.connectors")

FIRST_PAUSE_S = 1.0
PAUSE_MAX_S = 60.0
STEADY_S = 300.0  # a store that lived so long had a good start: the next pause is short again


_parked: list[subprocess.Popen[bytes]] = []  # stores that outlive their keeper, to be reaped


class StoreKeeper:
    """One daemon thread that sleeps until the store's process ends. Any thread may close it.

    The clients reconnect by themselves; what was only in memory is lost, what is on disk is found.
    """

    def __init__(self, process: subprocess.Popen[bytes], settings: Mapping[str, Any]) -> None:
        self.process: subprocess.Popen[bytes] | None = process  # None while there is none
        self._settings = settings
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._closing = False
        self._done = False
        self._thread = threading.Thread(target=self._keep, name="ebbtide-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer. The store ends with its engine's processes. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        _parked[:] = [one for one in (*_parked, self.process) if one and one.poll() is None]

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not (self._closing or self._done):
            started = time.monotonic()
            code = self._await_end()
            if self._closing:
                return
            _log.error("The private store ended (exit code %s); starting another", code)
            if time.monotonic() - started > STEADY_S:
                pause_s = FIRST_PAUSE_S
            self.process = None
            while self.process is None and not (self._closing or self._done):
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                if not self._closing:
                    self._start()

    def _start(self) -> None:
        try:
            # None: another half of this engine was faster, and keeps the store from now on.
            self.process = ensure_store(self._settings)
        except EbbtideError as error:
            _log.error("The private store does not start, so every block is computed: %s", error)
        else:
            self._done = self.process is None

    def _await_end(self) -> int | None:
        """The exit code of the process; None when the keeper is closed first."""
        process = self.process
        assert process is not None
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it has ended and was reaped
            return process.poll()
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.register(self._wake_read, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
        finally:
            os.close(pidfd)
        return process.wait() if pidfd in ready else None

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        poller.poll(seconds * 1000)
