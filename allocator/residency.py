"""How long blocks stay on the device, how long they lay idle, how soon they are used again.

A sample of the blocks, as vLLM 0.32 takes it, so that following them costs next to nothing.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_SAMPLE_RATIO = 0.01
_ACCESSES_KEPT = 4


class Residency(NamedTuple):
    """One sampled stay of a block, from its allocation to the next use of its room, in seconds.

    `idle_s` counts from the last access, or from the allocation if there was none. `reuse_gaps_s`
    lie between the last four accesses, so there are at most three.
    """

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


class _Stay:
    __slots__ = ("accesses_ns", "born_ns", "last_ns")

    def __init__(self, now_ns: int) -> None:
        self.born_ns = self.last_ns = now_ns
        self.accesses_ns: deque[int] = deque(maxlen=_ACCESSES_KEPT)


class ResidencySampler:
    """Follows each allocated block with probability `sample_ratio`, of (0, 1].

    `clock_ns` is a monotonic clock in nanoseconds, `draw` yields numbers of [0, 1), one per
    allocated block: `time.monotonic_ns` and `random.random`, or what a test or a simulation has
    instead. All calls belong to the thread of the pool and are O(1), `take` and `cleared` apart.

    Raises ConfigError for any other ratio.
    """

    def __init__(
        self,
        sample_ratio: float = DEFAULT_SAMPLE_RATIO,
        *,
        clock_ns: Callable[[], int],
        draw: Callable[[], float],
    ) -> None:
        if not 0 < sample_ratio <= 1:
            raise ConfigError(
                "the share of blocks to sample is above 0 and at most 1",
                next_step="Leave the sampler out to follow none",
                sample_ratio=sample_ratio,
            )
        self.sample_ratio = sample_ratio
        self._clock_ns = clock_ns
        self._draw = draw
        self._stays: dict[int, _Stay] = {}
        self._ended: list[Residency] = []

    def __len__(self) -> int:
        """Blocks that are followed now: at most those of the pool."""
        return len(self._stays)

    def allocated(self, block_id: int) -> None:
        """The block was handed out."""
        if self._draw() < self.sample_ratio:
            self._stays[block_id] = _Stay(self._clock_ns())

    def accessed(self, block_id: int) -> None:
        """A hit referenced the block."""
        stay = self._stays.get(block_id)
        if stay is not None:
            stay.last_ns = self._clock_ns()
            stay.accesses_ns.append(stay.last_ns)

    def evicted(self, block_id: int) -> None:
        """The block is about to be handed out again, cached or not. Before its `allocated`."""
        stay = self._stays.pop(block_id, None)
        if stay is None:
            return
        now_ns = self._clock_ns()
        self._ended.append(
            Residency(
                (now_ns - stay.born_ns) / 1e9,
                (now_ns - stay.last_ns) / 1e9,
                tuple((after - before) / 1e9 for before, after in pairwise(stay.accesses_ns)),
            )
        )

    def cleared(self) -> None:
        """The cache was reset: forget all stays, and those that ended but were not taken."""
        self._stays.clear()
        self._ended.clear()

    def take(self) -> list[Residency]:
        """The stays that ended since the last call, in the order in which they ended."""
        ended = self._ended
        self._ended = []
        return ended
