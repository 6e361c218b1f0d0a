"""`ebbtide bench allocator` beside vLLM's own allocator: both give the same answers."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ebbtide.bench import allocator_bench
from ebbtide.bench.allocator_load import UNITS, Sizes

if TYPE_CHECKING:
    import pytest

SMALL = Sizes(
    tokens=4096,
    steps=40,
    decode_tokens=64,
    pool_blocks=2000,
    few_blocks=320,
    few_pools=2,
    many_blocks=3200,
)


def test_vllm_names_finds_and_hands_out_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(allocator_bench, "Sizes", lambda: SMALL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    allocator_bench.add_arguments(parser)
    assert allocator_bench.run(parser.parse_args(["--json", "--pairs", "2"])) == 0
    found = {case["case"]: case for case in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found.keys() > UNITS.keys()
    assert all(case["ceiling"] > 0 for case in found.values())
