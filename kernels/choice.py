"""Which way of copying serves a device best: a choice from what was measured at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ENGINE, KERNEL, TORCH = METHODS = ("engine", "kernel", "torch")
AUTO = "auto"

ENGINE_SHARE = 0.85
"""The copy engine is taken down to this share of the fastest: it leaves the compute units alone,
and a forward pass that runs beside a copy by kernel loses more than the copy gains."""


class Figure(NamedTuple):
    """What one method did in one direction, measured."""

    method: str
    to_device: bool
    copied_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Its speed."""
        return self.copied_bytes / self.seconds


class Choice(NamedTuple):
    """The methods that copy from the device (`store`) and to it (`load`)."""

    store: str
    load: str


def choose(wanted: str, figures: Iterable[Figure], unavailable: Mapping[str, str]) -> Choice:
    """The method of each direction. `unavailable`: methods that cannot run here, and why.

    What is wanted by name is taken, whatever was measured. Otherwise the copy engine, when it is
    nearly as fast as the fastest; else the fastest. Where nothing was measured: torch, which always
    works. Raises ConfigError for a wanted method that cannot run, or that nobody knows. Pure.
    """
    if wanted != AUTO:
        if wanted not in METHODS or wanted in unavailable:
            raise ConfigError(
                f"Copies by {wanted!r} cannot be had here",
                next_step="Set connector.copy to auto, or install what is missing",
                reason=unavailable.get(wanted, f"known are auto, {', '.join(METHODS)}"),
            )
        return Choice(wanted, wanted)
    best: list[str] = []
    measured = [one for one in figures if one.method not in unavailable]
    for to_device in (False, True):
        speeds: dict[str, float] = {}
        for figure in measured:
            if figure.to_device is to_device:
                known = speeds.get(figure.method, 0.0)
                speeds[figure.method] = max(known, figure.bytes_per_s)
        fastest = max(speeds, key=speeds.__getitem__, default=TORCH)
        if speeds.get(ENGINE, 0.0) >= ENGINE_SHARE * speeds.get(fastest, float("inf")):
            fastest = ENGINE
        best.append(fastest)
    return Choice(*best)
