"""How long a connector's scheduler hooks take: each is wrapped on the object that vLLM calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# All that vLLM 0.32's scheduler calls while requests come, run and go.
SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "take_events",
    "get_kv_connector_stats",
)


class HookTimes:
    """Durations by hook since the last `take`. Costs 0.2 us per call, which is in the durations.

    A hook that calls another one through the object is counted with it, and so is the other.
    """

    def __init__(self, connector: Any) -> None:
        self._taken: dict[str, list[float]] = {}
        for name in SCHEDULER_HOOKS:
            method = getattr(connector, name, None)
            if method is not None:
                setattr(connector, name, self._timed(name, method))

    def take(self) -> dict[str, list[float]]:
        """Microseconds of every call since the last time."""
        found = {name: times[:] for name, times in self._taken.items() if times}
        for times in self._taken.values():
            times.clear()
        return found

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        times = self._taken.setdefault(name, [])
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return method(*args, **kwargs)
            finally:
                times.append((clock() - started) / 1e3)

        return timed
