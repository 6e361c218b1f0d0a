"""Sizes and durations: what is accepted, what is refused with the right words, and round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import ConfigError
from ebbtide.sizes import (
    SIZE_MAX,
    exact_duration,
    exact_size,
    format_size,
    parse_duration,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("64KiB", 65536),
        ("4096B", 4096),
        ("2TiB", 2**41),
        ("0B", 0),
        (" 1 KiB ", 1024),
        ("8GB", 8_000_000_000),
        ("1.5kB", 1500),
        ("250MB", 250_000_000),
        ("1TB", 10**12),
        ("0.1KiB", 102),  # 102.4, rounded down
        ("9007199254740993B", 2**53 + 1),  # no float on the way
    ],
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8", "'8MiB'"),
        ("1073741824", "'1073741824MiB'"),
        ("8G", "'8GiB' or '8GB'"),
        ("2g", "'2GiB' or '2GB'"),
        ("8gb", "'8GiB' or '8GB'"),
        ("8Gib", "'8GiB' or '8GB'"),
        ("5 parsecs", "'5MiB'"),
        ("", "'8GiB'"),
        ("GiB", "'8GiB'"),
        ("-1GiB", "'8GiB'"),
        ("1e3MiB", "'8GiB'"),
        ("nan", "'8GiB'"),
        ("1.GiB", "'8GiB'"),
        ("1_000MiB", "'8GiB'"),
        ("٣GiB", "'8GiB'"),
        ("1" * 5000 + "B", "'8GiB'"),
        ("9223372036854775808B", str(SIZE_MAX)),
    ],
)
def test_sizes_that_are_refused_with_the_fix(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert hint in caught.value.next_step


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("250ms", 0.25), ("30s", 30), ("2m", 120), ("1.5 h", 5400), ("10us", 1e-5), ("0s", 0)],
)
def test_durations_that_are_understood(text: str, duration_s: float) -> None:
    assert parse_duration(text) == pytest.approx(duration_s)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("30", "'30s' or '30ms'"), ("30 sec", "'30s'"), ("-1s", "'250ms'"), ("inf", "'250ms'")],
)
def test_durations_that_are_refused_with_the_fix(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert hint in caught.value.next_step


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (4096, "4KiB"),
        (3 * 2**29, "1.5GiB"),
        (2**30 + 1, "1GiB"),
        (123_456_789, "117.74MiB"),
        (200 * 2**40, "200TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(min_value=0, max_value=SIZE_MAX))
def test_exact_sizes_come_back(size: int) -> None:
    assert parse_size(exact_size(size)) == size


@given(st.integers(min_value=0, max_value=10**13))
def test_exact_durations_come_back(micros: int) -> None:
    assert round(parse_duration(exact_duration(micros / 1e6)) * 1e6) == micros


@given(st.integers(min_value=0, max_value=2**50), st.integers(min_value=1, max_value=2**21))
def test_round_up_is_the_next_multiple(size: int, alignment: int) -> None:
    rounded = round_up(size, alignment)
    assert rounded % alignment == 0
    assert size <= rounded < size + alignment
