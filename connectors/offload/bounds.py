"""The named bounds of one scheduler half."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerBounds:
    """What may be under way, for how long, and how far is looked."""

    lookup_timeout_s: float = 0.05
    store_budget_bytes: int = 64 << 20  # demoted per step at most
    store_open_bytes: int = 256 << 20  # on their way at the same time
    pin_timeout_s: float = 0.05  # unanswered for so long, a reserve gives its pins back
    reserve_timeout_s: float = 1.0  # and for so long, nothing more is asked for
    commit_timeout_s: float = 5.0  # unanswered, a commit counts as failed
    free_scan: int = 64  # blocks looked at from the head of the free queue
    lazy_scan: int = 512  # the same, where nothing else is looked at
