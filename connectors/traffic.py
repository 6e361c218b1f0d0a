"""What came over the store's socket: requests by verb, how long lookups took, who was refused."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

LATENCY_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)

# As in docs/protocol.md, but for LOAD, whose class is not called after the module of loads.
VERBS: dict[type[wire.Message], str] = {
    kind: "load"
    if kind is wire.LoadKeys
    else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
    for kind in wire.REQUESTS
}


class Histogram:
    """Counts of values up to each bound, and above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Traffic:
    """Counted by the server on its loop; under a microsecond a request."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.connections = 0  # that were accepted since the start
        self.refused: Counter[str] = Counter()  # "user", "full", "protocol"
        self.lookup_s = Histogram(LATENCY_BOUNDS_S)

    def handled(self, message: wire.Message, seconds: float) -> None:
        """A request was acted on, so long after it had been read from the socket."""
        verb = VERBS.get(type(message))
        if verb is not None:
            self.requests[verb] += 1
        if type(message) is wire.Lookup:
            self.lookup_s.add(seconds)
