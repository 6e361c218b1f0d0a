"""`ebbtide bench offload`: it says when it measured nothing, and runs end to end."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.bench import offload
from ebbtide.bench.contestant import RoundResult, Served
from ebbtide.bench.measured_store import process_cpu_s
from ebbtide.bench.offload_report import Comparison, render
from ebbtide.bench.working_set import WorkingSet, distinct_blocks, plan
from ebbtide.cli import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, main
from ebbtide.connectors.seam import LoadResult, StepMetadata, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ebbtide.connectors.reference.engine import Engine
    from ebbtide.connectors.seam import BlockRef

SMALL = ["--model", "tiny", "--document-tokens", "60", "--answer-tokens", "4", "--concurrent", "2"]
PROMISED = {
    *("bench", "case", "design", "record_bytes", "value", "unit", "ceiling"),
    *("ratio", "ratio_low", "ratio_high", "cpu_s_per_gb", "verdict", "pairs", "exercised"),
}


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and JSON lines of a small run."""
    code = main(["bench", "offload", "--json", *SMALL, *words])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    offload.add_arguments(parser)
    return parser.parse_args([*SMALL, *words])


# -- end to end -----------------------------------------------------------------------------------


@pytest.mark.live
def test_p89_a_small_run_from_end_to_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, lines = bench(capsys, "--pairs", "2", "--factors", "2,4", "--dir", str(tmp_path))
    assert code == EXIT_DONE
    assert "cpu_cores" in lines[0]["machine"]
    cases = [line for line in lines if "verdict" in line]
    traffic = {(t["case"], t["design"]): t for t in (n["traffic"] for n in lines if "traffic" in n)}
    assert len(lines) == 1 + len(cases) + len(traffic)
    assert len(cases) == 2 * 3 * 3  # working sets, designs, measures
    for case in cases:
        assert set(case) == PROMISED
        assert case["verdict"] == "UNRESOLVED"  # two pairs
        assert case["exercised"]
        assert case["pairs"] == 2
        assert case["record_bytes"] == 8192
        assert case["value"] > 0
        assert (case["cpu_s_per_gb"] is None) == (case["design"] == "none")
    within, beyond = "working_set_2x", "working_set_4x"
    assert traffic[within, "memory"]["tokens_by_source"]["memory"] > 0
    assert traffic[beyond, "memory+disk"]["tokens_by_source"]["disk"] > 0
    assert traffic[beyond, "memory+disk"]["bytes_in_rounds"]["disk_to_memory"] > 0
    recomputed = {
        design: traffic[beyond, design]["tokens_by_source"]["computed"]
        for design in ("none", "memory", "memory+disk", "device")
    }
    assert recomputed["none"] > recomputed["memory"] > 2 * recomputed["memory+disk"]
    for entry in traffic.values():
        total = 2 * entry["users"]
        assert sum(entry["requests_by_main_source"].values()) == total
        assert entry["different_answers"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.live
def test_p89_a_working_set_that_fits_the_device_pool_is_invalid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, lines = bench(capsys, "--pairs", "1", "--factors", "0.5")
    assert code == EXIT_FAILED
    cases = [line for line in lines if "verdict" in line]
    assert {(case["verdict"], case["exercised"]) for case in cases} == {("INVALID", False)}
    reasons = {
        line["traffic"]["design"]: line["traffic"]["invalid_because"]
        for line in lines
        if "traffic" in line
    }
    said = ["no eviction: the working set fits into the device pool"]
    assert reasons == {"device": [], "none": said, "memory": said, "memory+disk": said}


class WriteOnly:
    """Tiers that take every block and never give one back: both halves and the store in one."""

    def __init__(self, engine: Engine, settings: dict[str, Any]) -> None:
        self.stored_blocks = 0
        self.closed = 0
        engine.attach(self, self)

    def on_new_request(
        self, request_id: str, block_hashes: Sequence[bytes], prompt_tokens: int
    ) -> None: ...

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        return 0

    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        local_tokens: int,
        external_tokens: int,
    ) -> None: ...

    def build_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        self.stored_blocks += len(newly_full)
        return StepMetadata()

    def on_report(self, report: WorkerReport) -> list[LoadResult]:
        return report.loads

    def request_finished(self, request_id: str, block_hashes: Sequence[bytes]) -> None: ...

    def has_pending_work(self) -> bool:
        return False

    def arrives(self, request_id: str) -> bool:
        return False

    def start_step(self, metadata: StepMetadata) -> None: ...

    def wait_for_layer(self, group: int, layer: int) -> None: ...

    def finish_step(self) -> WorkerReport:
        return WorkerReport()

    def cpu_s(self) -> float:
        return 0.0

    def moved(self) -> dict[str, int]:
        return {"device_to_memory": self.stored_blocks, "memory_to_device": 0}

    def settle(self) -> None: ...

    def troubles(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed += 1


def test_p89_tiers_that_store_but_never_return_are_invalid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = options("--json", "--pairs", "1", "--factors", "2")
    code = offload.measure(offload.OffloadBench(args, open_tiers=WriteOnly))
    assert code == EXIT_FAILED
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = {line["design"]: line["verdict"] for line in lines if "verdict" in line}
    assert verdicts == {"none": "UNRESOLVED", "memory": "INVALID", "memory+disk": "INVALID"}
    stored = [
        line["traffic"]["bytes_in_fill"]["device_to_memory"]
        for line in lines
        if "traffic" in line and line["traffic"]["design"].startswith("memory")
    ]
    assert min(stored) > 0


def test_people_get_a_line_per_number_and_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = options("--pairs", "1", "--factors", "2")
    memory_alone = (offload.NONE, offload.MEMORY)
    bench = offload.OffloadBench(args, open_tiers=WriteOnly, designs=memory_alone)
    assert offload.measure(bench) == EXIT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("case=working_set_2x.") for line in lines) == 6
    assert lines[-1] == "working_set_2x, memory: INVALID: the tiers restored nothing"


