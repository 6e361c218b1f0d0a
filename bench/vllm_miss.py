"""Prompts that never hit: what a connector costs when it brings nothing, and how long its hooks
take meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.bench.vllm_answer import BLOCK_SIZE, Prompt
from ebbtide.bench.vllm_contestant import MEMORY, PEER, PEER_OF, PLAIN
from ebbtide.bench.vllm_report import GB, Findings, troubles
from ebbtide.bench.vllm_sizes import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.bench.vllm_answer import Answer
    from ebbtide.bench.vllm_contestant import Contestant, Design

NAME = "miss"
HOOK_LIMIT_US = 1000.0
STORED_SHARE_MIN = 0.9  # of the blocks that filled; less, and the cost of storing was not measured
MEMORY_PROMPTS = 16  # the tiers fill and evict within the first rounds, as they do in use
DISK_PROMPTS = 64
WARM_UP_ROUNDS = 1


def load(prompt_tokens: int) -> Load:
    """The sizes of this case. Loads are left to the connector's own choice, as they are in use."""
    return Load(
        longest=prompt_tokens,
        memory_tokens=MEMORY_PROMPTS * prompt_tokens,
        small_memory_tokens=MEMORY_PROMPTS * prompt_tokens,
        disk_tokens=DISK_PROMPTS * prompt_tokens,
        always_load=False,
    )


class MissRounds:
    """All rounds of all contestants: in each, the same new prompts, one after the other."""

    def __init__(self, prompt_tokens: int, prompts: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompts = prompts
        self.answers: dict[str, list[Answer]] = {}
        self.restored: dict[str, int] = {}  # tokens of the last prompt, by the peer

    def measure(
        self,
        contestants: Sequence[Contestant],
        pairs: int,
        order: Callable[[Sequence[Contestant], int], Sequence[Contestant]],
        say: Callable[[str], None],
    ) -> None:
        """Ask. The first round warms up and is not kept."""
        last: list[Prompt] = []
        for number in range(WARM_UP_ROUNDS + pairs):
            say(f"{NAME}: round {number + 1 - WARM_UP_ROUNDS} of {pairs}")
            last = [
                Prompt(f"miss-{number}-{index}", self._prompt_tokens)
                for index in range(self._prompts)
            ]
            for contestant in order(contestants, number):
                answer = contestant.ask(last)
                if number >= WARM_UP_ROUNDS:
                    self.answers.setdefault(contestant.design.name, []).append(answer)
        for contestant in contestants:
            if contestant.design.kind == PEER.kind:
                contestant.forget()
                (cached,) = contestant.ask(last[-1:]).cached_tokens
                self.restored[contestant.design.name] = cached

    def findings(self, contestants: Sequence[Contestant]) -> Findings:
        """The lines."""
        found = Findings(contestants[0].record_bytes)
        reasons = {each.design.name: self._reasons(each.design) for each in contestants}
        for contestant in contestants:
            design, name = contestant.design, contestant.design.name
            hooks, facts = _by_hook(self.answers[name]), contestant.facts
            found.explain(
                NAME, name, self.answers[name], reasons[name], hooks_us=hooks, facts=facts
            )
            if design == PLAIN:
                continue
            self._add_rates(found, name, PLAIN.name, "", reasons[name])
            self._add_rates(found, name, PLAIN.name, "_copied", reasons[name])
            peer = PEER_OF[name].name if name in PEER_OF else ""
            if peer in self.answers:
                both = [*reasons[name], *reasons[peer]]
                self._add_rates(found, name, peer, ".against_lmcache", both)
            if design.kind == MEMORY.kind:
                _add_hooks(found, name, self.answers[name], reasons[name])
        return found

    def _add_rates(
        self, found: Findings, name: str, other: str, suffix: str, reasons: Sequence[str]
    ) -> None:
        """Prompt tokens per second until the last answer or, `_copied`, until nothing is left."""
        tokens, answers = self._prompts * self._prompt_tokens, self.answers[name]
        seconds = [a.copied_s if suffix == "_copied" else a.seconds for a in answers]
        found.add(
            f"{NAME}.prompt_tokens_per_s{suffix}",
            name,
            "tokens/s",
            [tokens / each for each in seconds],
            [tokens / answer.seconds for answer in self.answers[other]],
            cpu_s_per_gb=self._cpu_s_per_gb(answers, found.record_bytes),
            reasons=reasons,
        )

    def _cpu_s_per_gb(self, answers: Sequence[Answer], record_bytes: int) -> float:
        """What both processes used beyond plain vLLM, per GB of records that were to be stored."""
        plain = self.answers[PLAIN.name]
        engine_s = sum(a.engine_cpu_s - p.engine_cpu_s for a, p in zip(answers, plain, strict=True))
        blocks = len(answers) * self._full_blocks
        return (engine_s + sum(a.store_cpu_s for a in answers)) / (blocks * record_bytes / GB)

    @property
    def _full_blocks(self) -> int:
        """Of one round."""
        return self._prompts * (self._prompt_tokens // BLOCK_SIZE)

    def _reasons(self, design: Design) -> list[str]:
        name, kind = design.name, design.kind
        answers, plain = self.answers[name], self.answers[PLAIN.name]
        reasons = troubles(answers, plain)
        if any(any(answer.cached_tokens) for answer in [*answers, *plain]):
            reasons.append("prompts that should be new were cached")
        stored = sum(answer.stored_blocks for answer in answers)
        wanted = len(answers) * self._full_blocks
        if kind == MEMORY.kind and stored < STORED_SHARE_MIN * wanted:
            reasons.append(f"only {stored} of {wanted} blocks were stored")
        if kind == PEER.kind and not self.restored[name]:
            reasons.append("the last prompt was not stored")
        return reasons


def _add_hooks(
    found: Findings, design: str, answers: Sequence[Answer], reasons: Sequence[str]
) -> None:
    rounds = [sorted(us for times in a.hooks_us.values() for us in times) for a in answers]
    exercised = all(len(times) >= len(a.times_s) for times, a in zip(rounds, answers, strict=True))
    for name, quantile in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        values = [nearest_rank(times, quantile) if times else 0.0 for times in rounds]
        limits = [HOOK_LIMIT_US] * len(values)
        found.add(
            f"hooks.{name}", design, "us", values, limits, exercised=exercised, reasons=reasons
        )


def nearest_rank(ordered: Sequence[float], quantile: float) -> float:
    """Of sorted values."""
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def _by_hook(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Calls, median, p99 and the slowest call, over all rounds."""
    gathered: dict[str, list[float]] = {}
    for answer in answers:
        for name, times in answer.hooks_us.items():
            gathered.setdefault(name, []).extend(times)
    if gathered:
        gathered["all"] = [us for times in gathered.values() for us in times]
    found = {}
    for name, times in gathered.items():
        times.sort()
        found[name] = {
            "calls": len(times),
            "p50": round(nearest_rank(times, 0.5), 1),
            "p99": round(nearest_rank(times, 0.99), 1),
            "max": round(times[-1], 1),
        }
    return found
