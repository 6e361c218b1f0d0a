"""`ebbtide bench index`: what it prints, and that keys that are not found make it INVALID."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from ebbtide.bench import index_bench
from ebbtide.bench.index_directory import RECORD_BYTES, capacity_bytes, fill
from ebbtide.bench.index_worker import Answer
from ebbtide.errors import ConfigError, EbbtideError

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = 20_000


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    index_bench.add_arguments(parser)
    return parser.parse_args(words)


def test_it_prints_a_line_for_each_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", "--pairs", "1", "--records", str(RECORDS), "--dir", str(tmp_path)]
    assert index_bench.run(options(*words)) == 0
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {case["case"].rpartition(".")[0] for case in cases} == set(index_bench.UNITS)
    assert all(case["value"] > 0 < case["ceiling"] for case in cases)
    assert {case["verdict"] for case in cases} == {"UNRESOLVED"}
    assert list(tmp_path.iterdir()) == []


def test_keys_that_are_not_found_make_a_line_invalid() -> None:
    right = Answer(1.0, 100.0, 1.0, 2.0, index_bench.LOOKUPS * index_bench.KEYS)
    wrong = Answer(1.0, 100.0, 1.0, 2.0, right.found - 1)
    for mine, verdict in ((right, "UNRESOLVED"), (wrong, "INVALID")):
        answers = {index_bench.EBBTIDE: [mine], index_bench.DICTIONARY: [right]}
        assert index_bench._case("open_cpu_s", RECORDS, answers).verdict == verdict


def test_a_directory_that_cannot_hold_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="file system is too small"):
        index_bench.run(options("--records", str(10**9)))
    with pytest.raises(ConfigError, match="no such directory"):
        index_bench.run(options("--dir", "/nowhere"))
    path = tmp_path / "disk"
    monkeypatch.setattr("ebbtide.bench.index_directory._write_first", lambda path, records: None)
    path.mkdir()
    (path / "index").mkdir()
    with pytest.raises(EbbtideError, match="does not hold"):
        fill(str(path), 100)
    assert capacity_bytes(100) > 100 * RECORD_BYTES


@pytest.mark.parametrize("records", ["1000", "x", ""])
def test_too_few_records_are_a_usage_error(records: str) -> None:
    with pytest.raises(SystemExit):
        options("--records", records)
