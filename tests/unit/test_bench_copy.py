"""`ebbtide bench copy`: what it prints, and that wrong bytes make a line INVALID."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ebbtide.bench import copy_bench
from ebbtide.bench.paged_forms import FORMS, make_pages, shape_of
from ebbtide.bench.pairs import Case, measured_case
from ebbtide.errors import ConfigError
from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = ["--json", "--pairs", "1", "--sizes", "1", "--fragments", "4"]


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_bench, "ROUND_BYTES", 1 << 20)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    copy_bench.add_arguments(parser)
    return parser.parse_args(words)


def test_it_prints_a_line_each_way_for_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert copy_bench.run(options(*SMALL)) == 0
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [case["case"] for case in cases] == [
        f"{form}.4k.1m.{way}" for form in FORMS for way in ("gather", "scatter")
    ]
    assert all(case["value"] > 0 < case["ceiling"] for case in cases)
    assert {case["verdict"] for case in cases} == {"UNRESOLVED"}


def lost(*arguments: object) -> None:
    """A copy that copies nothing."""


@pytest.mark.parametrize("name", ["gather_into", "scatter_from"])
def test_a_copy_that_brings_wrong_bytes_is_invalid(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(copy_bench, name, lost)
    assert copy_bench.run(options(*SMALL, "--forms", "mla")) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["verdict"] for line in lines} == {"INVALID"}


@pytest.mark.parametrize("fragment", [4096, 65536])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_the_length_of_fragment_that_is_asked_for(name: str, fragment: int) -> None:
    form = FORMS[name]
    shape = shape_of(form, layers=2, fragment_bytes=fragment, total_bytes=1 << 20)
    pages = make_pages(form, shape, torch.bfloat16)
    layout = PagedLayout.from_tensors(pages.tensors, block_dim=form.block_dim)
    joined = 2 if name in ("packed_blnhc", "packed_blhnc") else 1  # layers that are neighbours
    assert {one.length for one in layout.fragments} == {fragment * joined}
    assert shape.blocks == (1 << 20) // layout.record_bytes


@pytest.mark.parametrize("words", [("--forms", "rows"), ("--forms", "mla,")])
def test_an_unknown_form_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="no such form"):
        copy_bench.run(options(*SMALL, *words))


@pytest.mark.parametrize("words", [("--sizes", "0"), ("--sizes", "x"), ("--fragments", "4,,8")])
def test_what_is_no_number_is_a_usage_error(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        options(*words)


def test_the_row_says_what_is_below_the_goal() -> None:
    row: Callable[[Case], str] = copy_bench._row
    case = measured_case(
        bench="copy",
        case="mla.16k.1m.gather",
        design="ebbtide",
        record_bytes=1,
        unit="GB/s",
        values=[0.84],
        ceilings=[1.0],
        higher_is_better=True,
        cpu_s_per_gb=None,
        exercised=True,
        valid=True,
    )
    assert "below the goal" in row(case)
    assert "below the goal" not in row(replace(case, ratio=0.85))
    assert "below the goal" not in row(replace(case, case="mla.4k.1m.gather"))
