"""Statistics of interleaved pairs: every round measures all designs and the ceiling, one by one.

A design is judged by the ratio to the ceiling *of the same round*, so that what slows a machine for
seconds slows both. The median of these ratios is reported with an interval that supposes nothing
about their distribution: between the k-th smallest and the k-th largest ratio of n lies the true
median with probability 1 - 2 P(Binomial(n, 1/2) < k); k is the largest with at least 95 %. Eleven
pairs give the second smallest and the second largest (98.8 %). Fewer than six pairs cannot reach
95 % at all: they get smallest and largest, and never the verdict RESOLVED.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import comb
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

PAIRS_MIN = 11
CONFIDENCE = 0.95
HALF_WIDTH_MAX = 0.05

RESOLVED = "RESOLVED"
UNRESOLVED = "UNRESOLVED"
INVALID = "INVALID"


class Interval(NamedTuple):
    """A median and the interval that holds the true one with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Case:
    """One measured number against its ceiling: one JSON line.

    `value` and `ceiling` are medians over the rounds, in `unit`. `ratio` is 1 when the design
    reaches the ceiling and smaller when it does not, also where a smaller value is better.
    `cpu_s_per_gb` None: nothing was moved, or nobody but the engine took part.
    """

    bench: str
    case: str
    design: str
    record_bytes: int
    value: float
    unit: str
    ceiling: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_s_per_gb: float | None
    verdict: str
    pairs: int
    exercised: bool

    def line(self) -> str:
        """The case as one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)


def median_interval(values: Sequence[float]) -> Interval:
    """The median of independent values and its 95 % interval. Raises MisuseError for none."""
    if not values:
        raise MisuseError("a median of nothing")
    ordered, count = sorted(values), len(values)
    rank = 1
    while rank < (count + 1) // 2 and _coverage(count, rank + 1) >= CONFIDENCE:
        rank += 1
    return Interval(median(ordered), ordered[rank - 1], ordered[-rank], _coverage(count, rank))


def _coverage(count: int, rank: int) -> float:
    """Probability that the true median lies from the `rank`-th smallest to the `rank`-th largest
    value.
    """
    outside = sum(comb(count, below) for below in range(rank))
    return 1.0 - outside / float(2 ** (count - 1))


def ratios(
    values: Sequence[float], ceilings: Sequence[float], *, higher_is_better: bool
) -> list[float]:
    """Round by round, how much of the ceiling was reached. 1 is the ceiling itself."""
    pairs = zip(values, ceilings, strict=True)
    return [v / c if higher_is_better else c / v for v, c in pairs]


def verdict_of(interval: Interval, pairs: int, *, valid: bool) -> str:
    """INVALID when the measurement exercised nothing or was wrong, UNRESOLVED when it is too vague.

    Too vague: fewer than 11 pairs, or an interval that is wider than 0.05 to either side; of a
    median above 1, than a twentieth of it.
    """
    if not valid:
        return INVALID
    narrow = (interval.high - interval.low) / 2 <= HALF_WIDTH_MAX * max(1.0, interval.median)
    return RESOLVED if narrow and pairs >= PAIRS_MIN else UNRESOLVED


def rotated(designs: Sequence[T], round_number: int) -> list[T]:
    """The order of one round: in as many rounds as there are designs, each has every place once."""
    shift = round_number % len(designs)
    return [*designs[shift:], *designs[:shift]]


def measured_case(
    *,
    bench: str,
    case: str,
    design: str,
    record_bytes: int,
    unit: str,
    values: Sequence[float],
    ceilings: Sequence[float],
    higher_is_better: bool,
    cpu_s_per_gb: float | None,
    exercised: bool,
    valid: bool,
) -> Case:
    """The case that these rounds make."""
    reached = median_interval(ratios(values, ceilings, higher_is_better=higher_is_better))
    return Case(
        bench=bench,
        case=case,
        design=design,
        record_bytes=record_bytes,
        value=_shortened(median(values)),
        unit=unit,
        ceiling=_shortened(median(ceilings)),
        ratio=_shortened(reached.median),
        ratio_low=_shortened(reached.low),
        ratio_high=_shortened(reached.high),
        cpu_s_per_gb=None if cpu_s_per_gb is None else _shortened(cpu_s_per_gb),
        verdict=verdict_of(reached, len(values), valid=valid),
        pairs=len(values),
        exercised=exercised,
    )


def _shortened(value: float) -> float:
    """Five significant digits: no run resolves more."""
    return float(f"{value:.5g}")
