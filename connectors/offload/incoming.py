"""A load under way in one rank, as the worker half sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbtide.connectors.offload.load import TIERS
from ebbtide.connectors.seam import LoadResult
from ebbtide.tiers.reasons import Miss, label

if TYPE_CHECKING:
    from ebbtide.connectors.seam import LoadJob


@dataclass(slots=True)
class CopiedBatch:
    """Slots of one grant that are being copied, in one part a group."""

    rows: list[tuple[int, str]]  # position, tier
    parts: int
    loaded: bool = True


@dataclass(slots=True)
class IncomingLoad:
    """Its blocks by position in the job."""

    job: LoadJob
    ticket: int
    deadline_s: float
    shards: tuple[int, ...]
    sources: list[str | None]  # per block: a tier or a reason; None = not named yet
    copying: dict[int, CopiedBatch] = field(default_factory=dict)  # by batch
    given_up: bool = False
    void: Miss | None = None  # why whatever came is not to be used
    arriving: bool = False  # it was reported that it arrives
    waited_for: bool = False  # a forward pass uses it

    @property
    def over(self) -> bool:
        """Every block is named, and nothing is being copied."""
        return not self.copying and None not in self.sources

    @property
    def all_on_its_way(self) -> bool:
        """Every block is there or being copied, and nothing has failed. Quick while it is not."""
        failed = not all(batch.loaded for batch in self.copying.values())
        if failed or self.given_up or self.void is not None:
            return False
        unnamed = sum(len(batch.rows) for batch in self.copying.values())
        if self.sources.count(None) != unnamed:
            return False
        return all(source is None or source in TIERS for source in self.sources)

    def name(self, position: int, source: str) -> None:
        """Where a block came from, or why it did not. The first name stays."""
        if self.sources[position] is None:
            self.sources[position] = source

    def name_rest(self, reason: str) -> None:
        """What is not being copied will not come."""
        copying = {position for batch in self.copying.values() for position, _ in batch.rows}
        for position in range(len(self.sources)):
            if position not in copying:
                self.name(position, reason)

    def result(self) -> LoadResult:
        """When it is over."""
        sources = tuple(source or label(Miss.UNKNOWN) for source in self.sources)
        if self.void is not None:
            sources = (label(self.void),) * len(sources)
        loaded = 0
        while loaded < len(sources) and sources[loaded] in TIERS:
            loaded += 1
        return LoadResult(self.job.request_id, loaded, sources)
