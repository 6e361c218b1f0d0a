"""The command line. No module of a verb is read before that verb is chosen, so help is instant.

A verb is a module with `add_arguments(parser)` and `run(args) -> int`. Data goes to standard
output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 used or configured
wrongly, 3 corrupt data found, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ebbtide import __version__
from ebbtide.errors import ConfigError, CorruptRecordError, EbbtideError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_INTERRUPTED = 130

LOG_VARIABLE = "EBBTIDE_LOG"
LOG_LEVELS = ("debug", "info", "warning", "error")


class Verb(NamedTuple):
    """Where a verb lives and what it is for."""

    module: str
    purpose: str


class VerbModule(Protocol):
    """What the module of a verb offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments on its own parser."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return an exit code."""
        ...


VERBS = {
    "demo": Verb("ebbtide.bench.demo", "show blocks ebb and flow on this machine"),
    "serve": Verb("ebbtide.connectors.serve", "run a store that several engines share"),
    "config": Verb("ebbtide.config_cli", "check, show or write a configuration"),
    "doctor": Verb("ebbtide.doctor", "look for what would keep a set-up from working"),
    "fsck": Verb("ebbtide.fsck", "check what lies in a disk directory"),
    "stats": Verb("ebbtide.stats", "tell what each namespace of a disk directory holds"),
    "purge": Verb("ebbtide.purge", "forget a namespace and overwrite what it held"),
    "reset": Verb("ebbtide.reset", "have a running store forget a namespace"),
    "pin": Verb("ebbtide.pin", "have a running store keep records in memory"),
    "unpin": Verb("ebbtide.unpin", "undo pin"),
    "bench": Verb("ebbtide.bench.cli", "measure tiers and offloading"),
    "replay": Verb("ebbtide.bench.replay", "run a recorded trace through the policies"),
}

# Which extra of the distribution brings a package that a verb may miss.
EXTRAS = {
    "torch": "torch",
    "starlette": "http",
    "uvicorn": "http",
    "prometheus_client": "http",
}


def _complain(text: str) -> None:
    print(f"ebbtide: {' '.join(text.split())}", file=sys.stderr)


def _set_up_logging() -> None:
    import logging

    level = os.environ.get(LOG_VARIABLE) or "warning"
    if level not in LOG_LEVELS:
        raise ConfigError(
            f"{LOG_VARIABLE} is {level!r}", next_step=f"Use one of {', '.join(LOG_LEVELS)}"
        )
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="ebbtide: %(levelname)s: %(message)s"
    )


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="ebbtide",
        description="A tiered cache for the KV blocks of LLM engines.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ebbtide {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    return parser, {
        name: verbs.add_parser(
            name, help=verb.purpose, description=verb.purpose, allow_abbrev=False
        )
        for name, verb in VERBS.items()
    }


def _run(argv: Sequence[str]) -> int:
    parser, verb_parsers = _parsers()
    # No option before the verb takes a value, so the first plain word is the verb.
    chosen = next((word for word in argv if not word.startswith("-")), "")
    if chosen not in VERBS:
        parser.parse_args(argv)  # prints help, version or a usage error, and exits
        return EXIT_USAGE
    module = cast("VerbModule", import_module(VERBS[chosen].module))
    module.add_arguments(verb_parsers[chosen])
    args = parser.parse_args(argv)
    _set_up_logging()
    code = module.run(args)
    sys.stdout.flush()
    return code


def _missing(error: ModuleNotFoundError) -> str:
    name = error.name or "unknown"
    package = name.partition(".")[0]
    if package == "ebbtide":
        return f"this installation lacks {name}. Reinstall ebbtide"
    wanted = f"ebbtide[{EXTRAS[package]}]" if package in EXTRAS else package
    return f"this needs the package {package}. Install it: pip install '{wanted}'"


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as stop:  # argparse ends this way
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        _complain(_missing(error))
        return EXIT_FAILED
    except EbbtideError as error:
        _complain(str(error))
        if isinstance(error, ConfigError):
            return EXIT_USAGE
        return EXIT_CORRUPT if isinstance(error, CorruptRecordError) else EXIT_FAILED


def _reader_left() -> bool:
    """Say whether standard output is a pipe or socket that nobody reads any more."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return False  # not a file of the system
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` is without the program's name."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return _guarded(lambda: _run(words))
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe broke: that is a fault of the verb
        # What is still buffered would break the same pipe when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
