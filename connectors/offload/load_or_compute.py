"""Load or compute: of the blocks that a tier holds, load only what is faster than computing them.

Two things are measured: how long loads take, per tier, from the step that asked to the report (so
queues and step granularity are in it), and how long prompt tokens take to compute. Delay only ever
adds to such a time: a measurement may be too slow by accident, never too fast. That is why medians
are the lower ones, why one stall decides nothing, and why a tier that was quicker than it is
believed to be is believed at once.

Where nothing is known it loads. Where it is wrong for want of measurements, it finds out: a load
measures its tier, a computed prompt measures the prefill, and what was not chosen for
`RETRY_CHOICES` choices (or `RETRY_S`) in a row is tried once, as a probe.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from itertools import groupby, islice, takewhile
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.connectors.offload.load import TIERS
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


RETRY_CHOICES = 32  # choices in a row against a tier, or blind ones against computing, then a probe
RETRY_S = 60.0  # a tier that was turned down that long ago, and ever since, gets a probe
PROBE_SHARE = 0.2  # a probe is cut to this share of what computing the run is predicted to take
COSTLY_RETRIES = 4  # times the two bounds above; then also a probe that cannot be cut to that share
EARLY_RETRY = 4  # choices in a row against a tier of which a single load is known
PROBE_FASTER = 0.7  # a probe that took less than this share of its prediction: the tier has changed
SAMPLES_PER_SIZE = 5  # newest ones kept of each size class; three slow ones turn the median
FORGET_AFTER = 1024  # measurements without one of a size class: the class is forgotten
PROVEN = 2  # samples of a size whose faster one is no accident: no stall, no compiling
CHANGED = 2.0  # a size class off the line by this factor: the other classes are of another time
SIZE_STEP = 4  # a size class spans this factor
SHORTEST_S, LONGEST_S = 1e-6, 3600.0  # measured times are held between: squared, divided by
DISTINCT = 1e-9  # relative spread of sizes below which rounding would decide the rate
ERROR_WEIGHT = 0.1  # of the newest load in the running prediction error


class Choice(NamedTuple):
    """What to do with one run of held blocks. Keep it until the load ends: `observe_load` wants it.

    `load_blocks` counts from the start of the run; the rest is computed. The predictions are for
    these blocks, loaded and computed; where nothing is loaded, for the whole run that was turned
    down. None: not measured yet. A `probe` goes against the predictions to renew a measurement: of
    the tier `probed`, or by computing, of the prefill.
    """

    load_blocks: int
    predicted_load_s: float | None
    predicted_compute_s: float | None
    probe: bool
    probed: str | None = None


class _Samples:
    """Measured (units, seconds), the newest few of each size class.

    By class, because otherwise a thousand prompts' tails, a few tokens each, would push out the one
    long prompt that tells what a token costs, and small loads the one that tells the rate.
    """

    def __init__(self) -> None:
        self.count = 0
        self.by_size: dict[int, deque[tuple[int, float]]] = {}
        self._last: dict[int, int] = {}  # size class -> `count` at its newest sample

    def add(self, units: int, seconds: float) -> int:
        """Returns the size class. O(size classes), of which there are at most 32."""
        self.count += 1
        size = units.bit_length() // 2
        self.by_size.setdefault(size, deque(maxlen=SAMPLES_PER_SIZE)).append((units, seconds))
        self._last[size] = self.count
        for old in [key for key, last in self._last.items() if self.count - last > FORGET_AFTER]:
            del self.by_size[old], self._last[old]
        return size

    def keep_only(self, size: int) -> None:
        self.by_size = {size: self.by_size[size]}
        self._last = {size: self.count}

    def typical(self) -> dict[int, tuple[int, float]]:
        """Of each size class the sample that is the lower median in seconds per unit."""
        return {
            size: sorted(samples, key=lambda one: one[1] / one[0])[(len(samples) - 1) // 2]
            for size, samples in self.by_size.items()
        }


class _LoadTime:
    """One tier's load time: a fixed cost and a cost per byte, neither ever negative.

    Least squares of the relative error over the typical sample of each size class. One class alone
    cannot tell the two costs apart: then smaller loads are taken as proportional and larger ones as
    equally long. Both are optimistic, so that such a load is tried and the line becomes known.
    """

    def __init__(self) -> None:
        self.samples = _Samples()
        self.fixed_s = 0.0
        self.s_per_byte = 0.0
        self._longest_s = inf

    @property
    def measured(self) -> bool:
        return self.samples.count > 0

    def add(self, size_bytes: int, seconds: float) -> None:
        size = self.samples.add(size_bytes, seconds)
        self._fit()
        typical_bytes, typical_s = self.samples.typical()[size]
        off = typical_s / self.predict(typical_bytes)
        proven = len(self.samples.by_size[size]) >= PROVEN
        if proven and not 1.0 / CHANGED <= off <= CHANGED:
            self.samples.keep_only(size)
            self._fit()

    def _fit(self) -> None:
        points = list(self.samples.typical().values())
        self._longest_s = inf
        if len(points) == 1:
            ((only_bytes, only_s),) = points
            self.fixed_s, self.s_per_byte, self._longest_s = 0.0, only_s / only_bytes, only_s
        else:
            self.fixed_s, self.s_per_byte = _line(points)

    def predict(self, size_bytes: int) -> float:
        """Seconds for a load of so many bytes; 0.0 for none, and for a tier never measured."""
        if not size_bytes:
            return 0.0
        return min(self.fixed_s + self.s_per_byte * size_bytes, self._longest_s)

    def blocks_within(self, seconds: float, bytes_per_block: int) -> int:
        """The most blocks that are predicted to take no longer, but at least one."""
        if seconds >= self._longest_s or not self.s_per_byte:
            return sys.maxsize
        size_bytes = (seconds - self.fixed_s) / self.s_per_byte
        return max(1, int(size_bytes // bytes_per_block))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per unit) with the least sum of squared relative errors, both at least 0.

    Two or more different numbers of units. Sizes are scaled to at most 1: they square to 1e20.
    """
    scale = float(max(units for units, _ in points))
    w = wx = wxx = wt = wxt = 0.0
    for units, seconds in points:
        weight, x = 1.0 / (seconds * seconds), units / scale
        w += weight
        wx += weight * x
        wxx += weight * x * x
        wt += weight * seconds
        wxt += weight * x * seconds
    spread = w * wxx - wx * wx
    slope = (w * wxt - wx * wt) / spread if spread > DISTINCT * w * wxx else 0.0
    if slope <= 0.0:
        return wt / w, 0.0
    fixed = (wt - slope * wx) / w
    if fixed <= 0.0:
        return 0.0, wxt / wxx / scale
    return fixed, slope / scale


