"""`ebbtide bench allocator`: naming blocks, handing them out and finding them, against vLLM's own.

Both are asked the same in the same process, in turn. The ceiling is vLLM's value of the same round:
run it with the Python of an environment that has vLLM. Without vLLM the values stand alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ebbtide.bench.allocator_load import (
    PARTS,
    UNITS,
    WARM_UP,
    Sample,
    Sizes,
    measure,
    quiet_collector,
)
from ebbtide.bench.allocator_ours import Ebbtide
from ebbtide.bench.allocator_vllm import Vllm
from ebbtide.bench.pairs import INVALID, PAIRS_MIN, UNRESOLVED, Case, measured_case, rotated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ebbtide.bench.allocator_load import Contestant

BENCH = "allocator"
QUICK_PAIRS = 3
FEW, MANY = "pool_allocate_free_10k", "pool_allocate_free_1m"
WITHOUT_PEER = ("ceiling", "ratio", "ratio_low", "ratio_high")


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= PARTS.keys() or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(PARTS)}")
    return parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--quick", action="store_true", help="3 pairs: a look, not a result")
    parser.add_argument(
        "--cases", type=_parts, default=tuple(PARTS), help=f"default {','.join(PARTS)}"
    )
    parser.add_argument("--no-peers", action="store_true", help="ebbtide alone")


def run(args: argparse.Namespace) -> int:
    """Measure. 0 when every line is valid, else 1."""
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
    ours: Contestant = Ebbtide()
    contestants = [ours, *([] if args.no_peers else _peers())]
    rounds = measure_rounds(contestants, Sizes(), pairs, args.cases)
    peers = [contestant.name for contestant in contestants[1:]]
    valid = True
    for case, has_peer in cases(rounds, ours.name, peers[0] if peers else None):
        print(line(case, has_peer) if args.json else _row(case, has_peer), flush=True)
        valid = valid and case.verdict != INVALID
    return 0 if valid else 1


def _peers() -> list[Contestant]:
    try:
        return [Vllm()]
    except ModuleNotFoundError as error:
        if error.name != "vllm":  # it is there, and broken: no reason to be silent
            raise
        _say("vllm is not installed, and not measured")
        return []


def measure_rounds(
    contestants: Sequence[Contestant], sizes: Sizes, pairs: int, parts: Sequence[str]
) -> dict[str, list[dict[str, Sample]]]:
    """What each contestant did in each round, by its name."""
    rounds: dict[str, list[dict[str, Sample]]] = {each.name: [] for each in contestants}
    with quiet_collector():
        for contestant in contestants:
            measure(contestant, WARM_UP, 0, parts)
        for number in range(pairs):
            _say(f"{number + 1} of {pairs}")
            for contestant in rotated(contestants, number):
                rounds[contestant.name].append(measure(contestant, sizes, 3 * number, parts))
    return rounds


def cases(
    rounds: Mapping[str, Sequence[Mapping[str, Sample]]], ours: str, peer: str | None
) -> Iterable[tuple[Case, bool]]:
    """The lines, and whether each has something to be compared with."""
    mine = rounds[ours]
    other = mine if peer is None else rounds[peer]
    for name in mine[0]:
        case = _case(name, ours, [r[name] for r in mine], [r[name] for r in other])
        if peer is None and case.verdict != INVALID:
            case = replace(case, verdict=UNRESOLVED)
        yield case, peer is not None
    if MANY in mine[0]:  # within one round, how much dearer a block of a large pool is
        few = [r[FEW] for r in mine]
        yield _case(f"{MANY}.against_10k", ours, [r[MANY] for r in mine], few), True


def _case(case: str, design: str, mine: Sequence[Sample], other: Sequence[Sample]) -> Case:
    pairs = list(zip(mine, other, strict=True))
    return measured_case(
        bench=BENCH,
        case=case,
        design=design,
        record_bytes=0,
        unit=UNITS[case.partition(".")[0]],
        values=[sample.value for sample in mine],
        ceilings=[sample.value for sample in other],
        higher_is_better=False,
        cpu_s_per_gb=None,
        exercised=True,
        valid=all(a.is_right and b.is_right and a.proof == b.proof for a, b in pairs),
    )


def line(case: Case, has_peer: bool) -> str:
    """One line of JSON; nulls where nothing was compared."""
    fields: dict[str, Any] = asdict(case)
    if not has_peer:
        fields.update(dict.fromkeys(WITHOUT_PEER))
    return json.dumps(fields, allow_nan=False)


def _row(case: Case, has_peer: bool) -> str:
    other = "10k" if case.case.endswith("against_10k") else "vllm"
    compared = (
        f" {other} {case.ceiling:>8.4g}"
        f"  {case.ratio:.2f} [{case.ratio_low:.2f}, {case.ratio_high:.2f}]  "
        if has_peer
        else "  "
    )
    return f"{case.case:<34}{case.value:>9.4g} {case.unit:<2}{compared}{case.verdict}"


def _say(text: str) -> None:
    print(f"ebbtide bench allocator: {text}", file=sys.stderr, flush=True)
