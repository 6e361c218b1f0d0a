"""Every prompt block counted once: by the tier that served it, or by the reason why it was
computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

COMPUTED = "computed"


@dataclass(slots=True)
class RequestTally:
    """One request's prompt. `finish` makes sources and misses add up to its blocks and tokens."""

    prompt_tokens: int
    block_size: int
    sources: Counter[str] = field(default_factory=Counter)  # full blocks by tier
    misses: Counter[str] = field(default_factory=Counter)  # blocks by reason

    @property
    def blocks(self) -> int:
        """Prompt blocks, the last, partly filled one included."""
        return -(-self.prompt_tokens // self.block_size)

    def served(self, source: str, blocks: int) -> None:
        """Blocks whose bytes came from a tier."""
        if blocks:
            self.sources[source] += blocks

    def missed(self, reason: str, blocks: int = 1) -> None:
        """Blocks that have to be computed."""
        if blocks:
            self.misses[reason] += blocks

    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens by tier, and computed ones; they add up to the prompt."""
        tokens = {
            source: count * self.block_size for source, count in self.sources.items() if count
        }
        tokens[COMPUTED] = self.prompt_tokens - sum(tokens.values())
        return tokens


@dataclass(slots=True)
class Tally:
    """Totals over the requests that were admitted."""

    requests: int = 0
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    tokens_by_source: Counter[str] = field(default_factory=Counter)
    blocks_by_source: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    bytes_by_edge: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)  # "loaded", "partly" or "failed"
    worker_faults: int = 0  # of all ranks
    demoted: int = 0  # device blocks whose record was committed
    shed: int = 0  # device blocks that the pool evicted before they had ebbed
    pinned: dict[int, bool] = field(default_factory=dict)  # of ranks with a GPU that have copied

    def add(self, request: RequestTally) -> None:
        """Once per request, when all its blocks are accounted for."""
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.prompt_blocks += request.blocks
        self.tokens_by_source.update(request.tokens_by_source())
        self.blocks_by_source.update(request.sources)
        self.misses.update(request.misses)

    def mark(self) -> tuple[int, ...]:
        """Changes whenever any total does. Cheap enough to be asked in every step."""
        moved = self.bytes_by_edge.total()
        ended = self.loads.total()
        pinned = sum(self.pinned.values())
        return (self.requests, self.demoted, self.shed, self.worker_faults, moved, ended, pinned)
