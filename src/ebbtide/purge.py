"""`ebbtide purge`: forget a namespace for good, and overwrite what it held."""

from __future__ import annotations

import json
import string
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ebbtide.cli import EXIT_DONE
from ebbtide.connectors.owner import reach_owner
from ebbtide.errors import ConfigError
from ebbtide.sizes import format_size
from ebbtide.stats import NAME_DIGITS
from ebbtide.tiers.offline import open_offline
from ebbtide.tiers.purge_offline import purge_offline
from ebbtide.tiers.survey import describe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from ebbtide.connectors.owner import OwnerClient

    Known = Mapping[bytes, Mapping[str, str | int]]  # a namespace's digest -> its telling fields

NAME_DIGITS_MIN = 6
SHOWN_MAX = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("directory", metavar="DIR", help="[disk] path of a store")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace",
        metavar="NAME",
        help=f"its name in `ebbtide stats`, {NAME_DIGITS_MIN} digits or more",
    )
    which.add_argument("--all", action="store_true", help="every namespace")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Have the store do it that runs on the directory; without one, do it on the files."""
    wanted: str | None = None if args.all else args.namespace
    owner = reach_owner(args.directory)
    if owner is None:
        purged = _purge_files(args.directory, wanted)
    else:
        with owner:
            purged = _purge_running(owner, wanted)
    if args.json:
        print(json.dumps({"by_store": owner is not None, "namespaces": purged}))
    else:
        for line in _lines(purged):
            print(line)
    return EXIT_DONE


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


def _purge_running(owner: OwnerClient, wanted: str | None) -> list[dict[str, Any]]:
    known = {one["digest"]: one["fields"] for one in owner.survey()["namespaces"]}
    return [_report(digest, owner.purge(digest)) for digest in choose(known, wanted)]


def _purge_files(path: str, wanted: str | None) -> list[dict[str, Any]]:
    with open_offline(path) as (directory, index):
        known = {one.digest: describe(one.descriptor) for one in index.namespaces()}
        purged = purge_offline(directory, index, choose(known, wanted))
    return [_report(digest, asdict(found)) for digest, found in purged.items()]


def _report(digest: bytes, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": digest.hex()[:NAME_DIGITS], "digest": digest.hex(), **found}


def _lines(purged: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for one in purged:
        counts = [
            f"{one[f'{tier}_records']} records {where} ({format_size(one[f'{tier}_bytes'])})"
            for tier, where in (("memory", "in memory"), ("disk", "on disk"))
            if f"{tier}_records" in one
        ]
        lines.append(f"{one['name']}: forgotten and overwritten: {', '.join(counts)}")
        if one.get("held_slots"):
            lines.append(
                f"  {one['held_slots']} slots of memory are still held by engines: they are "
                "overwritten when they come back"
            )
        if one.get("kept_slots"):
            lines.append(
                f"  {one['kept_slots']} slots are named by other entries too, or lie outside the "
                "payload file, and were not overwritten: run `ebbtide fsck`"
            )
    return lines or ["There is no namespace"]
