"""Statistics of interleaved pairs, against numbers that were worked out by hand."""

from __future__ import annotations

import json
import random
from statistics import median

import pytest

from ebbtide.bench.pairs import (
    INVALID,
    RESOLVED,
    UNRESOLVED,
    Interval,
    measured_case,
    median_interval,
    ratios,
    rotated,
    verdict_of,
)
from ebbtide.errors import MisuseError

PROMISED = [
    *("bench", "case", "design", "record_bytes", "value", "unit", "ceiling"),
    *("ratio", "ratio_low", "ratio_high", "cpu_s_per_gb"),
]


def test_eleven_values_give_the_second_from_either_end() -> None:
    values = [0.5 + number / 100 for number in range(11)]
    random.Random(1).shuffle(values)
    found = median_interval(values)
    assert (found.median, found.low, found.high) == (0.55, 0.51, 0.59)
    assert found.coverage == pytest.approx(1 - 2 * 12 / 2048)  # (1 + 11) of 2**11, at either end


@pytest.mark.parametrize(
    ("count", "rank"),
    [(1, 1), (2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8)],
)
def test_the_ranks_are_those_of_the_sign_test(count: int, rank: int) -> None:
    found = median_interval(list(range(1, count + 1)))
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.median == (count + 1) / 2
    assert (found.coverage >= 0.95) == (count >= 6)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw, inside = random.Random(7), 0
    for _ in range(2000):
        found = median_interval([draw.expovariate(1.0) for _ in range(12)])
        inside += found.low <= 0.6931 <= found.high
    assert inside / 2000 == pytest.approx(found.coverage, abs=0.015)


def test_one_outlier_moves_nothing() -> None:
    calm = [0.8] * 10
    assert median_interval([*calm, 50.0])[:3] == (0.8, 0.8, 0.8)


def test_a_median_of_nothing_is_misuse() -> None:
    with pytest.raises(MisuseError):
        median_interval([])


def test_a_ratio_is_one_at_the_ceiling_and_smaller_below_it() -> None:
    assert ratios([50.0, 100.0], [100.0, 100.0], higher_is_better=True) == [0.5, 1.0]
    assert ratios([200.0, 100.0], [100.0, 100.0], higher_is_better=False) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("low", "high", "pairs", "valid", "verdict"),
    [
        (0.70, 0.79, 11, True, RESOLVED),
        (0.70, 0.81, 11, True, UNRESOLVED),
        (0.70, 0.70, 10, True, UNRESOLVED),
        (0.70, 0.70, 11, False, INVALID),
        (0.10, 0.90, 2, False, INVALID),
        (3.81, 4.19, 11, True, RESOLVED),  # a twentieth of what it is
        (3.79, 4.21, 11, True, UNRESOLVED),
    ],
)
def test_the_verdict(low: float, high: float, pairs: int, valid: bool, verdict: str) -> None:
    interval = Interval((low + high) / 2, low, high, 0.98)
    assert verdict_of(interval, pairs, valid=valid) == verdict


def test_every_design_has_every_place_once() -> None:
    designs = ["none", "memory", "memory+disk", "device"]
    orders = [rotated(designs, number) for number in range(4)]
    assert orders[0] == designs
    for place in range(4):
        assert sorted(order[place] for order in orders) == sorted(designs)
    assert rotated(designs, 4) == designs


def test_the_line_has_exactly_the_promised_fields() -> None:
    values, ceilings = [10.0, 30.0, 20.0], [40.0, 40.0, 50.0]
    case = measured_case(
        bench="offload",
        case="working_set_2x.prompt_tokens_per_s",
        design="memory",
        record_bytes=8192,
        unit="tokens/s",
        values=values,
        ceilings=ceilings,
        higher_is_better=True,
        cpu_s_per_gb=None,
        exercised=True,
        valid=True,
    )
    line = json.loads(case.line())
    assert list(line) == [*PROMISED, "verdict", "pairs", "exercised"]
    assert "\n" not in case.line()
    assert line["value"] == median(values)
    assert line["ceiling"] == median(ceilings)
    assert (line["ratio"], line["ratio_low"], line["ratio_high"]) == (0.4, 0.25, 0.75)
    assert line["cpu_s_per_gb"] is None
    assert (line["verdict"], line["pairs"], line["exercised"]) == (UNRESOLVED, 3, True)
    with pytest.raises(AttributeError):
        case.ratio = 1.0  # type: ignore[misc]  # frozen: that is the point
