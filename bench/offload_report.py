"""What `ebbtide bench offload` found: whether it means anything, JSON lines, a table."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ebbtide.bench.contestant import BLOCK_SIZE
from ebbtide.bench.pairs import INVALID, Case, measured_case

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.bench.contestant import Design, RoundResult, Served
    from ebbtide.bench.working_set import WorkingSet

BENCH = "offload"
REFERENCE = "none"
CEILING = "device"
MAINLY = 0.5  # a request counts as one of the source that brought this share of its prompt
GB = 1e9


class Measure(NamedTuple):
    """One number of a round."""

    name: str
    unit: str
    label: str
    higher_is_better: bool
    of: Callable[[RoundResult], float]


def _throughput(result: RoundResult) -> float:
    return sum(served.prompt_tokens for served in result.served) / result.seconds


def _ttft_ms(quantile: float) -> Callable[[RoundResult], float]:
    def of(result: RoundResult) -> float:
        times = sorted(served.ttft_s for served in result.served)
        return times[min(len(times) - 1, int(quantile * len(times)))] * 1e3

    return of


MEASURES = (
    Measure("prompt_tokens_per_s", "tokens/s", "tokens/s", True, _throughput),
    Measure("ttft_p50", "ms", "ttft p50 ms", False, _ttft_ms(0.5)),
    Measure("ttft_p99", "ms", "ttft p99 ms", False, _ttft_ms(0.99)),
)


class Traffic:
    """Where the prompts of one design's measured rounds came from, and what moved."""

    def __init__(self, fill: RoundResult, rounds: Sequence[RoundResult]) -> None:
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.filled: Counter[str] = Counter(fill.moved)
        for round_ in rounds:
            self.moved.update(round_.moved)
            for served in round_.served:
                self.tokens.update(served.sources)
                self.misses.update(served.misses)
                self.requests[_main_source(served)] += 1
        self.cpu_s = sum(round_.cpu_s for round_ in rounds)
        self.recomputed_prefix = sum(
            _recomputed_prefix(served) for round_ in rounds for served in round_.served
        )

    @property
    def cpu_s_per_gb(self) -> float | None:
        """CPU seconds of the store's process per GB that it brought to the device."""
        loaded = self.moved["memory_to_device"]
        return self.cpu_s / (loaded / GB) if loaded else None


def _main_source(served: Served) -> str:
    source, tokens = max(served.sources.items(), key=lambda entry: entry[1])
    return source if tokens >= MAINLY * served.prompt_tokens else "several"


