"""Sizes and durations as text: `"8GiB"` and `"250ms"` in, whole bytes and seconds out, and back.

Binary units (`KiB`, `MiB`, `GiB`, `TiB`) are powers of 1024, decimal ones (`kB`, `MB`, `GB`, `TB`)
powers of 1000; both mean what they say. A number without a unit is refused, because its reader
cannot know which one was meant, and so is `8G`, for the same reason. Units are spelled exactly.
"""

from __future__ import annotations

import re
from fractions import Fraction

from ebbtide.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

SIZE_UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
}
DURATION_UNITS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
# Above this, byte offsets no longer fit the signed 64 bits that files and mappings use.
SIZE_MAX = 2**63 - 1

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*)\s*", re.ASCII)
_BINARY_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def _split(text: str, what: str, example: str) -> tuple[Fraction, str]:
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{text!r} is not a {what}", next_step=f"Write a number and a unit, like {example!r}"
        )
    return Fraction(found[1]), found[2]


def parse_size(text: str) -> int:
    """Return the bytes that `text` names, a part of a byte rounded down.

    Raises `ConfigError` when the text is no number with a unit, or more than a file can hold.
    """
    number, unit = _split(text, "size", "8GiB")
    digits = text.strip().removesuffix(unit).strip()
    if unit not in SIZE_UNITS:
        same = [known for known in SIZE_UNITS if known[0].lower() == unit[:1].lower()]
        written = " or ".join(repr(digits + known) for known in same if known != "B")
        problem = f"size {text!r} has no unit" if not unit else f"{text!r} has no known unit"
        raise ConfigError(
            problem,
            next_step=f"Write {written or repr(digits + 'MiB')}; GiB counts in 1024, GB in 1000",
        )
    size = int(number * SIZE_UNITS[unit])
    if size > SIZE_MAX:
        raise ConfigError(f"size {text!r} is too large", next_step=f"The most is {SIZE_MAX} bytes")
    return size


def parse_duration(text: str) -> float:
    """Return the seconds that `text` names. Raises `ConfigError` when it has no known unit."""
    number, unit = _split(text, "duration", "250ms")
    if unit not in DURATION_UNITS:
        digits = text.strip().removesuffix(unit).strip()
        problem = f"duration {text!r} has no unit" if not unit else f"{text!r} has no known unit"
        raise ConfigError(
            problem,
            next_step=f"Write '{digits}s' or '{digits}ms'; units are {', '.join(DURATION_UNITS)}",
        )
    return float(number * DURATION_UNITS[unit])


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` for people: the largest binary unit, two decimals at most, rounded."""
    for unit, factor in _BINARY_UNITS:
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f}".rstrip("0").rstrip(".") + unit
    return f"{size_bytes}B"


def exact_size(size_bytes: int) -> str:
    """Return text that `parse_size` turns back into exactly `size_bytes`."""
    for unit, factor in _BINARY_UNITS:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def exact_duration(duration_s: float) -> str:
    """Return text that `parse_duration` turns back into `duration_s`, to the microsecond."""
    micros = round(duration_s * 1_000_000)
    for unit in ("h", "m", "s", "ms"):
        factor = int(DURATION_UNITS[unit] * 1_000_000)
        if micros and micros % factor == 0:
            return f"{micros // factor}{unit}"
    return f"{micros}us" if micros else "0s"


def round_up(size_bytes: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `size_bytes`."""
    return -(-size_bytes // alignment) * alignment
