"""A load under way on every rank, as the scheduler half sees it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbtide.connectors.seam import BlockRef, LoadResult
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ebbtide.connectors.offload.groups import KVGroups
    from ebbtide.connectors.offload.load_or_compute import Choice
    from ebbtide.connectors.seam import LoadJob

TIERS = (label(Place.MEMORY), label(Place.DISK), label(Place.REMOTE))  # the fastest first


@dataclass(slots=True)
class Load:
    """`units[i]`: which unit of the prompt needs block `i` of the job, counted from the first.

    `whole_request`: a failure of any block costs all of them, and not only those behind it.
    """

    job: LoadJob
    units: tuple[int, ...]
    num_units: int
    waiting: int  # ranks that have not reported
    whole_request: bool = False
    arriving: set[int] = field(default_factory=set)  # ranks where it arrives, or has ended
    sources: list[str] = field(default_factory=list)  # the worst that a rank reported, per block
    expected: dict[str, int] = field(default_factory=dict)  # tokens by tier, as looked up
    choice: Choice | None = None  # that asked for it
    started_s: float = 0.0

    def add(self, rank: int, sources: Sequence[str]) -> None:
        """One rank's result: a tier or a reason per block."""
        self.waiting -= 1
        self.arriving.add(rank)
        if not self.sources:
            self.sources = list(sources)
            return
        for number, source in enumerate(sources):
            if _badness(source) > _badness(self.sources[number]):
                self.sources[number] = source

    def result(self) -> LoadResult:
        """What all ranks made of it."""
        loaded = 0
        while loaded < len(self.sources) and self.sources[loaded] in TIERS:
            loaded += 1
        return LoadResult(self.job.request_id, loaded, tuple(self.sources))

    def restored(self) -> Iterator[BlockRef]:
        """Blocks whose bytes are on the device, on every rank."""
        named = zip(self.job.keys, self.job.block_ids, self.sources, strict=False)
        return (BlockRef(block_id, key) for key, block_id, source in named if source in TIERS)

    def missed(self) -> Iterator[bytes]:
        """Keys that did not come."""
        named = zip(self.job.keys, self.sources, strict=False)
        return (key for key, source in named if source not in TIERS)

    @property
    def is_whole(self) -> bool:
        """Every block came."""
        return all(source in TIERS for source in self.sources)

    def bytes_by_tier(self, groups: KVGroups) -> Counter[str]:
        """Bytes of the records that came."""
        sizes: Counter[str] = Counter()
        for key, source in zip(self.job.keys, self.sources, strict=False):
            if source in TIERS:
                sizes[source] += groups.of_key(key).record_bytes
        return sizes

    def outcome(self) -> tuple[list[str], str]:
        """(tier per unit that the engine may use, reason of the first that it may not or "")."""
        by_unit = self._by_unit()
        loaded = 0
        while loaded < len(by_unit) and by_unit[loaded] in TIERS:
            loaded += 1
        if loaded == len(by_unit):
            return by_unit, ""
        return ([] if self.whole_request else by_unit[:loaded]), by_unit[loaded]

    def _by_unit(self) -> list[str]:
        """Per unit the slowest tier that it needed, or the reason why it failed."""
        worst = [""] * self.num_units
        for unit, source in zip(self.units, self.sources, strict=True):
            if not worst[unit] or _badness(source) > _badness(worst[unit]):
                worst[unit] = source
        # A unit that all windows have passed needed nothing: it came with the one behind it.
        behind = label(Miss.UNKNOWN)
        for unit in reversed(range(self.num_units)):
            behind = worst[unit] = worst[unit] or behind
        return worst


def _badness(source: str) -> int:
    return TIERS.index(source) if source in TIERS else len(TIERS)
