"""`ebbtide bench copy`: blocks of a device that is host memory into records, and back.

Every round copies the same bytes three times: from blocks in no order into neighbouring records,
from those records back, and by one plain copy of torch from one tensor into another. That one is
what they are judged by: no ceiling where copies past the caches are faster. All run with as many
threads as torch has.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from ebbtide.bench.paged_forms import FORMS, make_pages, shape_of
from ebbtide.bench.pairs import INVALID, PAIRS_MIN, Case, measured_case, rotated
from ebbtide.errors import ConfigError
from ebbtide.kernels.copy import gather_into, scatter_from
from ebbtide.kernels.host_copy import copier
from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ebbtide.bench.paged_forms import Pages

BENCH = "copy"
GATHER, SCATTER, PLAIN = DESIGNS = ("gather", "scatter", "plain")
LAYERS = 8
MIB = 1 << 20
SIZES_MIB = (16, 64, 256)
FRAGMENTS_KIB = (4, 16, 64)
QUICK_PAIRS, QUICK_SIZES_MIB = 3, (64,)
GOAL = 0.85  # from fragments of 16 KiB on
POOL = 1.25  # blocks there are, by blocks that are copied
ROUND_BYTES = 64 * MIB  # a round of fewer bytes copies them several times


class Load(NamedTuple):
    """What one case copies."""

    form: str
    fragment_kib: int
    total_mib: int


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers, separated by commas") from error
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of at least one")
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--quick", action="store_true", help="3 pairs, 64 MiB: a look, no result")
    parser.add_argument("--sizes", type=_numbers, help="MiB to copy (default 16,64,256)")
    parser.add_argument("--fragments", type=_numbers, help="KiB of a fragment (default 4,16,64)")
    parser.add_argument("--forms", help=f"of {', '.join(FORMS)} (default all)")
    parser.add_argument("--threads", type=int, help="of torch (default: as many as it takes)")


def run(args: argparse.Namespace) -> int:
    """Measure. 0 when every line is valid, else 1."""
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
    sizes = args.sizes or (QUICK_SIZES_MIB if args.quick else SIZES_MIB)
    if args.threads:
        torch.set_num_threads(args.threads)
    way = "torch" if copier() is None else "the compiled copier"
    print(f"ebbtide bench copy: by {way}", file=sys.stderr, flush=True)
    valid = True
    for load in _loads(args.forms, args.fragments or FRAGMENTS_KIB, sizes):
        for case in _measure(load, pairs):
            print(case.line() if args.json else _row(case), flush=True)
            valid = valid and case.verdict != INVALID
    return 0 if valid else 1


def _loads(names: str | None, fragments: Sequence[int], sizes: Sequence[int]) -> Iterator[Load]:
    """Every form with every size, and the middle fragment first."""
    forms = names.split(",") if names else list(FORMS)
    for form in forms:
        if form not in FORMS:
            raise ConfigError(
                "There is no such form", next_step=f"Known are {', '.join(FORMS)}.", form=form
            )
        for fragment in fragments:
            for size in sizes:
                yield Load(form, fragment, size)


class _Rig:
    """The tensors of one case."""

    def __init__(self, load: Load) -> None:
        form = FORMS[load.form]
        total = load.total_mib * MIB
        shape = shape_of(
            form,
            layers=LAYERS,
            fragment_bytes=load.fragment_kib << 10,
            total_bytes=int(total * POOL),
        )
        self.pages: Pages = make_pages(form, shape, torch.bfloat16)
        self.layout = PagedLayout.from_tensors(self.pages.tensors, block_dim=form.block_dim)
        size = self.layout.record_bytes
        count = max(1, min(shape.blocks, total // size))
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randperm(shape.blocks, generator=draw)[:count].tolist()
        self.offsets = [number * size for number in range(count)]
        self.arena = torch.zeros(count * size, dtype=torch.uint8)
        self.source = torch.ones(count * size, dtype=torch.uint8)
        self.target = torch.zeros(count * size, dtype=torch.uint8)
        self.repeats = max(1, ROUND_BYTES // (count * size))

    @property
    def copied_bytes(self) -> int:
        return self.repeats * self.arena.numel()

    def works(self) -> dict[str, Callable[[], object]]:
        """By design."""
        return {
            GATHER: lambda: gather_into(self.layout, self.ids, self.arena, self.offsets),
            SCATTER: lambda: scatter_from(self.layout, self.ids, self.arena, self.offsets),
            PLAIN: lambda: self.target.copy_(self.source),
        }

    def right(self) -> bool:
        """Some blocks went down, and come back over zeros, bit by bit."""
        works = self.works()
        works[GATHER]()
        chosen = self.ids[:: max(1, len(self.ids) // 8)]
        before = [self.pages.record(block) for block in chosen]
        for buffer in self.pages.buffers:
            buffer.zero_()
        works[SCATTER]()
        size = self.layout.record_bytes
        return all(
            torch.equal(record, self.pages.record(block))
            and torch.equal(record, self.arena[self.ids.index(block) * size :][:size])
            for block, record in zip(chosen, before, strict=True)
        )


def _measure(load: Load, pairs: int) -> list[Case]:
    print(f"ebbtide bench copy: {_name(load)}", file=sys.stderr, flush=True)
    rig = _Rig(load)
    valid = rig.right()
    works = rig.works()
    speeds: dict[str, list[float]] = {design: [] for design in DESIGNS}
    cpu_s = dict.fromkeys(DESIGNS, 0.0)
    for number in range(pairs + 1):  # the first warms up
        for design in rotated(DESIGNS, number):
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(rig.repeats):
                works[design]()
            seconds = time.perf_counter() - started
            if number:
                speeds[design].append(rig.copied_bytes / seconds / 1e9)
                cpu_s[design] += time.process_time() - cpu
    return [
        measured_case(
            bench=BENCH,
            case=f"{_name(load)}.{design}",
            design="ebbtide",
            record_bytes=rig.layout.record_bytes,
            unit="GB/s",
            values=speeds[design],
            ceilings=speeds[PLAIN],
            higher_is_better=True,
            cpu_s_per_gb=cpu_s[design] / (pairs * rig.copied_bytes / 1e9),
            exercised=True,
            valid=valid,
        )
        for design in (GATHER, SCATTER)
    ]


def _name(load: Load) -> str:
    return f"{load.form}.{load.fragment_kib}k.{load.total_mib}m"


def _row(case: Case) -> str:
    short = "" if case.ratio >= GOAL or ".4k." in case.case else "  below the goal"
    return (
        f"{case.case:<44} {case.value:>7.2f} {case.unit}  plain {case.ceiling:>7.2f}"
        f"  {case.ratio:.2f} [{case.ratio_low:.2f}, {case.ratio_high:.2f}]  {case.verdict}{short}"
    )
