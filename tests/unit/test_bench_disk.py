"""`ebbtide bench disk`: what it prints, and that a design that brings nothing right is INVALID."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ebbtide.bench import disk_bench
from ebbtide.bench.disk_load import Buffers, Guarantees, in_flight
from ebbtide.bench.disk_peers import Files, LmdbValues
from ebbtide.bench.disk_raw import Raw
from ebbtide.bench.disk_tier import Tier
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.bench.disk_load import Design

MIB = 1 << 20
CASES = ("put_fill", "put", "put_scattered", "get")
RECORD_BYTES = 64 << 10
RECORDS = 300


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    disk_bench.add_arguments(parser)
    return parser.parse_args(words)


def designs(where: Path) -> list[Design]:
    return [
        Raw(str(where / "raw"), RECORDS, RECORD_BYTES, 4),
        Tier(str(where / "tier"), 48 * MIB, RECORD_BYTES),
        Files(str(where / "files"), RECORDS, RECORD_BYTES),
        Files(str(where / "synced"), RECORDS, RECORD_BYTES, synced=True),
        LmdbValues(str(where / "lmdb"), RECORDS, RECORD_BYTES),
    ]


def test_every_design_brings_back_what_it_kept_and_gives_up_the_oldest(tmp_path: Path) -> None:
    for design in designs(tmp_path):
        design.put(range(RECORDS))
        design.put(range(RECORDS, 2 * RECORDS))
        design.forget()
        kept = range(2 * RECORDS - RECORDS // 2, 2 * RECORDS)
        assert design.get(kept) == len(kept), design.name
        if isinstance(design, (Raw, LmdbValues)):
            assert design.get(range(RECORDS // 2)) == 0, design.name
        design.close()


def test_a_wrong_record_is_told_from_the_right_one(tmp_path: Path) -> None:
    raw = Raw(str(tmp_path / "raw"), RECORDS, RECORD_BYTES, 4)
    raw.put(range(RECORDS))
    assert raw.get([0, 1, RECORDS + 2, 3]) == 3
    raw.close()


def test_the_tier_reads_from_the_drive_and_verifies(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path / "tier"), 48 * MIB, RECORD_BYTES)
    assert tier.guarantees == Guarantees(synced=True, checksummed=True)
    tier.put(range(RECORDS))
    with open(tmp_path / "tier" / "slab", "r+b") as slab:
        slab.seek(40_000)  # behind the first record's stamp
        slab.write(b"\xaa" * 10)
    assert tier.get(range(RECORDS)) == RECORDS - 1
    assert tier.tier.corrupt == 1
    tier.close()


def test_buffers_are_page_aligned() -> None:
    buffers = Buffers(RECORD_BYTES)
    assert len(buffers.views) == in_flight(RECORD_BYTES)
    assert all(len(view) == RECORD_BYTES for view in buffers.views)
    buffers.close()


def test_it_prints_a_line_for_each_case_and_design(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", "--pairs", "1", "--sizes", "64KiB", "--capacity", "32MiB"]
    assert disk_bench.run(options(*words, "--dir", str(tmp_path))) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    facts, cases = lines[0]["facts"], lines[1:]
    assert facts["guarantees"]["ebbtide"] == "synced+checksummed"
    assert facts["guarantees"]["files"] == "none"
    found = {(case["case"], case["design"]) for case in cases}
    for name in facts["guarantees"]:
        assert {(case, name) for case in CASES} <= found
    assert ("get_beside_puts_p99", "ebbtide") in found
    assert [case for case, design in found if design.startswith("raw")] == ["put_fill"]
    assert all(case["value"] > 0 for case in cases)
    assert {case["verdict"] for case in cases} == {"UNRESOLVED"}
    assert list(tmp_path.iterdir()) == []


def test_a_design_that_brings_nothing_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tier, "get", lambda self, numbers: 0)
    words = ["--pairs", "1", "--sizes", "64KiB", "--capacity", "32MiB", "--no-peers"]
    assert disk_bench.run(options(*words, "--dir", str(tmp_path))) == 1
    rows = capsys.readouterr().out.splitlines()
    assert [" get " in row for row in rows if "INVALID" in row] == [True]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--capacity", "64KiB", "--sizes", "64KiB"], "too few records"),
        (["--capacity", "1000TiB"], "file system is too small"),
        (["--dir", "/nowhere"], "no such directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        disk_bench.run(options(*words))


def test_a_benchmark_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "ebbtide", "bench", "disk", "--quick", "--no-peers"]
    with subprocess.Popen(
        [*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert b"filling" in process.stderr.readline()
        assert list(tmp_path.iterdir())
        process.terminate()
        process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", ["1000", "64", "3KiB", "", "64KiB,x"])
def test_sizes_that_are_none_are_usage_errors(sizes: str) -> None:
    with pytest.raises(SystemExit):
        options("--sizes", sizes)
