"""`ebbtide purge`: forget a namespace for good, and overwrite what it held."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ebbtide.chosen import NAME_DIGITS, add_namespace, add_store, choose, known_to
from ebbtide.cli import EXIT_DONE
from ebbtide.connectors.owner import reach_owner
from ebbtide.sizes import format_size
from ebbtide.tiers.offline import open_offline
from ebbtide.tiers.purge_offline import purge_offline
from ebbtide.tiers.survey import describe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from ebbtide.connectors.owner import OwnerClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_store(parser)
    add_namespace(parser)


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


def _purge_running(owner: OwnerClient, wanted: str | None) -> list[dict[str, Any]]:
    return [_report(digest, owner.purge(digest)) for digest in choose(known_to(owner), wanted)]


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
