"""Time to first token by prompt length: recomputed, still on the device, from memory, from disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ebbtide.bench.vllm_answer import BLOCK_SIZE, Prompt
from ebbtide.bench.vllm_contestant import PEER, PEER_OF, PLAIN
from ebbtide.bench.vllm_report import GB, Findings, troubles
from ebbtide.bench.vllm_sizes import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.bench.vllm_answer import Answer
    from ebbtide.bench.vllm_contestant import Contestant, Design

    Orders = Callable[[Sequence[Contestant], int], Sequence[Contestant]]
    Say = Callable[[str], None]

NAME = "ttft"
WARM_UPS = 3  # prompts of each length, not recorded
# Before a device hit. A design with tiers is asked when its copies have ended; plain vLLM has none,
# and asked at once it would still find its threads spinning and its caches warm.
REST_S = 0.3
SMALL_MEMORY_PROMPTS = 4  # of the longest, in the memory tier that has a disk tier behind it
MEMORY_SPARE = 1.5
DISK_SHARE_MIN = 0.95  # of a disk hit's tokens; so many must have come from the disk tier

RECOMPUTE, DEVICE, BACK = "recompute", "device", "back"


def load(lengths: Sequence[int], pairs: int) -> Load:
    """The sizes of this case. Every hit is loaded, also one that should be slower than computing.

    A memory tier alone holds all prompts of a length; with a disk tier behind it, it holds a few.
    """
    longest, prompts = max(lengths), WARM_UPS + pairs
    small = SMALL_MEMORY_PROMPTS * longest
    fillers = sum(_fillers(length, small) * length for length in lengths)
    return Load(
        longest=longest,
        memory_tokens=int(MEMORY_SPARE * prompts * longest),
        small_memory_tokens=small,
        disk_tokens=prompts * sum(lengths) + fillers,
        always_load=True,
    )


def _fillers(length: int, memory_tokens: int) -> int:
    """Prompts of this length after which nothing older is in memory."""
    return memory_tokens // length + 1


class LengthRounds:
    """One prompt length. Every contestant is asked the same prompts in turn.

    First, prompt by prompt: computed, and after a rest again, from the device. Then, when the tiers
    of the designs with a disk hold them on disk alone: the device forgets, and the prompt comes
    back from the tier; plain vLLM computes it again, and that is what it is compared with.
    """

    def __init__(self, length: int, small_memory_tokens: int) -> None:
        self.length = length
        self._small_memory_tokens = small_memory_tokens
        self.answers: dict[tuple[str, str], list[Answer]] = {}  # by (design, measure)

    def measure(
        self, contestants: Sequence[Contestant], pairs: int, order: Orders, say: Say
    ) -> None:
        """Ask everything. The first prompts warm up and are not kept."""
        prompts = [
            Prompt(f"{NAME}-{self.length}-{i}", self.length) for i in range(WARM_UPS + pairs)
        ]
        for number, prompt in enumerate(prompts):
            say(f"{self.name}: computed and from the device, {number + 1} of {len(prompts)}")
            for contestant in order(contestants, number):
                self._keep(contestant, RECOMPUTE, number, contestant.ask([prompt]))
                time.sleep(REST_S)
                self._keep(contestant, DEVICE, number, contestant.ask([prompt]))
        for contestant in contestants:
            if contestant.design.disk:
                say(f"{self.name}: {contestant.design.name}: out of memory")
                self._leave_memory(contestant)
        for number, prompt in enumerate(prompts):
            say(f"{self.name}: from the tiers, {number + 1} of {len(prompts)}")
            for contestant in order(contestants, number):
                contestant.forget()
                self._keep(contestant, BACK, number, contestant.ask([prompt]))

    @property
    def name(self) -> str:
        """As the length is called in the results."""
        return f"{NAME}_{self.length}"

    def _keep(self, contestant: Contestant, measure: str, number: int, answer: Answer) -> None:
        if number >= WARM_UPS:
            self.answers.setdefault((contestant.design.name, measure), []).append(answer)

    def _prompts(self, kind: str, count: int) -> list[Prompt]:
        return [Prompt(f"{self.name}-{kind}{number}", self.length) for number in range(count)]

    def _leave_memory(self, contestant: Contestant) -> None:
        if contestant.design.kind == PEER.kind:
            contestant.restart()
            prompts = self._prompts("restart-", WARM_UPS)
        else:
            prompts = self._prompts("filler-", _fillers(self.length, self._small_memory_tokens))
        for prompt in prompts:
            contestant.ask([prompt])
        contestant.drop_page_cache()

    # -- the lines --------------------------------------------------------------------------------

    def add_to(self, found: Findings, contestants: Sequence[Contestant]) -> None:
        """One line per measure and design, and more against the peer."""
        for contestant in contestants:
            for measure in (RECOMPUTE, DEVICE, BACK):
                if contestant.design != PLAIN:
                    self._add(found, contestant, measure)
                elif measure != BACK:
                    self._add_plain(found, contestant, measure)

    def _add_plain(self, found: Findings, contestant: Contestant, measure: str) -> None:
        """vLLM's own prefix cache against its own recomputation."""
        if measure == RECOMPUTE:
            return
        answers = self.answers[PLAIN.name, measure]
        reasons = [*self._reasons(PLAIN, measure), *self._reasons(PLAIN, RECOMPUTE)]
        case = f"{self.name}.{measure}_to_recompute"
        computed = _ms(self.answers[PLAIN.name, RECOMPUTE])
        found.add(case, PLAIN.name, "ms", _ms(answers), computed, reasons=reasons)
        found.explain(case, PLAIN.name, answers, reasons, facts=contestant.facts)

    def _add(self, found: Findings, contestant: Contestant, measure: str) -> None:
        design = contestant.design
        case = f"{self.name}.{design.hit_tier if measure == BACK else measure}"
        answers = self.answers[design.name, measure]
        reasons = [*self._reasons(design, measure), *self._reasons(PLAIN, measure)]
        cpu = self._cpu_s_per_gb(answers, found.record_bytes) if measure == BACK else None
        plain = _ms(self.answers[PLAIN.name, measure])
        found.add(case, design.name, "ms", _ms(answers), plain, cpu_s_per_gb=cpu, reasons=reasons)
        found.explain(case, design.name, answers, reasons, facts=contestant.facts)
        peer = PEER_OF.get(design.name)
        if peer is not None and (peer.name, measure) in self.answers:
            found.add(
                f"{case}.against_lmcache",
                design.name,
                "ms",
                _ms(answers),
                _ms(self.answers[peer.name, measure]),
                cpu_s_per_gb=cpu,
                reasons=[*reasons, *self._reasons(peer, measure)],
            )

    def _cpu_s_per_gb(self, answers: Sequence[Answer], record_bytes: int) -> float | None:
        """Of the store's process, per GB of the tokens that were not computed."""
        cached = sum(sum(answer.cached_tokens) for answer in answers)
        loaded = cached / BLOCK_SIZE * record_bytes / GB
        return sum(answer.store_cpu_s for answer in answers) / loaded if loaded else None

    def _reasons(self, design: Design, measure: str) -> list[str]:
        answers = self.answers[design.name, measure]
        reasons = troubles(answers, self.answers[PLAIN.name, RECOMPUTE])
        expected = Prompt("", self.length).restorable_tokens
        computes = measure == RECOMPUTE or (measure == BACK and design == PLAIN)
        cached = [tokens for answer in answers for tokens in answer.cached_tokens]
        if computes and any(cached):
            reasons.append(f"{design.name} was to compute, and {max(cached)} tokens were cached")
        if not computes and min(cached) < expected:
            reasons.append(f"{min(cached)} tokens were cached instead of {expected}")
        if measure == BACK and design.kind == "ebbtide":
            least = expected * (DISK_SHARE_MIN if design.disk else 1.0)
            from_tier = min(answer.hits.get(design.hit_tier, 0) for answer in answers)
            if from_tier < least:
                reasons.append(f"the {design.hit_tier} tier restored {from_tier} of {expected}")
        return reasons


def _ms(answers: Sequence[Answer]) -> list[float]:
    return [answer.times_s[0] * 1e3 for answer in answers]
