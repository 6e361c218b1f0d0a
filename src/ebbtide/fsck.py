"""`ebbtide fsck`: is what lies in a disk directory what was stored there?"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from ebbtide.cli import EXIT_CORRUPT, EXIT_DONE
from ebbtide.connectors.owner import reach_owner
from ebbtide.sizes import format_size
from ebbtide.tiers.fsck import check_directory

if TYPE_CHECKING:
    import argparse

    from ebbtide.tiers.fsck import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("directory", metavar="DIR", help="[disk] path of a store")
    parser.add_argument(
        "--repair", action="store_true", help="take what is not right out of the index"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """0: sound. 3: corruption was found, repaired or not."""
    report = _check(args.directory, repair=args.repair)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        for line in _lines(report):
            print(line)
    return EXIT_DONE if report.is_sound else EXIT_CORRUPT


def _check(directory: str, *, repair: bool) -> Report:
    """A running store is asked, with --repair or without: it drops what does not verify."""
    owner = reach_owner(directory)
    if owner is None:
        return check_directory(directory, repair=repair, progress=_progress)
    with owner:
        return owner.check(_progress)


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\rebbtide fsck: {done} of {of} records", end="", file=sys.stderr, flush=True)


def _lines(report: Report) -> list[str]:
    if not report.index_usable:
        return ["The index cannot be read. A store would start empty on this directory."]
    lines = ["Checked by the store that runs on it"] if report.by_store else []
    lines += [
        f"{report.records} records in {report.namespaces} namespaces, "
        f"{format_size(report.payload_bytes)} of {format_size(report.slab_bytes)}",
        f"{report.sound} sound",
    ]
    if report.garbage:
        lines.append(f"{report.garbage} of namespaces that were reset")
    lines += [f"{count} {what}" for what, count in sorted(report.bad.items())]
    if report.slab_missing_bytes:
        lines.append(f"{format_size(report.slab_missing_bytes)} of the payload file are missing")
    if report.repaired:
        lines.append(f"{report.repaired} entries were taken out of the index")
    return lines
