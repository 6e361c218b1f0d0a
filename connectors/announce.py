"""What a store's process says of itself: to its terminal, its starter and its service manager."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from ebbtide.config import Config
    from ebbtide.connectors.systemd import Notifier
    from ebbtide.errors import EbbtideError
    from ebbtide.tiers.opening import OpenDisk

_log = logging.getLogger("ebbtide.serve")

EXTEND_GRACE_S = 10.0  # beyond the drain: closing the files


class Announcer:
    """The life of one store in a few lines. A private store says them to its log alone."""

    def __init__(self, ready_fd: int | None, notifier: Notifier | None) -> None:
        """`ready_fd`: of whoever started this process and waits for "ready", or why not.
        `notifier` None: a private store, whose engine may be the service.
        """
        self._ready_fd = ready_fd
        self._notifier = notifier

    def ready(self, words: str) -> None:
        """The store accepts connections."""
        self._say(f"store ready: {words}")
        self._tell_starter("ready")
        self._notify("READY=1", f"STATUS={words}")

    def stopping(self, drain_timeout_s: float, unwritten_bytes: int) -> None:
        """It accepts none any more and writes what only memory holds."""
        self._say(
            f"stopping: {format_size(unwritten_bytes)} that only memory holds are written, "
            f"for up to {drain_timeout_s:g} s"
        )
        # The configuration says how long a stop takes; the unit need not say it again.
        limit_us = int((drain_timeout_s + EXTEND_GRACE_S) * 1e6)
        self._notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={limit_us}", "STATUS=draining")

    def stopped(self, clean: bool, unwritten_bytes: int) -> None:
        """The drain has ended. `unwritten_bytes`: what goes with the process."""
        if clean:
            self._say("stopped: everything is written")
        else:
            _log.warning(
                "the store ends without having written everything: %s are lost",
                format_size(unwritten_bytes),
            )

    def refused(self, error: EbbtideError) -> None:
        """The store will not start, or failed. The command line prints why."""
        line = f"{type(error).__name__} {' '.join(str(error).split())}"
        self._tell_starter(line)
        self._notify(f"STATUS={line}")

    def _say(self, words: str) -> None:
        if self._notifier is None:
            _log.info("%s", words)
        else:
            sys.stderr.write(f"ebbtide: {words}\n")
            sys.stderr.flush()

    def _notify(self, *states: str) -> None:
        if self._notifier is not None:
            self._notifier.tell(*states)

    def _tell_starter(self, line: str) -> None:
        if self._ready_fd is None:
            return
        fd, self._ready_fd = self._ready_fd, None
        try:
            os.write(fd, f"{line}\n".encode())
        except OSError:
            sys.stderr.write("ebbtide: the process that started this store is gone\n")
        os.close(fd)


def describe_store(config: Config, disk: OpenDisk | None, url: str | None = None) -> str:
    """What is served and where, in one line."""
    words = [f"socket {config.socket}", f"memory {format_size(config.memory.capacity_bytes)}"]
    if url is not None:
        words.insert(1, f"HTTP {url}")
    if disk is None:
        return ", ".join([*words, "no disk tier"])
    return ", ".join(
        [
            *words,
            f"disk {format_size(disk.tier.space.capacity_bytes)} in {disk.directory.path}",
            "direct I/O" if disk.direct else "no direct I/O there: buffered, cache dropped behind",
            f"{disk.tier.records} records found",
            f"last stop {'clean' if disk.was_clean else 'not clean'}",
            *([f"OUT OF SERVICE: {disk.tier.down}"] if disk.tier.down else []),
        ]
    )