@pytest.mark.parametrize(
    "words",
    [
        ["--factors", "two"],
        ["--factors", "0"],
        ["--factors", "inf"],
        ["--turns", "5"],
        ["--concurrent", "0"],
        ["--dir", "/no/such/place"],
        ["--factors", "1e9"],
    ],
)
def test_wrong_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offload", *words]) == EXIT_USAGE
    assert "verdict" not in capsys.readouterr().out


def test_quick_is_fewer_pairs_and_working_sets() -> None:
    quick, full = (offload.OffloadBench(options(*words)) for words in (["--quick"], []))
    assert (quick.pairs, full.pairs) == (3, 11)
    assert [p.factor for p in quick.plans] == [2.0, 4.0]
    assert [p.factor for p in full.plans] == [2.0, 4.0, 8.0]


def test_the_store_s_cpu_time_is_read() -> None:
    before = process_cpu_s(os.getpid())
    sum(range(5_000_000))
    assert 0 < process_cpu_s(os.getpid()) - before < 60


# -- the plan -------------------------------------------------------------------------------------


def planned(factor: float = 4.0, **changes: int) -> WorkingSet:
    settings = {
        "turns": 2,
        "document_tokens": 100,
        "answer_tokens": 4,
        "concurrent": 3,
        "record_bytes": 8192,
        "seed": 0,
    }
    return plan(factor, **{**settings, **changes})


@pytest.mark.parametrize("factor", [0.3, 1.5, 2.0, 4.0, 8.0])
def test_the_working_set_is_as_large_as_it_is_called(factor: float) -> None:
    working_set = planned(factor)
    assert working_set.working_blocks == distinct_blocks(working_set.shape)
    assert working_set.working_blocks >= factor * working_set.device_blocks
    fewer = replace(working_set.shape, users=max(1, working_set.shape.users - 1))
    assert working_set.shape.users == 1 or (
        distinct_blocks(fewer) < factor * working_set.device_blocks
    )
    assert working_set.evicts == (factor > 1)
    assert working_set.exceeds_memory == (factor > 2.5)


def test_every_round_asks_everybody_once_in_another_order_at_the_same_distances() -> None:
    orders = planned(8.0).orders(11)
    users = sorted(turn.user for turn in orders[0])
    assert users == list(range(len(users)))
    distances = []
    for before, after in pairwise(orders):
        assert sorted(turn.user for turn in after) == users
        assert before != after
        place = {turn: number for number, turn in enumerate(after)}
        distances.append([place[turn] for turn in before])
    assert all(distance == distances[0] for distance in distances)
    assert orders == planned(8.0).orders(11)
    assert orders[1:] != planned(8.0, seed=1).orders(11)[1:]


