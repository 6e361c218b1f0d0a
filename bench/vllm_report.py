"""What `ebbtide bench vllm` found: lines of numbers, where they came from, why some mean nothing.

Every ratio is value / ceiling. The ceiling is vLLM without a connector, asked the same in the same
round; in lines that end in `.against_lmcache` it is LMCache, and for hooks it is a limit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ebbtide.bench.pairs import INVALID, Case, measured_case

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ebbtide.bench.vllm_answer import Answer

BENCH = "vllm"
GB = 1e9


class Findings:
    """The lines of one case, in the order in which they were added."""

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.cases: list[Case] = []
        self.traffic: list[dict[str, Any]] = []

    @property
    def valid(self) -> bool:
        """No line is INVALID."""
        return all(case.verdict != INVALID for case in self.cases)

    def add(
        self,
        case: str,
        design: str,
        unit: str,
        values: Sequence[float],
        ceilings: Sequence[float],
        *,
        cpu_s_per_gb: float | None = None,
        exercised: bool = True,
        reasons: Sequence[str] = (),
    ) -> None:
        """One line: the rounds' values and what they are compared with. INVALID for a reason."""
        self.cases.append(
            measured_case(
                bench=BENCH,
                case=case,
                design=design,
                record_bytes=self.record_bytes,
                unit=unit,
                values=values,
                ceilings=ceilings,
                higher_is_better=True,  # which means value / ceiling
                cpu_s_per_gb=cpu_s_per_gb,
                exercised=exercised,
                valid=exercised and not reasons,
            )
        )

    def explain(
        self, case: str, design: str, answers: Sequence[Answer], reasons: Sequence[str], **more: Any
    ) -> None:
        """One `traffic` line: sums over the measured rounds, and why a line is INVALID."""
        self.traffic.append(
            {
                "bench": BENCH,
                "case": case,
                "design": design,
                "requests": sum(len(answer.times_s) for answer in answers),
                "cached_tokens": sum(sum(answer.cached_tokens) for answer in answers),
                "tokens_by_tier": summed(answer.hits for answer in answers),
                "blocks_missed": summed(answer.misses for answer in answers),
                "bytes_moved": summed(answer.moved for answer in answers),
                "blocks_stored": sum(answer.stored_blocks for answer in answers),
                "engine_cpu_s": round(sum(answer.engine_cpu_s for answer in answers), 3),
                "store_cpu_s": round(sum(answer.store_cpu_s for answer in answers), 3),
                **more,
                "invalid_because": list(reasons),
            }
        )

    def lines(self) -> list[str]:
        """JSON: a line per number, then what explains them."""
        traffic = [json.dumps({"traffic": entry}) for entry in self.traffic]
        return [*(case.line() for case in self.cases), *traffic]


def summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sums of the counts by name, those that are not zero."""
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return {name: count for name, count in found.items() if count}


def troubles(answers: Iterable[Answer], plain: Iterable[Answer]) -> list[str]:
    """What no measured round may have, whatever it measures: other tokens than plain vLLM's."""
    answers, found = list(answers), []
    pairs = zip(answers, plain, strict=True)
    different = sum(
        ours != theirs
        for answer, other in pairs
        for ours, theirs in zip(answer.token_ids, other.token_ids, strict=True)
    )
    if different:
        found.append(f"{different} answers differ from those of plain vLLM")
    for kind in ("faults", "corrupt"):
        count = sum(getattr(answer, kind) for answer in answers)
        if count:
            found.append(f"{count} {kind}")
    return found


COLUMNS = ("case", "design", "value", "ceiling", "ratio", "95 %", "CPU s/GB", "verdict")
_LEFT = 2  # columns of words


def table(cases: Iterable[Case]) -> list[str]:
    """Lines of aligned columns."""
    rows = [COLUMNS, *(_row(case) for case in cases)]
    widths = [max(len(row[number]) for row in rows) for number in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number < _LEFT else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(case: Case) -> tuple[str, ...]:
    return (
        case.case,
        case.design,
        f"{case.value:,.4g} {case.unit}",
        f"{case.ceiling:,.4g}",
        f"{case.ratio:.3f}",
        f"{case.ratio_low:.3f}..{case.ratio_high:.3f}",
        "-" if case.cpu_s_per_gb is None else f"{case.cpu_s_per_gb:.3f}",
        case.verdict,
    )


def render(findings: Iterable[Findings]) -> None:
    """A table, then the reasons of what is INVALID."""
    findings = list(findings)
    for line in table(case for each in findings for case in each.cases):
        print(line)
    for each in findings:
        for entry in each.traffic:
            if entry["invalid_because"]:
                reasons = "; ".join(entry["invalid_because"])
                print(f"{entry['case']}, {entry['design']}: {INVALID}: {reasons}")