class _PrefillTime:
    """What one prompt token costs to compute: the best of the size classes' typical samples.

    The best, since a step's fixed cost makes a token look dear in short prompts, and attention in
    long ones. The fixed cost is left out on purpose: the prompt's last token is computed, and it
    paid, whatever is loaded. A token deep in a long prompt costs more than this says: the bias is
    towards computing, which is never slower than having no cache. Before any long prompt has been
    computed the fixed cost is in it: then the bias is towards loading, until the probe.
    """

    def __init__(self) -> None:
        self.samples = _Samples()
        self.s_per_token: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        self.samples.add(tokens, seconds)
        self.s_per_token = min(took / units for units, took in self.samples.typical().values())

    def proven(self, tokens: int) -> bool:
        """Some prompts of about that size, or longer ones, were computed: one may have compiled."""
        return any(
            len(samples) >= PROVEN and samples[-1][0] * SIZE_STEP >= tokens
            for samples in self.samples.by_size.values()
        )


class LoadOrCompute:
    """Predicts both and chooses. Pure: no clock, no I/O. Scheduler thread only.

    `margin_ratio` in (0, 1]: a load must be predicted to take less than this share of the time in
    which its blocks could be computed. `always_load` measures and predicts, but loads everything.
    Tiers are named "memory", "disk", "remote"; another name is a KeyError.
    """

    def __init__(self, *, margin_ratio: float, always_load: bool = False) -> None:
        if not 0.0 < margin_ratio <= 1.0:
            raise ConfigError(
                "The margin between loading and computing is not a ratio",
                next_step="Give a number above 0 and at most 1",
                margin_ratio=margin_ratio,
            )
        self._margin_ratio = margin_ratio
        self._always_load = always_load
        self._loads = {tier: _LoadTime() for tier in TIERS}
        self._prefill = _PrefillTime()
        self._turned_down: dict[str, tuple[int, float]] = {}  # choices in a row, since when
        self._blind_loads = 0  # chosen over a prefill that was never measured at that size
        self._counts: Counter[str] = Counter()
        self._error_ratio: float | None = None

    # -- measurements ---------------------------------------------------------------------------

    def observe_load(
        self, tier_bytes: Mapping[str, int], elapsed_s: float, choice: Choice | None = None
    ) -> None:
        """A load ended: the bytes that came from each tier, and the time since it was asked for.

        `choice`: the one that asked for it, if all its blocks came. O(1). A load from several tiers
        tells of the slowest of them (a probe, of the tier it was for): that one took what the
        others are not predicted to take, but no less than its share of the bytes. A load without
        bytes tells nothing.
        """
        sizes = {tier: tier_bytes[tier] for tier in TIERS if tier_bytes.get(tier, 0) > 0}
        if not sizes or not 0.0 <= elapsed_s < inf:
            return
        took_s = _bounded(elapsed_s)
        judged = list(sizes)[-1]
        if choice is not None:
            if choice.predicted_load_s is not None:
                self._count_error(choice.predicted_load_s, took_s)
            judged = choice.probed if choice.probed in sizes else judged
        load, size = self._loads[judged], sizes[judged]
        others_s = sum(self._loads[tier].predict(sizes[tier]) for tier in sizes if tier != judged)
        part_s = max(took_s - others_s, took_s * size / sum(sizes.values()))
        self._counts[f"{judged}_loads_observed"] += 1
        if choice is not None and choice.probe and part_s < PROBE_FASTER * load.predict(size):
            # What was known is of another time. A probe is cut small and says little of large
            # loads: so nothing is known now, and the next run is loaded whole and measured.
            self._loads[judged] = _LoadTime()
        else:
            load.add(size, _bounded(part_s))

    def observe_prefill(self, tokens: int, elapsed_s: float) -> None:
        """A request's prompt tokens were computed, first chunk scheduled to last chunk's end. O(1).

        Only computed tokens count, not loaded ones or those the device held.
        """
        if tokens > 0 and 0.0 <= elapsed_s < inf:
            self._prefill.add(tokens, _bounded(elapsed_s))

    def _count_error(self, predicted_s: float, took_s: float) -> None:
        error = abs(predicted_s - took_s) / took_s
        before = error if self._error_ratio is None else self._error_ratio
        self._error_ratio = before + ERROR_WEIGHT * (error - before)

    # -- the choice -----------------------------------------------------------------------------

    def choose(
        self, sources: Sequence[str], bytes_per_block: int, tokens_per_block: int, now_s: float
    ) -> Choice:
        """How many blocks of a run to load. Counts: call it once for each admission of a request.

        `sources`: the tier of each block that could be loaded, in chain order. The load and the
        compute behind it follow each other, so the prefix is sought with the least
        load + margin_ratio x compute of the rest. O(blocks).
        """
        if not sources:
            return Choice(0, None, None, False)
        runs = [(tier, len(list(blocks))) for tier, blocks in groupby(sources)]
        per_block_s = self._compute_s(tokens_per_block)
        probe, probed = False, None
        if per_block_s is None or self._always_load:
            blocks = len(sources)
        else:
            blocks = self._best_prefix(runs, bytes_per_block, self._margin_ratio * per_block_s)
            if blocks and self._blind(len(sources) * tokens_per_block):
                blocks, probe = 0, True
            elif blocks < len(sources):
                run_s = per_block_s * len(sources)
                more = self._probe(sources, blocks, bytes_per_block, run_s, now_s)
                if more:
                    blocks, probe, probed = blocks + more, True, sources[blocks]
        for tier in set(sources[:blocks]):
            self._turned_down.pop(tier, None)
        compared = blocks or len(sources)
        load_s = self._load_s(Counter(sources[:compared]), bytes_per_block)
        compute_s = self._compute_s(compared * tokens_per_block)
        choice = Choice(blocks, load_s, compute_s, probe, probed)
        self._count(choice)
        return choice

    def _best_prefix(
        self, runs: Iterable[tuple[str, int]], bytes_per_block: int, worth_s: float
    ) -> int:
        """The most blocks with the least load time less `worth_s` for each; 0 if that is no gain.

        Only the ends of one tier's runs are looked at: along a run the load time bends down or is
        straight, so that the least lies at an end.
        """
        sizes: Counter[str] = Counter()
        best_blocks, best_s, blocks = 0, 0.0, 0
        for tier, length in runs:
            blocks += length
            sizes[tier] += length * bytes_per_block
            cost_s = sum(self._loads[name].predict(size) for name, size in sizes.items())
            cost_s -= worth_s * blocks
            if cost_s < best_s or (cost_s == best_s and best_blocks):
                best_blocks, best_s = blocks, cost_s
        return best_blocks

    def _blind(self, tokens: int) -> bool:
        """True once in a while: computing has to be measured, or a first, bad guess would stay."""
        if self._prefill.proven(tokens):
            return False
        self._blind_loads += 1
        if self._blind_loads <= RETRY_CHOICES:
            return False
        self._blind_loads = 0
        return True

    def _probe(
        self, sources: Sequence[str], blocks: int, bytes_per_block: int, run_s: float, now_s: float
    ) -> int:
        """How many blocks behind the best prefix, of the tier that ends it, to load all the same.

        Mostly none. Else few, for it may be as slow as it was: no longer than a share of `run_s`,
        in which the run could be computed. But enough to tell the tier's rate from its fixed cost;
        where that takes longer than the share, a longer run is waited for, up to a bound.
        """
        tier = sources[blocks]
        if tier in sources[:blocks]:
            return 0  # this very load measures it
        times, since_s = self._turned_down.get(tier, (0, now_s))
        times += 1
        self._turned_down[tier] = (times, since_s)
        load = self._loads[tier]
        telling_s = max(load.predict(bytes_per_block), 2.0 * load.fixed_s)
        bound = 1 if telling_s <= PROBE_SHARE * run_s else COSTLY_RETRIES
        choices = EARLY_RETRY if load.samples.count < PROVEN else bound * RETRY_CHOICES
        if times <= choices and now_s - since_s < bound * RETRY_S:
            return 0
        most = load.blocks_within(max(PROBE_SHARE * run_s, telling_s), bytes_per_block)
        of_tier = takewhile(tier.__eq__, islice(sources, blocks, None))
        return min(most, sum(1 for _ in of_tier))

    def _load_s(self, blocks: Mapping[str, int], bytes_per_block: int) -> float | None:
        if not all(self._loads[tier].measured for tier in blocks):
            return None
        return sum(self._loads[tier].predict(n * bytes_per_block) for tier, n in blocks.items())

    def _compute_s(self, tokens: int) -> float | None:
        per_token = self._prefill.s_per_token
        return None if per_token is None else per_token * tokens

    def _count(self, choice: Choice) -> None:
        if choice.predicted_load_s is not None and choice.predicted_compute_s is not None:
            self._counts["predictions"] += 1
        self._counts["loads_chosen" if choice.load_blocks else "computes_chosen"] += 1
        self._counts["probes"] += choice.probe

    # -- metrics --------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, float]:
        """Gauges and counters for metrics, flat. What is not measured yet is left out.

        `<tier>_bytes_per_s` (left out, too, where only a fixed cost shows), `<tier>_fixed_ms`,
        `prefill_tokens_per_s`, `load_error_ratio` (running |predicted - actual| / actual); counters
        `<tier>_loads_observed`, `prefills_observed`, `predictions` (choices with both sides known),
        `loads_chosen` (at least one block), `computes_chosen` (none), `probes` (among the two).
        """
        counters = ("predictions", "loads_chosen", "computes_chosen", "probes")
        values: dict[str, float] = {name: self._counts[name] for name in counters}
        for tier, load in self._loads.items():
            values[f"{tier}_loads_observed"] = self._counts[f"{tier}_loads_observed"]
            if load.measured:
                values[f"{tier}_fixed_ms"] = load.fixed_s * 1e3
            if load.s_per_byte:
                values[f"{tier}_bytes_per_s"] = 1.0 / load.s_per_byte
        values["prefills_observed"] = self._prefill.samples.count
        if self._prefill.s_per_token is not None:
            values["prefill_tokens_per_s"] = 1.0 / self._prefill.s_per_token
        if self._error_ratio is not None:
            values["load_error_ratio"] = self._error_ratio
        return values


def _bounded(seconds: float) -> float:
    return min(max(seconds, SHORTEST_S), LONGEST_S)