def _recomputed_prefix(served: Served) -> int:
    """Tokens that a device pool which holds everything would not have computed."""
    reusable = (served.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    return max(0, served.sources["computed"] - (served.prompt_tokens - reusable))


class Comparison:
    """One working set: all rounds of all designs, the fill first.

    `troubles`: per design what the tiers count as gone wrong.
    """

    def __init__(
        self,
        working_set: WorkingSet,
        designs: Sequence[Design],
        results: dict[str, list[RoundResult]],
        troubles: dict[str, dict[str, int]],
    ) -> None:
        self.working_set = working_set
        self.designs = designs
        self.rounds = {name: rounds[1:] for name, rounds in results.items()}
        self.troubles = troubles
        self.traffic = {name: Traffic(rounds[0], rounds[1:]) for name, rounds in results.items()}
        self._answers = {s.name: s.token_ids for s in results[REFERENCE][0].served}
        self.different = {
            name: sum(self._differs(s) for round_ in rounds for s in round_.served)
            for name, rounds in results.items()
        }
        self.not_exercised = {design.name: self._not_exercised(design) for design in designs}
        self.invalid_because = {design.name: self._invalid_because(design) for design in designs}
        self.cases = [self._case(design, measure) for design in designs for measure in MEASURES]

    @property
    def valid(self) -> bool:
        """Every design did what its line says, and answered as the reference does."""
        return not any(self.invalid_because.values())

    def lines(self) -> list[str]:
        """JSON: a line per case, then a line per design with what moved."""
        traffic = [json.dumps({"traffic": self._traffic_line(name)}) for name in self.traffic]
        return [*(case.line() for case in self.cases), *traffic]

    def _differs(self, served: Served) -> bool:
        return self._answers[served.name] != served.token_ids

    def _not_exercised(self, design: Design) -> str:
        """Why the design's numbers say nothing about it; empty when they do (P89)."""
        if not self.working_set.evicts:
            return "no eviction: the working set fits into the device pool"
        tokens = self.traffic[design.name].tokens
        if design.disk and self.working_set.exceeds_memory and not tokens["disk"]:
            return "the disk tier restored nothing"
        if design.memory and not tokens["memory"] and not (design.disk and tokens["disk"]):
            return "the tiers restored nothing"
        return ""

    def _invalid_because(self, design: Design) -> list[str]:
        name, troubles = design.name, self.troubles.get(design.name, {})
        found = {
            self.not_exercised[name]: bool(self.not_exercised[name]),
            f"{CEILING} recomputed prefixes, so it is no ceiling": (
                self.traffic[CEILING].recomputed_prefix > 0
            ),
        }
        for side in (name, CEILING):
            count = self.different[side]
            found[f"{count} answers of {side} differ from those of {REFERENCE}"] = count > 0
        for kind in ("faults", "corrupt"):
            count = troubles.get(kind, 0)
            found[f"{count} {kind}"] = count > 0
        return [reason for reason, holds in found.items() if holds]

    def _case(self, design: Design, measure: Measure) -> Case:
        traffic = self.traffic[design.name]
        return measured_case(
            bench=BENCH,
            case=f"{self.working_set.name}.{measure.name}",
            design=design.name,
            record_bytes=self.working_set.record_bytes,
            unit=measure.unit,
            values=[measure.of(round_) for round_ in self.rounds[design.name]],
            ceilings=[measure.of(round_) for round_ in self.rounds[CEILING]],
            higher_is_better=measure.higher_is_better,
            cpu_s_per_gb=traffic.cpu_s_per_gb,
            exercised=not self.not_exercised[design.name],
            valid=not self.invalid_because[design.name],
        )

    def _traffic_line(self, name: str) -> dict[str, Any]:
        traffic = self.traffic[name]
        return {
            "bench": BENCH,
            "case": self.working_set.name,
            "design": name,
            **self.working_set.described(),
            "requests_by_main_source": dict(traffic.requests),
            "tokens_by_source": dict(traffic.tokens),
            "blocks_missed": dict(traffic.misses),
            "bytes_in_fill": dict(traffic.filled),
            "bytes_in_rounds": dict(traffic.moved),
            "store_cpu_s": round(traffic.cpu_s, 2),
            "troubles": self.troubles.get(name, {}),
            "different_answers": self.different[name],
            "invalid_because": self.invalid_because.get(name, []),
        }


COLUMNS = ("case", "design", "value", "ceiling", "ratio", "95 %", "CPU s/GB", "verdict")
TABLE_COLUMNS = ("working set", "design", "value", "ratio", "95 %", "s/GB", "verdict")


def _row(case: Case) -> list[str]:
    return [
        case.case,
        case.design,
        f"{case.value:,.5g} {case.unit}",
        f"{case.ceiling:,.5g} {case.unit}",
        f"{case.ratio:.3f}",
        f"{case.ratio_low:.3f}..{case.ratio_high:.3f}",
        "-" if case.cpu_s_per_gb is None else f"{case.cpu_s_per_gb:.3f}",
        case.verdict,
    ]


def render(comparisons: Sequence[Comparison]) -> None:
    """A table on a terminal, plain lines elsewhere, then where the tokens came from."""
    if sys.stdout.isatty():
        _table(comparisons)
    else:
        for comparison in comparisons:
            for case in comparison.cases:
                cells = zip(COLUMNS, _row(case), strict=True)
                print("  ".join(f"{name}={value}" for name, value in cells))
    for comparison in comparisons:
        for line in _conclusion(comparison):
            print(line)


def _table(comparisons: Sequence[Comparison]) -> None:
    """Narrow enough for 80 columns: the ceiling is a row of its own."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="conversations that come back, ratio to a device pool that holds them all",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for number, name in enumerate(TABLE_COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    for comparison in comparisons:
        factor = f"{comparison.working_set.factor:g}x"
        for measure in MEASURES:
            cases = [c for c in comparison.cases if c.case.endswith(f".{measure.name}")]
            table.add_row(f"{factor} {measure.label}", CEILING, _short(cases[0].ceiling), "1")
            for case in cases:
                interval = f"{case.ratio_low:.2f}-{case.ratio_high:.2f}"
                cpu = "-" if case.cpu_s_per_gb is None else f"{case.cpu_s_per_gb:.1f}"
                row = (_short(case.value), f"{case.ratio:.2f}", interval, cpu, case.verdict)
                table.add_row("", case.design, *row)
            table.add_section()
    Console().print(table)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _conclusion(comparison: Comparison) -> list[str]:
    name, lines = comparison.working_set.name, []
    for design, traffic in comparison.traffic.items():
        total = sum(traffic.tokens.values())
        shares = ", ".join(
            f"{source} {tokens / total:.0%}" for source, tokens in traffic.tokens.items() if tokens
        )
        lines.append(f"{name}, {design}: prompt tokens from {shares}")
    for design, reasons in comparison.invalid_because.items():
        if reasons:
            lines.append(f"{name}, {design}: {INVALID}: {'; '.join(reasons)}")
    return lines
