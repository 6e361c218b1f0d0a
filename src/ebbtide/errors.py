"""The one error hierarchy. Each error says what was found and what a human can do next.

Only `ConfigError` may stop an engine, and only at start; every other error degrades to a miss,
a counter and a rate-limited log line inside the supervisors.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class EbbtideError(Exception):
    """Base of all errors of this package.

    `problem` states the fact, `next_step` what to do about it, `context` the values that matter.
    `str(error)` is one line with all three.
    """

    def __init__(self, problem: str, *, next_step: str = "", **context: object) -> None:
        super().__init__(problem)
        self.problem = problem
        self.next_step = next_step
        self.context = context

    def __str__(self) -> str:
        details = ", ".join(f"{name}={value}" for name, value in self.context.items())
        line = f"{self.problem} ({details})" if details else self.problem
        return f"{line}. {self.next_step}" if self.next_step else line


class ConfigError(EbbtideError):
    """The configuration cannot work. Raised at start only."""


class MisuseError(EbbtideError):
    """The caller broke a contract: a bug on this side of the interface."""


class ProtocolError(EbbtideError):
    """The peer sent bytes that the protocol does not allow. Ends that connection, nothing else."""


class AccessDeniedError(EbbtideError):
    """The user at the other end is not one that may be there. Ends that connection."""


class CorruptRecordError(EbbtideError):
    """Bytes do not match their digest. The record is a miss from now on."""


class TierUnavailableError(EbbtideError):
    """A tier or the store cannot be reached or was taken down after a fault."""


class NoSpaceError(EbbtideError):
    """A bounded resource is exhausted."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that was chosen and is none: with the nearest one, and with all."""
    names = list(known)
    close = get_close_matches(name, names, 1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"unknown {what} {name!r}", next_step=f"{hint}Choose one of {', '.join(names)}"
    )
