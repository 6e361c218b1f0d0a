"""Load or compute, as the scheduler half does it: what is offered, measured and counted."""

from __future__ import annotations

from tests.scripted import Bench

from ebbtide.connectors.offload.load_or_compute import LoadOrCompute
from ebbtide.connectors.seam import LoadResult, WorkerReport
from ebbtide.tiers.reasons import Miss, Place

M, D = int(Place.MEMORY), int(Place.DISK)
BLOCK = 16


def _bench() -> Bench:
    return Bench(chooser=LoadOrCompute(margin_ratio=0.9))


def _load(bench: Bench, name: str, blocks: int, source: str, took_s: float) -> None:
    """One load of `blocks` blocks that takes `took_s`."""
    assert bench.half.matched_tokens(name, 0) == blocks * BLOCK
    bench.half.on_allocated(name, [range(1, 2 + blocks)], 0, blocks * BLOCK)
    bench.step()
    bench.now += took_s
    report = WorkerReport(loads=[LoadResult(name, blocks, (source,) * blocks)])
    bench.half.on_report(report)
    bench.half.request_finished(name, [])


def _measured(bench: Bench, *, load_s: float, compute_s: float, blocks: int = 20) -> None:
    """Both sides are known: a load and a prefill of `blocks` blocks, three times each."""
    chooser = bench.half._chooser
    assert chooser is not None
    for number in range(3):
        bench.arrive(f"m{number}", blocks * BLOCK + 1, seed=100 + number)
        bench.held([D] * blocks)
        _load(bench, f"m{number}", blocks, "disk", load_s)
    for _ in range(3):
        chooser.observe_prefill(blocks * BLOCK, compute_s)


def test_a_hit_that_is_slower_than_computing_is_counted_and_not_loaded() -> None:
    bench = _bench()
    _measured(bench, load_s=2.0, compute_s=0.1)
    before = bench.half.tally.prompt_blocks
    bench.arrive("r", 20 * BLOCK + 1)
    bench.held([D] * 20)
    assert bench.half.matched_tokens("r", 0) == 0
    assert bench.half.matched_tokens("r", 0) == 0, "asked again, answered the same"
    bench.half.on_allocated("r", [range(1, 22)], 0, 0)
    tally = bench.half.tally
    assert tally.misses["slower_than_compute"] == 20
    assert tally.prompt_blocks - before == 21
    misses = {reason: n for reason, n in bench.half.misses_by_reason("r").items() if n}
    assert misses == {"slower_than_compute": 20, "partial_block": 1}


def test_a_hit_that_is_faster_than_computing_is_loaded() -> None:
    bench = _bench()
    _measured(bench, load_s=0.01, compute_s=1.0)
    bench.arrive("r", 20 * BLOCK + 1)
    bench.held([D] * 20)
    assert bench.half.matched_tokens("r", 0) == 20 * BLOCK


def test_what_lies_behind_a_turned_down_hit_keeps_its_own_reason() -> None:
    bench = _bench()
    _measured(bench, load_s=2.0, compute_s=0.1)
    bench.arrive("r", 20 * BLOCK + 1)
    bench.held([D] * 12 + [int(Miss.EVICTED)] + [int(Miss.NEVER_SEEN)] * 7)
    assert bench.half.matched_tokens("r", 0) == 0
    bench.half.on_allocated("r", [range(1, 22)], 0, 0)
    misses = bench.half.misses_by_reason("r")
    assert misses == {
        "slower_than_compute": 12,
        "evicted": 1,
        "behind_miss": 7,
        "partial_block": 1,
    }


def test_a_store_that_has_fallen_silent_is_waited_for_once() -> None:
    bench = Bench()
    bench.arrive("r", 65)
    assert bench.half.matched_tokens("r", 0) is None
    bench.now += 0.06
    assert bench.half.matched_tokens("r", 0) == 0
    bench.arrive("s", 65, seed=1)
    assert bench.half.matched_tokens("s", 0) == 0, "nobody else waits"
    bench.held([M] * 4)  # the answer to r's question: the store speaks again
    bench.arrive("t", 65, seed=2)
    assert bench.half.matched_tokens("t", 0) is None
