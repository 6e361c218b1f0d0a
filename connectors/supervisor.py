"""The engine's supervisor: one decorator around every hook. No fault reaches the engine."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("ebbtide.connectors")
LOG_INTERVAL_S = 10.0


class Supervised(Protocol):
    """A half whose hooks are supervised."""

    faults: FaultLog


class FaultLog:
    """Counts faults of hooks and logs them: one line per interval, with how many were left out."""

    def __init__(self, interval_s: float = LOG_INTERVAL_S) -> None:
        self.count = 0
        self._interval_s = interval_s
        self._silent_until = 0.0
        self._unlogged = 0

    def note(self, hook: str) -> None:
        """Call inside the except clause."""
        self.count += 1
        now = time.monotonic()
        if now < self._silent_until:
            self._unlogged += 1
            return
        _log.exception("A fault in %s became a miss (%d more unlogged)", hook, self._unlogged)
        self._silent_until = now + self._interval_s
        self._unlogged = 0


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Supervised")


def hook(
    fallback: Callable[Concatenate[S, P], T],
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Decorate a hook of a half: what it raises is counted, and `fallback(self, ...)` answers
    instead.

    The fallback gets the hook's arguments and must not raise: it says "miss" in the hook's own
    words.
    """

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def supervised(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001  # the engine outlives any fault of its cache
                self.faults.note(method.__name__)
                return fallback(self, *args, **kwargs)

        return supervised

    return decorate


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """The fallback of hooks that return nothing."""
