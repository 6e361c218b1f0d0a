"""What the demo found: one table, one summary, one verdict."""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from ebbtide.bench.phase import RoundResult, Served

TIERS = ("device", "memory", "disk")
LONG_PROMPT_TOKENS = 2_000
MAINLY = 0.8  # a request counts as served by a tier that brought this share of its prompt
RESTART_DISK_SHARE_MIN = 0.8


class PhaseReport:
    """One phase against the reference answers."""

    def __init__(self, result: RoundResult, reference: dict[str, list[int]]) -> None:
        self.result = result
        self.name = result.name
        self.different = sum(s.token_ids != reference[s.name] for s in result.served)
        self.prompt_tokens = sum(s.prompt_tokens for s in result.served)
        self.sources: Counter[str] = Counter(dict.fromkeys((*TIERS, "computed"), 0))
        self.misses: Counter[str] = Counter()
        for served in result.served:
            self.sources.update(served.sources)
            self.misses.update(served.misses)
        self.adds_up = sum(self.sources.values()) == self.prompt_tokens

    def ttft_s(self, quantile: float) -> float:
        """Time to first token at a quantile (nearest rank)."""
        return _quantile([s.ttft_s for s in self.result.served], quantile)

    def as_json(self) -> dict[str, Any]:
        """The phase as plain data."""
        return {
            "phase": self.name,
            "requests": len(self.result.served),
            "prompt_tokens": self.prompt_tokens,
            "tokens_by_source": dict(self.sources),
            "adds_up": self.adds_up,
            "misses": {reason: count for reason, count in self.misses.items() if count},
            "ttft_p50_ms": round(self.ttft_s(0.5) * 1e3, 2),
            "ttft_p99_ms": round(self.ttft_s(0.99) * 1e3, 2),
            "bytes_by_edge": self.result.bytes_by_edge,
            "corrupt": self.result.corrupt,
            "shed": self.result.shed,
            "identical": self.different == 0,
            "seconds": round(self.result.seconds, 2),
        }


def summarise(phases: list[PhaseReport], *, faults: int) -> dict[str, Any]:
    """Everything that `--json` prints, and the verdict `valid` with its reasons."""
    reasons = [f"{p.different} answers of phase {p.name} differ" for p in phases if p.different]
    reasons += [f"tokens of phase {p.name} do not add up" for p in phases if not p.adds_up]
    cached = phases[1:]
    totals = {tier: sum(phase.sources[tier] for phase in cached) for tier in TIERS}
    reasons += [f"tier {tier} was not exercised" for tier, tokens in totals.items() if not tokens]
    if faults:
        reasons.append(f"{faults} hooks faulted")
    restart = phases[-1]
    return {
        "valid": not reasons,
        "invalid_because": reasons,
        "identical": all(phase.different == 0 for phase in phases),
        "tokens_by_tier": totals,
        "restart_disk_share": round(restart.sources["disk"] / restart.prompt_tokens, 4),
        "ttft": _ttft_by_source(phases),
        "phases": [phase.as_json() for phase in phases],
    }


def _ttft_by_source(phases: list[PhaseReport]) -> dict[str, Any]:
    """Time to first token of long prompts: recomputed, mainly from memory, mainly from disk."""
    computed = [s for s in phases[0].result.served if s.prompt_tokens >= LONG_PROMPT_TOKENS]
    if not computed:
        return {"note": f"no prompt of {LONG_PROMPT_TOKENS} tokens"}
    recompute = median(s.ttft_s for s in computed)
    found: dict[str, Any] = {"recompute_p50_ms": round(recompute * 1e3, 2)}
    rated = [s for s in computed if s.matmul_flops_per_s]
    if rated:
        found["matmul_gflops"] = round(median(s.matmul_flops_per_s for s in rated) / 1e9, 1)
        found["recompute_matmul_share"] = round(median(map(_matmul_share, rated)), 3)
    for tier in ("memory", "disk"):
        times = [s.ttft_s for p in phases[1:] for s in p.result.served if _mainly(s, tier)]
        if times:
            found[f"{tier}_p50_ms"] = round(median(times) * 1e3, 2)
            found[f"{tier}_p99_ms"] = round(_quantile(times, 0.99) * 1e3, 2)
            found[f"{tier}_requests"] = len(times)
            found[f"{tier}_to_recompute"] = round(median(times) / recompute, 4)
    return found


def _matmul_share(served: Served) -> float:
    """How much of the rate measured just before it the prefill reached."""
    return served.prefill_flops / served.ttft_s / served.matmul_flops_per_s


def _mainly(served: Served, tier: str) -> bool:
    long = served.prompt_tokens >= LONG_PROMPT_TOKENS
    return long and served.sources.get(tier, 0) >= MAINLY * served.prompt_tokens


def _quantile(values: list[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


COLUMNS = ("phase", "prompt", *TIERS, "computed", "ttft p50", "p99", "up", "down", "identical")


def _row(phase: PhaseReport) -> list[str]:
    edges = phase.result.bytes_by_edge
    up = edges.get("memory_to_device", 0), edges.get("disk_to_memory", 0)
    down = edges.get("device_to_memory", 0), edges.get("memory_to_disk", 0)
    return [
        phase.name,
        f"{phase.prompt_tokens:,}",
        *(f"{phase.sources[source]:,}" for source in (*TIERS, "computed")),
        f"{phase.ttft_s(0.5) * 1e3:,.0f} ms",
        f"{phase.ttft_s(0.99) * 1e3:,.0f} ms",
        " / ".join(format_size(size) for size in up),
        " / ".join(format_size(size) for size in down),
        "yes" if phase.different == 0 else f"NO ({phase.different})",
    ]


def render(phases: list[PhaseReport], summary: dict[str, Any]) -> None:
    """A table on a terminal, plain lines elsewhere. Standard output."""
    rows = [_row(phase) for phase in phases]
    lines = _conclusion(phases, summary)
    if not sys.stdout.isatty():
        for row in rows:
            print("  ".join(f"{name}={value}" for name, value in zip(COLUMNS, row, strict=True)))
        for line in lines:
            print(line)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="prompt tokens by the tier that brought them", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for line in lines:
        console.print(line, highlight=False)


def _conclusion(phases: list[PhaseReport], summary: dict[str, Any]) -> list[str]:
    lines = ["up: memory to device / disk to memory; down: device to memory / memory to disk"]
    for phase in phases[1:]:
        reasons = ", ".join(
            f"{reason} {count}" for reason, count in phase.misses.most_common() if count
        )
        lines.append(f"blocks computed in phase {phase.name}, by reason: {reasons or 'none'}")
    ttft = summary["ttft"]
    if "recompute_p50_ms" in ttft:
        lines.append(
            f"first token of prompts of {LONG_PROMPT_TOKENS:,} tokens and more: "
            f"recomputed {ttft['recompute_p50_ms']:,.0f} ms "
            f"(at {ttft.get('recompute_matmul_share', 0.0):.0%} of the matmul rate), "
            f"from memory {ttft.get('memory_p50_ms', float('nan')):,.0f} ms, "
            f"from disk {ttft.get('disk_p50_ms', float('nan')):,.0f} ms"
        )
    lines.append(f"after the restart {summary['restart_disk_share']:.1%} came from disk")
    verdict = "VALID: every answer is the reference's, every tier was exercised"
    if not summary["valid"]:
        verdict = "INVALID: " + "; ".join(summary["invalid_because"])
    return [*lines, verdict]