def test_the_fill_asks_every_turn_once_and_no_turn_before_its_predecessor() -> None:
    working_set = planned(2.0)
    seen: set[tuple[int, int]] = set()
    for wave in working_set.fill():
        assert len({turn.user for turn in wave}) == len(wave) <= 3
        for turn in wave:
            assert all((turn.user, earlier) in seen for earlier in range(turn.turn))
        seen.update(wave)
    assert len(seen) == working_set.shape.users * working_set.shape.turns


# -- what makes a comparison invalid ---------------------------------------------------------------


def served(sources: dict[str, int], token: int = 1) -> Served:
    whole = {"device": 0, "memory": 0, "disk": 0, "computed": 0, **sources}
    return Served("user0-turn1", sum(whole.values()), 0.5, whole, {}, (token,))


def rounds(sources: dict[str, int], token: int = 1) -> list[RoundResult]:
    """A fill and two measured rounds."""
    one = RoundResult([served(sources, token)], 2.0, 0.25, {"memory_to_device": 500_000_000})
    return [one, one, one]


def compared(
    factor: float = 4.0,
    troubles: dict[str, dict[str, int]] | None = None,
    changed: dict[str, list[RoundResult]] | None = None,
) -> Comparison:
    results = {
        "device": rounds({"device": 160, "computed": 8}),
        "none": rounds({"computed": 168}),
        "memory": rounds({"memory": 16, "computed": 152}),
        "memory+disk": rounds({"memory": 16, "disk": 144, "computed": 8}),
    }
    return Comparison(
        planned(factor), offload.DESIGNS, {**results, **(changed or {})}, troubles or {}
    )


def test_a_comparison_that_exercised_everything_is_valid() -> None:
    found = compared()
    assert found.valid
    throughput = {c.design: c for c in found.cases if c.case.endswith("tokens_per_s")}
    assert throughput["memory"].value == 84.0
    assert throughput["memory"].cpu_s_per_gb == 0.5
    first_token = next(c for c in found.cases if c.case.endswith("ttft_p50"))
    assert (first_token.value, first_token.unit) == (500.0, "ms")


@pytest.mark.parametrize("side", ["memory", "device"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_one_differing_token_makes_it_invalid(side: str, when: int) -> None:
    sources = (
        {"memory": 16, "computed": 152} if side == "memory" else {"device": 160, "computed": 8}
    )
    results = rounds(sources)
    results[when] = rounds(sources, token=2)[0]
    found = compared(changed={side: results})
    assert not found.valid
    verdicts = {case.design: case.verdict for case in found.cases}
    assert verdicts["memory"] == "INVALID"
    assert (verdicts["memory+disk"] == "INVALID") == (side == "device")
    assert f"1 answers of {side} differ from those of none" in found.invalid_because["memory"]


def test_the_table_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    render([compared()])
    lines = capsys.readouterr().out.splitlines()
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    assert sum(line.strip().endswith("UNRESOLVED") for line in lines) == 9
    assert lines[-1].endswith("memory+disk: prompt tokens from memory 10%, disk 86%, computed 5%")


def test_beyond_memory_the_disk_must_have_restored_something() -> None:
    from_memory = rounds({"memory": 160, "computed": 8})
    beyond = compared(4.0, changed={"memory+disk": from_memory})
    assert beyond.invalid_because["memory+disk"] == ["the disk tier restored nothing"]
    assert beyond.invalid_because["memory"] == []
    assert compared(2.0, changed={"memory+disk": from_memory}).valid


def test_a_ceiling_that_recomputes_is_none() -> None:
    found = compared(changed={"device": rounds({"device": 144, "computed": 24})})
    assert found.invalid_because["none"] == ["device recomputed prefixes, so it is no ceiling"]


@pytest.mark.parametrize("kind", ["faults", "corrupt"])
def test_tiers_in_trouble_are_not_measured(kind: str) -> None:
    found = compared(troubles={"memory": {kind: 2, "shed": 9}})
    assert found.invalid_because["memory"] == [f"2 {kind}"]
    assert found.invalid_because["memory+disk"] == []
