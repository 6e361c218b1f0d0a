"""Which method copies: a pure function of what was measured."""

from __future__ import annotations

import pytest

from ebbtide.errors import ConfigError
from ebbtide.kernels.choice import ENGINE_SHARE, METHODS, Choice, Figure, choose

MIB = 1 << 20


def figures(store: dict[str, float], load: dict[str, float]) -> list[Figure]:
    """From GB/s by method, each way."""
    return [
        Figure(method, to_device, MIB, MIB / (speed * 1e9))
        for to_device, speeds in ((False, store), (True, load))
        for method, speed in speeds.items()
    ]


@pytest.mark.parametrize(
    ("store", "load", "chosen"),
    [
        # Long fragments: the copy engine reaches the bus both ways.
        (
            {"engine": 52, "kernel": 50, "torch": 30},
            {"engine": 53, "kernel": 51, "torch": 30},
            "ee",
        ),
        # Short ones: it does not.
        ({"engine": 5, "kernel": 46, "torch": 20}, {"engine": 6, "kernel": 45, "torch": 20}, "kk"),
        # One way only.
        ({"engine": 40, "kernel": 45, "torch": 2}, {"engine": 30, "kernel": 48, "torch": 2}, "ek"),
        # As fast as it must be, and a little slower than that.
        ({"engine": 85.1, "kernel": 100}, {"engine": 84.9, "kernel": 100}, "ek"),
        # Without Triton.
        ({"engine": 5, "torch": 20}, {"engine": 18, "torch": 20}, "te"),
        ({"torch": 20}, {"torch": 20}, "tt"),
        ({}, {}, "tt"),
    ],
)
def test_the_fastest_or_nearly_so_the_copy_engine(
    store: dict[str, float], load: dict[str, float], chosen: str
) -> None:
    by_letter = {method[0]: method for method in METHODS}
    assert ENGINE_SHARE == 0.85
    expected = Choice(*(by_letter[letter] for letter in chosen))
    assert choose("auto", figures(store, load), {}) == expected


def test_the_best_of_several_rounds_counts() -> None:
    slow, fast = Figure("engine", False, MIB, 1.0), Figure("engine", False, MIB, 0.1)
    other = Figure("kernel", False, MIB, 0.2)
    for order in ([slow, fast, other], [fast, other, slow]):
        assert choose("auto", order, {}).store == "engine"


def test_what_cannot_run_is_never_chosen() -> None:
    measured = figures({"kernel": 50, "torch": 2}, {"kernel": 50, "torch": 2})
    assert choose("auto", measured, {"kernel": "no compiler"}) == Choice("torch", "torch")


@pytest.mark.parametrize("wanted", METHODS)
def test_what_is_wanted_is_taken_however_slow(wanted: str) -> None:
    speeds = {"engine": 1.0, "kernel": 2.0, "torch": 4.0}
    assert choose(wanted, figures(speeds, speeds), {}) == Choice(wanted, wanted)


@pytest.mark.parametrize("wanted", ["engine", "cuda"])
def test_what_is_wanted_and_cannot_be_had_is_a_configuration_error(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"connector\.copy to auto"):
        choose(wanted, [], {"engine": "no driver"})
