"""The share of tokens that the prefix cache served to the most recent requests."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from ebbtide.allocator.prefix_stats import PrefixCacheStats

DEFAULT_MAX_REQUESTS = 1000


class HitRate:
    """Hits over queries of the last updates that cover up to `max_requests` requests.

    As vLLM 0.32: whole updates leave at the old end while more than one remains and together they
    cover more; the newest one stays however large it is. Preempted requests do not count. Raises
    MisuseError for a window below 1.
    """

    def __init__(self, max_requests: int = DEFAULT_MAX_REQUESTS) -> None:
        if max_requests < 1:
            raise MisuseError("a hit rate is one of requests", max_requests=max_requests)
        self.max_requests = max_requests
        self._updates: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add what was counted since the last update. Amortised O(1).

        A reset of the cache empties the window first. An update without requests changes nothing
        else.
        """
        if stats.reset:
            self._updates.clear()
            self._requests = self._queries = self._hits = 0
        if stats.requests == 0:
            return
        self._updates.append((stats.requests, stats.queries, stats.hits))
        self._add(stats.requests, stats.queries, stats.hits)
        while len(self._updates) > 1 and self._requests > self.max_requests:
            requests, queries, hits = self._updates.popleft()
            self._add(-requests, -queries, -hits)

    @property
    def requests(self) -> int:
        """Requests in the window. 0 means that there is no rate to speak of."""
        return self._requests

    @property
    def ratio(self) -> float:
        """0..1; 0 without queries."""
        return self._hits / self._queries if self._queries else 0.0

    def _add(self, requests: int, queries: int, hits: int) -> None:
        self._requests += requests
        self._queries += queries
        self._hits += hits
