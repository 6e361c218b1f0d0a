"""`ebbtide bench disk`: how much of the raw drive the disk tier reaches, and other ways to do it.

Every round measures the raw drive at three depths and all designs, in turn, with the same number of
records through the same number of buffers. The ceiling of a round is the best depth of that round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from ebbtide.bench.arguments import check_directory, check_room
from ebbtide.bench.disk_load import in_flight
from ebbtide.bench.disk_peers import Files, LmdbValues, diskcache, rocksdb
from ebbtide.bench.disk_raw import DEPTHS, Raw
from ebbtide.bench.disk_tier import Tier
from ebbtide.bench.pairs import INVALID, PAIRS_MIN, Case, measured_case, rotated
from ebbtide.errors import ConfigError
from ebbtide.sizes import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.bench.disk_load import Design

BENCH = "disk"
GB, MB = 1e9, 1e6
MIB = 1 << 20
SIZES = (64 << 10, 256 << 10, 1 * MIB, 2 * MIB)
QUICK_SIZES = (64 << 10, 1 * MIB)
CAPACITY_BYTES, QUICK_CAPACITY_BYTES = 2048 * MIB, 512 * MIB
QUICK_PAIRS = 3
REWRITTEN = 3  # times the capacity, in the rounds at steady state
GOT_SHARE = 4  # a quarter of the records is got in a round
SCATTERED_SHARE = 8  # of the records is put in a round after them
FLOOD_SHARE = 4  # a quarter of the capacity is put while single records are got
KEPT_SHARE = 0.75  # of the latest records: a tier may evict a little ahead
TIER_SPARE = 1.25  # of the tier's capacity, for its index and the slots that it evicts ahead
SPACE_PER_DESIGN = 1.6
DESIGNS_MAX = 9
FRESH, FRESH_DEPTH = "raw_unwritten", 8  # the drive, where nothing was written before
PAGE = 4096


class Measured(NamedTuple):
    """One design's share of a round."""

    mb_per_s: float
    cpu_s: float
    right: int


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(parse_size(part) for part in text.split(","))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not all(size and size % PAGE == 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are multiples of 4KiB")
    return sizes


def _capacity(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--quick", action="store_true", help="3 pairs: a look, not a result")
    parser.add_argument(
        "--sizes", type=_sizes, help="of the records (default 64KiB,256KiB,1MiB,2MiB)"
    )
    parser.add_argument(
        "--capacity",
        type=_capacity,
        help="payload that each design keeps (default 2GiB, with --quick 512MiB)",
    )
    parser.add_argument("--dir", help="a directory on the drive (default: a temporary one)")
    parser.add_argument("--no-peers", action="store_true", help="the raw drive and ebbtide alone")


def run(args: argparse.Namespace) -> int:
    """Measure. 0 when every line is valid, else 1."""
    check_directory(args.dir)
    bench = DiskBench(args)
    cases: list[Case] = []
    for record_bytes in args.sizes or (QUICK_SIZES if args.quick else SIZES):
        with tempfile.TemporaryDirectory(prefix="ebbtide-bench-", dir=args.dir) as scratch:
            found = bench.measure(record_bytes, scratch)
        cases += found
        for case in found:
            print(case.line() if args.json else _row(case), flush=True)
    return 0 if all(case.verdict != INVALID for case in cases) else 1


class DiskBench:
    """The options, resolved."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._pairs: int = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
        self._capacity_bytes: int = args.capacity or (
            QUICK_CAPACITY_BYTES if args.quick else CAPACITY_BYTES
        )
        self._with_peers = not args.no_peers
        self._json: bool = args.json

    def measure(self, record_bytes: int, scratch: str) -> list[Case]:
        """All cases of one record size."""
        records = self._capacity_bytes // record_bytes
        if records < max(self._pairs * 2, 2 * in_flight(record_bytes)):
            raise ConfigError(
                "The capacity holds too few records of this size",
                next_step="Raise --capacity.",
                record_bytes=record_bytes,
                records=records,
            )
        needed = int(
            (DESIGNS_MAX if self._with_peers else 3) * SPACE_PER_DESIGN * self._capacity_bytes
        )
        check_room(scratch, needed, "Give a smaller --capacity, or --dir on another drive.")
        with ExitStack() as stack:
            raws, designs = self._open(stack, records, record_bytes, scratch)
            fresh = Raw(os.path.join(scratch, "fresh"), records, record_bytes, FRESH_DEPTH, FRESH)
            stack.enter_context(closing(fresh))
            self._explain(record_bytes, designs)
            for raw in raws:  # the ceiling is that of written extents
                raw.put(range(records))
            rounds = Rounds(raws, designs, records, record_bytes)
            name = format_size(record_bytes)
            for number in range(self._pairs):
                _say(f"{name}: filling, {number + 1} of {self._pairs}")
                rounds.put("put_fill", number, records // self._pairs, beside=[fresh])
            for number in range(self._pairs):
                _say(f"{name}: full, {number + 1} of {self._pairs}")
                rounds.put("put", number, REWRITTEN * records // self._pairs)
            for number in range(self._pairs):
                _say(f"{name}: used, {number + 1} of {self._pairs}")
                rounds.get("get", number, records // GOT_SHARE)
                rounds.get_beside_puts(number, records // FLOOD_SHARE)
                rounds.put("put_scattered", number, records // SCATTERED_SHARE)
            return rounds.cases()

    def _open(
        self, stack: ExitStack, records: int, record_bytes: int, scratch: str
    ) -> tuple[list[Raw], list[Design]]:
        def place(name: str) -> str:
            return os.path.join(scratch, name)

        capacity = int(records * record_bytes * TIER_SPARE) + 16 * MIB
        raws = [Raw(place("raw"), records, record_bytes, depth) for depth in DEPTHS]
        designs: list[Design] = [Tier(place("ebbtide"), capacity, record_bytes)]
        if self._with_peers:
            for how in ({}, {"direct": True}, {"synced": True}):
                path = place("files" + "".join(how))
                designs.append(Files(path, records, record_bytes, **how))
            designs.append(LmdbValues(place("lmdb"), records, record_bytes))
            for build, name in ((rocksdb, "rocksdict"), (diskcache, "diskcache")):
                try:
                    designs.append(build(place(name), records, record_bytes))
                except ModuleNotFoundError:
                    _say(f"{name} is not installed, and not measured")
        for design in (*raws, *designs):
            stack.enter_context(closing(design))
        return raws, designs

    def _explain(self, record_bytes: int, designs: Sequence[Design]) -> None:
        """What each design's numbers stand for."""
        facts: dict[str, Any] = {design.name: str(design.guarantees) for design in designs}
        tier = next(design for design in designs if isinstance(design, Tier))
        line = {"bench": BENCH, "record_bytes": record_bytes, "guarantees": facts}
        line |= {"direct_io": tier.direct, "runs_at_once": tier.runs_at_once}
        if self._json:
            print(json.dumps({"facts": line}), flush=True)
        else:
            print(
                f"{format_size(record_bytes)}: " + ", ".join(f"{n} {g}" for n, g in facts.items())
            )


class Rounds:
    """What was measured with one record size."""

    def __init__(
        self, raws: Sequence[Raw], designs: Sequence[Design], records: int, record_bytes: int
    ) -> None:
        self._raws = raws
        self._designs = designs
        self._records = records
        self._record_bytes = record_bytes
        self._next = 0
        self._draw = Random(record_bytes)
        self._found: dict[tuple[str, str], list[Measured]] = {}  # by case and design
        self._ceilings: dict[str, list[float]] = {}  # by case
        self._moved: dict[str, list[int]] = {}  # records, by case
        self._tier = next(design for design in designs if isinstance(design, Tier))
        self._beside: list[float] = []  # ms
        self._beside_ceilings: list[float] = []

    def put(self, case: str, round_number: int, count: int, beside: Sequence[Design] = ()) -> None:
        """Everybody stores the same numbers, and also who has a part in this case alone."""
        numbers = range(self._next, self._next + count)
        self._next += count

        def work(design: Design) -> int:
            design.put(numbers)
            return count

        self._measure(case, round_number, count, work, beside)

    def get(self, case: str, round_number: int, count: int) -> None:
        """Everybody brings the same numbers, of the latest, from the drive."""
        kept = range(self._next - int(self._records * KEPT_SHARE), self._next)
        numbers = self._draw.sample(kept, min(count, len(kept)))
        for design in self._designs:
            design.forget()
        self._measure(case, round_number, len(numbers), lambda design: design.get(numbers))

    def get_beside_puts(self, round_number: int, count: int) -> None:
        """The drive and the tier alone: one get after the other beside a flood of puts."""
        numbers = range(self._next, self._next + count)
        kept = range(self._next - self._records // 2, self._next)
        self._next += count
        best = math.inf
        both: list[Raw | Tier] = [*self._raws, self._tier]
        for design in rotated(both, round_number):
            gets = iter(lambda: self._draw.choice(kept), None)
            times_s = sorted(design.get_beside_puts(numbers, gets))
            p99_ms = times_s[len(times_s) * 99 // 100] * 1e3
            if isinstance(design, Raw):
                best = min(best, p99_ms)
            else:
                self._beside.append(p99_ms)
        self._beside_ceilings.append(best)
        for other in self._designs:  # all have the same records
            if other is not self._tier:
                other.put(numbers)

    def _measure(
        self,
        case: str,
        round_number: int,
        count: int,
        work: Callable[[Design], int],
        beside: Sequence[Design] = (),
    ) -> None:
        best = 0.0
        for design in rotated([*self._raws, *self._designs, *beside], round_number):
            cpu_s, started = time.process_time(), time.perf_counter()
            right = work(design)
            seconds = time.perf_counter() - started
            rate = count * self._record_bytes / seconds / MB
            measured = Measured(rate, time.process_time() - cpu_s, right - count)
            if design in self._raws:
                best = max(best, rate)
            else:
                self._found.setdefault((case, design.name), []).append(measured)
        self._ceilings.setdefault(case, []).append(best)
        self._moved.setdefault(case, []).append(count)

    def cases(self) -> list[Case]:
        """One line for each case and design."""
        found = []
        for (case, design), rounds in self._found.items():
            volume_gb = sum(self._moved[case]) * self._record_bytes / GB
            found.append(
                measured_case(
                    bench=BENCH,
                    case=case,
                    design=design,
                    record_bytes=self._record_bytes,
                    unit="MB/s",
                    values=[each.mb_per_s for each in rounds],
                    ceilings=self._ceilings[case],
                    higher_is_better=True,
                    cpu_s_per_gb=sum(each.cpu_s for each in rounds) / volume_gb,
                    exercised=True,
                    valid=all(each.right == 0 for each in rounds),
                )
            )
        found.append(
            measured_case(
                bench=BENCH,
                case="get_beside_puts_p99",
                design=self._tier.name,
                record_bytes=self._record_bytes,
                unit="ms",
                values=self._beside,
                ceilings=self._beside_ceilings,
                higher_is_better=False,
                cpu_s_per_gb=None,
                exercised=True,
                valid=not self._tier.failed,
            )
        )
        return found


def _row(case: Case) -> str:
    cpu = "" if case.cpu_s_per_gb is None else f"  {case.cpu_s_per_gb:>6.2f} s/GB"
    return (
        f"{format_size(case.record_bytes):>8} {case.case:<19} {case.design:<16}"
        f" {case.value:>8.4g} {case.unit}"
        f"  {case.ratio:.2f} [{case.ratio_low:.2f}, {case.ratio_high:.2f}] of raw"
        f"{cpu}  {case.verdict}"
    )


def _say(text: str) -> None:
    print(f"ebbtide bench disk: {text}", file=sys.stderr, flush=True)
