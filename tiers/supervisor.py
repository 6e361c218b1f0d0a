"""The store's supervisor: the one place below the connectors where any exception may be caught.

A bug in one completion must not stop the loop that serves everybody else. It is logged with its
trace and counted; the counter is exported, and the test suite fails when it moves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("ebbtide.tiers")


def supervised(call: Callable[..., None], *args: Any) -> bool:
    """Run a control-thread callback; False when it raised (logged)."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001  # the store's loop outlives a bug in one completion
        _log.exception("A completion raised; the store goes on")
        return False
    return True


def outcome_of(work: Callable[[Any], None], item: Any) -> BaseException | None:
    """Run blocking work in an I/O thread; what it raised is its outcome, judged on the control
    thread.
    """
    try:
        work(item)
    # A thread that died here would leave its batch open for ever.
    except BaseException as error:  # noqa: BLE001
        return error
    return None
