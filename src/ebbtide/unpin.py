"""`ebbtide unpin`: records that `ebbtide pin` keeps may leave memory again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ebbtide import pin
from ebbtide.chosen import NAME_DIGITS, choose, known_to
from ebbtide.cli import EXIT_DONE
from ebbtide.connectors.owner import reach_running

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options: those of `pin`."""
    pin.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the store."""
    keys = pin.read_keys(args.key)
    with reach_running(args.directory) as owner:
        (digest,) = choose(known_to(owner), args.namespace)
        report = owner.unpin(digest, keys)
    name = digest.hex()[:NAME_DIGITS]
    if args.json:
        print(json.dumps({"name": name, "digest": digest.hex(), **report}))
    else:
        print(f"{name}: {report['unpinned']} records unpinned")
        print(pin.share_line(report["kept_bytes"], report["kept_max_bytes"]))
    return EXIT_DONE
