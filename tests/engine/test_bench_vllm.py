"""`ebbtide bench vllm`: tiny runs from end to end, what makes a line INVALID, and a clean end."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from ebbtide.bench import vllm_bench, vllm_miss, vllm_ttft
from ebbtide.bench.vllm_answer import Answer, Prompt
from ebbtide.bench.vllm_bench import VllmBench, in_turn
from ebbtide.bench.vllm_contestant import MEMORY, MEMORY_AND_DISK, PLAIN, Contestant
from ebbtide.bench.vllm_report import Findings, render
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from ebbtide.bench.vllm_contestant import Design

TOKENS = 128
BLOCKS, RESTORED, LOADED = 4, 96, 128  # a device hit leaves the block that ends with the prompt
STARTING_S = 240.0
END_S = 60.0


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    vllm_bench.add_arguments(parser)
    small = ["--pairs", "1", "--lengths", str(TOKENS), "--miss-tokens", str(TOKENS)]
    return parser.parse_args([*small, "--miss-prompts", "2", *words])


def processes_with(text: str) -> list[str]:
    """Command lines of processes that name `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # ended meanwhile
            if text.encode() in words:
                found.append(words.replace(b"\0", b" ").decode())
    return found


# -- with real engines ----------------------------------------------------------------------------


def measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, *designs: Design
) -> Findings:
    """One pair of one case; nothing of it may be left."""
    scratch, disks = tmp_path / "scratch", tmp_path / "disks"
    scratch.mkdir()
    disks.mkdir()
    shared_memory = set(os.listdir("/dev/shm"))
    monkeypatch.setattr(vllm_ttft, "WARM_UPS", 1)
    args = options("--cases", case, "--dir", str(disks))
    (findings,) = VllmBench(args, str(scratch), designs=designs).run()
    assert [path.name for path in scratch.iterdir()] == ["model"]
    assert list(disks.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert processes_with(str(tmp_path)) == []
    return findings


@pytest.mark.long
def test_miss_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(tmp_path, monkeypatch, "miss", PLAIN, MEMORY)
    assert found.valid, found.traffic
    assert {case.case for case in found.cases} == {
        *("miss.prompt_tokens_per_s", "miss.prompt_tokens_per_s_copied"),
        *("hooks.p50", "hooks.p99", "hooks.max"),
    }
    assert {(case.design, case.verdict, case.pairs) for case in found.cases} == {
        ("memory", "UNRESOLVED", 1)
    }
    assert all(case.value > 0 for case in found.cases)
    plain, memory = found.traffic
    assert (plain["blocks_stored"], memory["blocks_stored"]) == (0, 2 * BLOCKS)
    assert memory["bytes_moved"] == {"device_to_memory": 2 * BLOCKS * found.record_bytes}
    assert memory["hooks_us"]["on_new_request"]["calls"] == 2
    assert memory["hooks_us"]["build_connector_meta"]["calls"] >= 2


@pytest.mark.long
def test_ttft_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(tmp_path, monkeypatch, "ttft", PLAIN, MEMORY_AND_DISK)
    assert found.valid, found.traffic
    assert [(case.case, case.design) for case in found.cases] == [
        ("ttft_128.device_to_recompute", "plain"),
        ("ttft_128.recompute", "memory+disk"),
        ("ttft_128.device", "memory+disk"),
        ("ttft_128.disk", "memory+disk"),
    ]
    disk = found.traffic[-1]
    assert disk["tokens_by_tier"] == {"disk": LOADED}
    assert disk["bytes_moved"]["disk_to_memory"] >= LOADED // 32 * found.record_bytes


@pytest.mark.long
def test_a_dead_contestant_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    bench = VllmBench(options("--dir", str(tmp_path)), str(tmp_path))
    spec = vllm_miss.load(TOKENS).spec(
        MEMORY,
        record_bytes=131_072,
        directory=str(tmp_path),
        disk_path="",
        model=bench.model,
        dtype="float32",
    )
    contestant = Contestant(MEMORY, spec, 1)
    try:
        contestant.until_ready()
        assert len(processes_with(str(tmp_path))) == 2  # the worker and its store
        os.kill(contestant.pid, signal.SIGKILL)
        with pytest.raises(EbbtideError, match="process has ended") as raised:
            contestant.ask([Prompt("one", TOKENS)])
        assert raised.value.context["design"] == "memory"
        assert raised.value.context["exit_code"] == -signal.SIGKILL
    finally:
        contestant.close()
    deadline = time.monotonic() + END_S
    while processes_with(str(tmp_path)):
        assert time.monotonic() < deadline, "the store outlives its engine"
        time.sleep(0.1)


@pytest.mark.long
def test_a_model_that_cannot_be_built_is_an_error_with_the_worker_s_words(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"')
    spec = vllm_miss.load(TOKENS).spec(
        PLAIN, record_bytes=0, directory=str(tmp_path), disk_path="", model=str(model), dtype="auto"
    )
    contestant = Contestant(PLAIN, spec, 1)
    try:
        with pytest.raises(EbbtideError, match="process has ended") as raised:
            contestant.until_ready()
    finally:
        contestant.close()
    assert raised.value.context["said"]


def test_ctrl_c_ends_workers_and_removes_what_was_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ebbtide", "bench", "vllm", "--cases", "miss"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stderr is not None
    with process, process.stderr as said:
        assert b"starting plain" in said.readline()
        deadline = time.monotonic() + STARTING_S
        while not any("vllm_worker" in words for words in processes_with(str(tmp_path))):
            assert time.monotonic() < deadline, "no worker is started"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 130
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []


# -- what makes a line INVALID --------------------------------------------------------------------


class Described:
    """A contestant as far as the findings look at it."""

    record_bytes = 131_072

    def __init__(self, design: Design) -> None:
        self.design = design
        self.facts: dict[str, object] = {}


def answered(**changes: object) -> Answer:
    answer = Answer(times_s=[0.1, 0.1], seconds=0.2, copied_s=0.25, token_ids=[[7], [8]])
    answer.cached_tokens, answer.stored_blocks = [0, 0], 2 * BLOCKS
    answer.hooks_us = {"on_new_request": [10.0, 20.0], "build_connector_meta": [30.0, 40.0]}
    answer.engine_cpu_s, answer.store_cpu_s = 0.2, 0.1
    return msgspec.structs.replace(answer, **changes)


def miss(memory: Answer, plain: Answer | None = None) -> Findings:
    rounds = vllm_miss.MissRounds(TOKENS, 2)
    rounds.answers = {"plain": [plain or answered()] * 11, "memory": [memory] * 11}
    return rounds.findings([Described(PLAIN), Described(MEMORY)])  # type: ignore[list-item]


def test_miss_lines_say_what_was_measured() -> None:
    found = miss(answered(seconds=0.25, copied_s=0.4))
    lines = {case.case: case for case in found.cases}
    assert lines["miss.prompt_tokens_per_s"].value == 1024.0
    assert lines["miss.prompt_tokens_per_s"].ratio == 0.8
    assert lines["miss.prompt_tokens_per_s_copied"].ratio == 0.5
    assert lines["miss.prompt_tokens_per_s"].cpu_s_per_gb == pytest.approx(
        0.1 / (8 * 131_072 / 1e9), rel=1e-4
    )
    assert (lines["hooks.p50"].value, lines["hooks.max"].value) == (30.0, 40.0)
    assert lines["hooks.p99"].ratio == 0.04
    assert {case.verdict for case in found.cases} == {"RESOLVED"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": [[7], [9]]}, "11 answers differ from those of plain vLLM"),
        ({"cached_tokens": [0, 32]}, "prompts that should be new were cached"),
        ({"stored_blocks": BLOCKS}, "only 44 of 88 blocks were stored"),
        ({"faults": 1}, "11 faults"),
        ({"corrupt": 1}, "11 corrupt"),
    ],
)
def test_a_miss_round_that_did_something_else_is_invalid(
    changes: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = miss(answered(**changes))
    assert {case.verdict for case in found.cases} == {"INVALID"}
    assert found.traffic[1]["invalid_because"] == [reason]
    render([found])
    assert capsys.readouterr().out.splitlines()[-1] == f"miss, memory: INVALID: {reason}"


def test_hooks_that_were_never_called_are_invalid() -> None:
    verdicts = {case.case: case.verdict for case in miss(answered(hooks_us={})).cases}
    assert verdicts["hooks.p99"] == "INVALID"
    assert verdicts["miss.prompt_tokens_per_s"] == "RESOLVED"


def first_token(seconds: float, cached: int, tier: str = "", token: int = 7) -> Answer:
    hits = {tier: cached} if tier else {}
    return Answer(
        times_s=[seconds], token_ids=[[token]], cached_tokens=[cached], hits=hits, store_cpu_s=0.01
    )


def ttft(**changed: Answer) -> Findings:
    """Lines of plain and memory+disk; `changed` by design and measure, such as disk_back."""
    answers = {
        "plain_recompute": first_token(0.2, 0),
        "plain_device": first_token(0.01, RESTORED),
        "plain_back": first_token(0.2, 0),
        "disk_recompute": first_token(0.21, 0),
        "disk_device": first_token(0.012, RESTORED),
        "disk_back": first_token(0.05, RESTORED, "disk"),
        **changed,
    }
    rounds = vllm_ttft.LengthRounds(TOKENS, 4 * TOKENS)
    for name, answer in answers.items():
        design, measure = name.split("_")
        rounds.answers["memory+disk" if design == "disk" else design, measure] = [answer] * 11
    found = Findings(131_072)
    rounds.add_to(found, [Described(PLAIN), Described(MEMORY_AND_DISK)])  # type: ignore[list-item]
    return found


def test_ttft_is_compared_with_plain_vllm_asked_the_same() -> None:
    ratios = {(case.case, case.design): case.ratio for case in ttft().cases}
    assert ratios == {
        ("ttft_128.device_to_recompute", "plain"): 0.05,
        ("ttft_128.recompute", "memory+disk"): 1.05,
        ("ttft_128.device", "memory+disk"): 1.2,
        ("ttft_128.disk", "memory+disk"): 0.25,
    }
    assert ttft().valid


@pytest.mark.parametrize(
    ("name", "answer", "case", "reason"),
    [
        ("disk_back", first_token(0.1, RESTORED, "memory"), "disk", "the disk tier restored 0"),
        ("disk_back", first_token(0.1, 32, "disk"), "disk", "32 tokens were cached instead of 96"),
        ("disk_back", first_token(0.1, RESTORED, "disk", 8), "disk", "11 answers differ"),
        ("disk_recompute", first_token(0.1, 32), "recompute", "was to compute, and 32 tokens"),
        ("plain_back", first_token(0.1, RESTORED), "disk", "plain was to compute"),
        ("plain_device", first_token(0.1, 0), "device", "0 tokens were cached instead of 96"),
    ],
)
def test_a_first_token_from_elsewhere_is_invalid(
    name: str, answer: Answer, case: str, reason: str
) -> None:
    found = ttft(**{name: answer})
    line = next(one for one in found.cases if one.case == f"ttft_128.{case}")
    explained = next(one for one in found.traffic if one["case"] == f"ttft_128.{case}")
    assert line.verdict == "INVALID"
    assert any(reason in one for one in explained["invalid_because"])
    assert not found.valid


def test_every_design_is_asked_first_and_last_as_often() -> None:
    orders = [in_turn(["A", "B", "C"], number) for number in range(6)]
    assert orders[:2] == [["A", "B", "C"], ["C", "B", "A"]]
    assert sorted(order[0] for order in orders) == ["A", "A", "B", "B", "C", "C"]
    assert sorted(order[-1] for order in orders) == ["A", "A", "B", "B", "C", "C"]
    before = [order.index("A") < order.index("B") for order in orders]
    assert before.count(True) == 3
