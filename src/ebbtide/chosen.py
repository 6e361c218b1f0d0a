"""What the commands beside a running store share: where it is, and which namespace is meant."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from ebbtide.connectors.owner import OwnerClient

    Known = Mapping[bytes, Mapping[str, str | int]]  # a namespace's digest -> its telling fields

NAME_DIGITS = 12  # of a namespace's digest, in hex: its name for humans
NAME_DIGITS_MIN = 6
SHOWN_MAX = 5
STORE_HELP = "[disk] path or socket of a store"


def add_store(parser: argparse.ArgumentParser, help_text: str = STORE_HELP) -> None:
    """The one place that every such command takes."""
    parser.add_argument("directory", metavar="STORE", help=help_text)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def add_namespace(parser: argparse.ArgumentParser, *, every: bool = True) -> None:
    """One namespace, or all where that makes sense."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace",
        metavar="NAME",
        help=f"its name in `ebbtide stats`, {NAME_DIGITS_MIN} digits or more",
    )
    if every:
        which.add_argument("--all", action="store_true", help="every namespace")


def known_to(owner: OwnerClient) -> Known:
    """The namespaces of a store that runs."""
    return {one["digest"]: one["fields"] for one in owner.survey()["namespaces"]}


def choose(known: Known, wanted: str | None) -> list[bytes]:
    """The namespaces of that name, or all for None. Raises ConfigError unless it is just one."""
    if wanted is None:
        return list(known)
    digits = wanted.lower()
    if len(digits) < NAME_DIGITS_MIN or not set(digits) <= set(string.hexdigits):
        raise ConfigError(
            f"A namespace is named by {NAME_DIGITS_MIN} hex digits of its digest or more",
            next_step="`ebbtide stats DIR` lists the names.",
            namespace=wanted,
        )
    found = [digest for digest in known if digest.hex().startswith(digits)]
    if len(found) == 1:
        return found
    if found:
        raise ConfigError(
            "Several namespaces begin with these digits",
            next_step=f"Give more of them: {_named(known, found, len(digits) + NAME_DIGITS)}",
            namespace=wanted,
        )
    raise ConfigError(
        "There is no such namespace",
        next_step=f"Known are: {_named(known, list(known), NAME_DIGITS)}" if known else "",
        namespace=wanted,
    )


def _named(known: Known, digests: list[bytes], digits: int) -> str:
    words = [
        f"{digest.hex()[:digits]} ({known[digest].get('model', 'of an unknown model')})"
        for digest in digests[:SHOWN_MAX]
    ]
    more = len(digests) - SHOWN_MAX
    return ", ".join([*words, *([f"and {more} more"] if more > 0 else [])])
