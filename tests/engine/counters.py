"""Counters of an engine: read from the Prometheus registry or text, compared, added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable

HIT_TIERS = {"device", "memory", "disk", "remote"}
_PER_PROCESS = {"engine", "model_name"}  # labels that vLLM gives to every series


class Series(NamedTuple):
    """One time series: the sample's name, and its labels without engine and model."""

    name: str
    labels: frozenset[tuple[str, str]]


class Counters:
    """Values of all `_total` samples of vLLM and ebbtide at one moment."""

    def __init__(self, values: dict[Series, float]) -> None:
        self.values = values

    @classmethod
    def of_this_process(cls) -> Counters:
        """What the registry of this process says: an engine built in the test process."""
        return cls._of(REGISTRY.collect())

    @classmethod
    def of_text(cls, text: str) -> Counters:
        """What a server answered to `GET /metrics`."""
        return cls._of(text_string_to_metric_families(text))

    @classmethod
    def _of(cls, families: Iterable[object]) -> Counters:
        values: dict[Series, float] = {}
        for family in families:
            for sample in family.samples:  # type: ignore[attr-defined]
                if sample.name.endswith("_total") and sample.name.startswith(("vllm:", "ebbtide_")):
                    labels = {kv for kv in sample.labels.items() if kv[0] not in _PER_PROCESS}
                    series = Series(sample.name, frozenset(labels))
                    values[series] = values.get(series, 0.0) + sample.value
        return cls(values)

    def __repr__(self) -> str:
        """Our own series, one a line: what a failed assertion shows."""
        ours = (
            f"{name}{dict(labels) or ''} {round(value)}"
            for (name, labels), value in sorted(self.values.items(), key=str)
            if name.startswith("ebbtide_") and value
        )
        return "\n".join(["counters:", *ours])

    def since(self, before: Counters) -> Counters:
        """The growth since `before`; series without growth are left out."""
        growth = {key: value - before.values.get(key, 0.0) for key, value in self.values.items()}
        return Counters({key: value for key, value in growth.items() if value})

    def total(self, name: str, **labels: str) -> int:
        """The sum of the series called `name` that have these labels; 0 when there are none."""
        wanted = set(labels.items())
        return round(
            sum(
                value
                for key, value in self.values.items()
                if key.name == name and wanted <= key.labels
            )
        )

    def by(self, name: str, label: str) -> dict[str, int]:
        """The values of `name` by one of its labels, those that are not zero."""
        found: dict[str, int] = {}
        for key, value in self.values.items():
            if key.name == name and value:
                at = dict(key.labels)[label]
                found[at] = found.get(at, 0) + round(value)
        return found

    @property
    def restored_tokens(self) -> int:
        """Tokens that ebbtide brought back from any tier below the device."""
        by_tier = self.by("ebbtide_hit_tokens_total", "tier")
        return sum(tokens for tier, tokens in by_tier.items() if tier != "device")

    def restored_from(self, tier: str) -> int:
        """Tokens that ebbtide brought back from `tier`."""
        return self.total("ebbtide_hit_tokens_total", tier=tier)

    @property
    def preemptions(self) -> int:
        """How often vLLM took a running request's blocks."""
        return self.total("vllm:num_preemptions_total")


def assert_counters_add_up(counters: Counters, *, requests: int | None = None) -> None:
    """Every prompt block was counted once: by the tier that served it or by why it missed.

    `requests`: how many must have been counted; 0 for an engine that never reads from the tiers.
    """
    hits = counters.by("ebbtide_hit_blocks_total", "tier")
    misses = counters.by("ebbtide_miss_blocks_total", "reason")
    asked = counters.total("ebbtide_prompt_blocks_total")
    assert asked == sum(hits.values()) + sum(misses.values()), counters
    assert asked > 0 or requests == 0, "nothing was counted"
    assert hits.keys() <= HIT_TIERS, hits
    assert min([0, *hits.values(), *misses.values()]) >= 0, (hits, misses)
    hit_tokens = counters.by("ebbtide_hit_tokens_total", "tier")
    assert hit_tokens.keys() == hits.keys(), (hit_tokens, hits)
    if requests is not None:
        assert counters.total("ebbtide_requests_total") == requests, counters
    assert counters.total("ebbtide_faults_total") == 0, counters
