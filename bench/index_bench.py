"""`ebbtide bench index`: opening a directory of many records, asking for them, and what each costs.

Every round opens the same directory in a new process, as ebbtide does and as a plain dictionary,
and looks chains of keys up. The ceiling is the dictionary of the same round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from msgspec import json as msgspec_json

from ebbtide.bench.arguments import check_directory, check_room
from ebbtide.bench.index_directory import RECORD_BYTES, capacity_bytes, fill
from ebbtide.bench.index_worker import Answer
from ebbtide.bench.pairs import INVALID, PAIRS_MIN, Case, measured_case
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BENCH = "index"
EBBTIDE, DICTIONARY = "ebbtide", "dictionary"
RECORDS, QUICK_RECORDS = (100_000, 1_000_000), (100_000,)
QUICK_PAIRS = 3
KEYS = 8192  # of one lookup
LOOKUPS = 200  # in a round
WORKER_TIMEOUT_S = 300.0
RECORDS_MIN = 2 * KEYS

UNITS = {"open_cpu_s": "s", "ram_bytes_per_record": "B", "lookup_p50_ms": "ms"}
UNITS["lookup_p99_ms"] = "ms"


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of records") from error
    if min(counts) < RECORDS_MIN:
        raise argparse.ArgumentTypeError(f"{text!r}: at least {RECORDS_MIN} records")
    return counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--quick", action="store_true", help="3 pairs: a look, not a result")
    parser.add_argument("--records", type=_counts, help="in the directory (default 100000,1000000)")
    parser.add_argument("--dir", help="a directory on the drive (default: a temporary one)")


def run(args: argparse.Namespace) -> int:
    """Measure. 0 when every line is valid, else 1."""
    check_directory(args.dir)
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
    valid = True
    for records in args.records or (QUICK_RECORDS if args.quick else RECORDS):
        with tempfile.TemporaryDirectory(prefix="ebbtide-bench-", dir=args.dir) as scratch:
            for case in _measure(records, pairs, scratch):
                print(case.line() if args.json else _row(case), flush=True)
                valid = valid and case.verdict != INVALID
    return 0 if valid else 1


def _measure(records: int, pairs: int, scratch: str) -> list[Case]:
    needed = 2 * capacity_bytes(records)
    check_room(scratch, needed, "Give fewer --records, or --dir on another drive.")
    path = os.path.join(scratch, "disk")
    _say(f"{records} records: writing the directory")
    fill(path, records)
    answers: dict[str, list[Answer]] = {EBBTIDE: [], DICTIONARY: []}
    for number in range(pairs):
        _say(f"{records} records: {number + 1} of {pairs}")
        designs = list(answers) if number % 2 else list(answers)[::-1]
        for design in designs:
            answers[design].append(_ask(design, path, records, number))
    return [_case(name, records, answers) for name in UNITS]


def _ask(design: str, path: str, records: int, seed: int) -> Answer:
    numbers = (records, KEYS, LOOKUPS, seed)
    command = [sys.executable, "-m", "ebbtide.bench.index_worker", design, path, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, timeout=WORKER_TIMEOUT_S, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise EbbtideError("A worker of the benchmark failed", design=design, reason="".join(last))
    return msgspec_json.decode(done.stdout, type=Answer)


def _case(name: str, records: int, answers: Mapping[str, Sequence[Answer]]) -> Case:
    found = answers[EBBTIDE]
    return measured_case(
        bench=BENCH,
        case=f"{name}.{records}",
        design=EBBTIDE,
        record_bytes=RECORD_BYTES,
        unit=UNITS[name],
        values=[getattr(answer, name) for answer in found],
        ceilings=[getattr(answer, name) for answer in answers[DICTIONARY]],
        higher_is_better=False,
        cpu_s_per_gb=None,
        exercised=True,
        valid=all(answer.found == LOOKUPS * KEYS for one in answers.values() for answer in one),
    )


def _row(case: Case) -> str:
    return (
        f"{case.case:<32} {case.value:>9.4g} {case.unit:<3} dictionary {case.ceiling:>9.4g}"
        f"  {case.ratio:.2f} [{case.ratio_low:.2f}, {case.ratio_high:.2f}]  {case.verdict}"
    )


def _say(text: str) -> None:
    print(f"ebbtide bench index: {text}", file=sys.stderr, flush=True)
