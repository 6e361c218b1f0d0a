"""How much of the tokens asked for the device's prefix cache served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts since they were last taken. `queries` and `hits` are in tokens (as vLLM 0.32).

    A request is counted once per admission: all its tokens as queries, those found in the device
    cache as hits. Admissions after a preemption count in the `preempted_` fields instead, so that a
    request finding its own blocks again does not look like sharing. `reset` tells that the cache
    was reset in the meantime.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False

    def record(self, num_tokens: int, num_hits: int, *, preempted: bool) -> None:
        """Count one admission."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
