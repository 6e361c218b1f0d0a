"""The health of a disk tier: a drive that hangs is put out of service, one that works again comes
back.

A tier that is down serves nothing and is asked for nothing. It comes back only as another tier over
newly opened files, because what the page cache and the drive hold behind a failed write is not
known:

1. everything that was started has ended, however late;
2. the old files are closed;
3. directory, slab and index are opened anew, in a thread; a slot that nobody uses is written,
   synced and read back;
4. the store puts the new tier in the old one's place.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.runtime import REOPEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.index import StoredNamespace
    from ebbtide.tiers.runtime import Runtime, Timer

_log = logging.getLogger("ebbtide.tiers.disk")

LOOK_S = 1.0
LATE_S = 3.0  # since the last look: this process did not run, and its calls to the drive did not
STALL_S = 10.0
RETRY_FIRST_S = 5.0
RETRY_MAX_S = 60.0


class Reopened(NamedTuple):
    """A tier over newly opened files, and the namespaces that its index knows."""

    tier: DiskTier
    namespaces: Sequence[StoredNamespace]


class DiskHealth:
    """Watches one store's disk tier. Control thread only; nothing waits.

    `reopen` opens everything anew; it blocks, runs in a thread, and raises whatever stands in the
    way. `on_reopened` puts the tier in place.
    """

    def __init__(
        self,
        runtime: Runtime,
        tier: DiskTier,
        reopen: Callable[[], Reopened],
        on_reopened: Callable[[Reopened], None],
    ) -> None:
        self._runtime = runtime
        self._tier = tier
        self._reopen = reopen
        self._on_reopened = on_reopened
        self._wait_s = RETRY_FIRST_S
        self._retry_at = 0.0
        self._well_at = 0.0  # one that fails before that has not been well
        self._down = False
        self._looked_at = self._running_since = runtime.now()
        self._reopening = False
        self._closed = False
        self.reopened = 0
        self._timer: Timer = runtime.call_later(LOOK_S, self._look)

    @property
    def busy(self) -> bool:
        """A thread is opening files at this moment."""
        return self._reopening

    def close(self) -> None:
        """Look no more. What is being opened just now is closed again when it is open."""
        self._closed = True
        self._timer.cancel()

    def _look(self) -> None:
        now, tier = self._runtime.now(), self._tier
        if now - self._looked_at > LATE_S:  # stopped, or the machine was: the drive is asked again
            self._running_since = now
        self._looked_at = now
        if tier.down is None:
            since = tier.waiting_since()
            owed_s = 0.0 if since is None else now - max(since, self._running_since)
            if owed_s > STALL_S:
                tier.go_down(f"the drive has not answered for {owed_s:.0f} s")
        if tier.down is not None:
            if not self._down:
                self._wait_s = self._longer_s() if now < self._well_at else RETRY_FIRST_S
                self._down, self._retry_at = True, now + self._wait_s
            if tier.quiet and now >= self._retry_at:
                self._start()
                return
        self._timer = self._runtime.call_later(LOOK_S, self._look)

    def _start(self) -> None:
        self._tier.abandon()
        found: list[Reopened] = []
        self._reopening = True

        def open_it(_: None) -> None:
            reopened = self._reopen()
            if self._closed:  # nobody will come for it
                reopened.tier.abandon()
            else:
                found.append(reopened)

        self._runtime.start(
            REOPEN, open_it, [None], lambda outcomes: self._ended(found, outcomes[0])
        )

    def _ended(self, found: list[Reopened], error: BaseException | None) -> None:
        self._reopening = False
        if self._closed:
            for reopened in found:
                reopened.tier.abandon()
            return
        if error is None:
            (reopened,) = found
            self._tier, self._down = reopened.tier, False
            self._well_at = self._runtime.now() + RETRY_MAX_S
            self.reopened += 1
            _log.warning("The disk tier is in service again: %d records", reopened.tier.records)
            self._on_reopened(reopened)
        else:
            self._wait_s = self._longer_s()
            self._retry_at = self._runtime.now() + self._wait_s
            # Its text: who keeps the log would keep the frames of the opening alive.
            _log.warning("The disk tier stays down: %s", str(error))
        self._timer = self._runtime.call_later(LOOK_S, self._look)

    def _longer_s(self) -> float:
        return min(2 * self._wait_s, RETRY_MAX_S)
