"""The line that tells every few seconds how full the device is and how often its cache serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ebbtide.allocator.hit_rate import HitRate
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.allocator.prefix_stats import PrefixCacheStats

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 10.0


class LogLine:
    """Logs, at most every `interval_s` seconds, one line for engine number `engine`:

        Engine 000: GPU KV cache usage: 46.0%, Prefix cache hit rate: 49.2%

    The words of vLLM 0.32, of which an allocator knows these two; the rate is left out until a
    request was recorded. Level INFO; DEBUG once nothing was recorded and the usage has not changed
    for two intervals, so that an idle engine is silent. `clock_s` is a monotonic clock in seconds
    (`time.monotonic`), `device` the word for the device.

    Belongs to the thread of the engine's scheduler. Raises ConfigError for an interval that is not
    above 0.
    """

    def __init__(
        self,
        *,
        clock_s: Callable[[], float],
        engine: int = 0,
        device: str = "GPU",
        interval_s: float = DEFAULT_INTERVAL_S,
    ) -> None:
        if not interval_s > 0:
            raise ConfigError(
                "the interval of the log line is above 0",
                next_step="Leave the line out to log none",
                interval_s=interval_s,
            )
        self.interval_s = interval_s
        self.hit_rate = HitRate()
        self._clock_s = clock_s
        self._prefix = f"Engine {engine:03d}: {device} KV cache usage: "
        self._last_s = clock_s()
        self._last_usage = 0.0
        self._recorded = False
        self._was_idle = False

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add what the manager counted since it was last asked. Once per step. O(1)."""
        self.hit_rate.observe(stats)
        if stats.requests or stats.preempted_requests:
            self._recorded = True

    def log_if_due(self, usage: float) -> bool:
        """Log the line if an interval has passed since the last one. `usage` is 0..1. O(1)."""
        now_s = self._clock_s()
        if now_s - self._last_s < self.interval_s:
            return False
        self._last_s = now_s
        idle = not self._recorded and usage == self._last_usage
        level = logging.DEBUG if idle and self._was_idle else logging.INFO
        self._was_idle = idle
        self._recorded = False
        self._last_usage = usage
        line = f"{self._prefix}{usage * 100:.1f}%"
        if self.hit_rate.requests:
            line += f", Prefix cache hit rate: {self.hit_rate.ratio * 100:.1f}%"
        logger.log(level, "%s", line)
        return True
