"""`ebbtide reset`: a running store forgets a namespace, or all; its engines go on with none.

Unlike a purge it overwrites nothing: the bytes stay until others take their place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ebbtide.chosen import NAME_DIGITS, add_namespace, add_store, choose, known_to
from ebbtide.cli import EXIT_DONE
from ebbtide.connectors.owner import reach_running

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_store(parser)
    add_namespace(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the store; ends when that is durable."""
    with reach_running(args.directory) as owner:
        chosen = choose(known_to(owner), None if args.all else args.namespace)
        if args.all:
            owner.reset(None)  # in one step, also what is opened meanwhile
        else:
            owner.reset(chosen[0])
    if args.json:
        names = [{"name": one.hex()[:NAME_DIGITS], "digest": one.hex()} for one in chosen]
        print(json.dumps({"namespaces": names}))
    else:
        for digest in chosen:
            print(f"{digest.hex()[:NAME_DIGITS]}: forgotten")
        if not chosen:
            print("There is no namespace")
    return EXIT_DONE
