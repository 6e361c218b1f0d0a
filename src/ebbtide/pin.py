"""`ebbtide pin`: a running store keeps records in memory, whatever their recency."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ebbtide.chosen import NAME_DIGITS, add_namespace, add_store, choose, known_to
from ebbtide.cli import EXIT_DONE
from ebbtide.connectors.owner import reach_running
from ebbtide.connectors.protocol import CHOSEN_KEYS_MAX
from ebbtide.errors import ConfigError
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_store(parser)
    add_namespace(parser, every=False)
    parser.add_argument(
        "--key",
        metavar="HEX",
        action="append",
        default=[],
        help="block hash and KV group; may be repeated; none: all that memory holds",
    )


def read_keys(words: Sequence[str]) -> tuple[bytes, ...]:
    """Keys as they are written. Raises ConfigError."""
    if len(words) > CHOSEN_KEYS_MAX:
        raise ConfigError(
            f"{len(words)} keys are too many at a time", next_step=f"Give at most {CHOSEN_KEYS_MAX}"
        )
    try:
        keys = tuple(bytes.fromhex(word) for word in words)
    except ValueError as error:
        raise ConfigError("A key is not hexadecimal", next_step="Write 72 or 40 digits") from error
    if not {len(key) for key in keys} <= {36, 20} or len({len(key) for key in keys}) > 1:
        raise ConfigError(
            "A key has 36 bytes or 20: the block hash, and 4 bytes of the KV group",
            next_step="Write 72 or 40 digits, for all keys of a command the same",
        )
    return keys


def run(args: argparse.Namespace) -> int:
    """Ask the store. More than its share of memory is refused with the figures: exit code 1."""
    keys = read_keys(args.key)
    with reach_running(args.directory) as owner:
        (digest,) = choose(known_to(owner), args.namespace)
        report = owner.pin(digest, keys)
    name = digest.hex()[:NAME_DIGITS]
    if args.json:
        print(json.dumps({"name": name, "digest": digest.hex(), **report}))
        return EXIT_DONE
    absent = report["not_in_memory"]
    print(
        f"{name}: {report['pinned']} records pinned" + (f", {absent} not in memory" * bool(absent))
    )
    print(share_line(report["kept_bytes"], report["kept_max_bytes"]))
    return EXIT_DONE


def share_line(kept_bytes: int, kept_max_bytes: int) -> str:
    """How much of memory is pinned."""
    return f"pinned in all: {format_size(kept_bytes)} of {format_size(kept_max_bytes)}"
