"""`ebbtide bench daemon`: what it prints, and what makes it INVALID."""

from __future__ import annotations

import argparse
import json

import pytest

from ebbtide.bench import daemon_bench
from ebbtide.bench.daemon_worker import Answer, Order

MIB = 1 << 20


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    daemon_bench.add_arguments(parser)
    return parser.parse_args(words)


def test_it_prints_a_line_for_each_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon_bench, "LOOKUPS", dict.fromkeys(daemon_bench.KEYS, 3))
    monkeypatch.setattr(daemon_bench, "RECORD_SIZES", (MIB,))
    daemon_bench.run(options("--json", "--pairs", "1", "--seconds", "0.4"))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = {case["case"]: case for case in found if case["design"] == "ebbtide"}
    by_store = {case["case"] for case in found if case["design"] == "digests_by_store"}
    assert [c["case"] for c in found if c["design"] == "raw_verified"] == [
        "load_and_store.3_clients"
    ]
    lookups = {f"lookup_{name}.{keys}" for name in ("p50", "p99") for keys in daemon_bench.KEYS}
    others = {"load_and_store.3_clients", "jain_index.3_clients", "load_beside_stores_p99"}
    assert set(cases) == lookups | others
    assert by_store == others
    assert {cases[name]["verdict"] for name in lookups} == {"UNRESOLVED"}
    assert all(case["value"] > 0 < case["ceiling"] for case in cases.values())
    assert cases["load_and_store.3_clients"]["cpu_s_per_gb"] > 0


@pytest.mark.parametrize("given", ["0", "-3", "nan", "inf", "soon"])
def test_no_time_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--seconds", given)
    assert "--seconds" in capsys.readouterr().err


def test_keys_that_are_not_held_make_a_lookup_invalid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon_bench, "KEYS", (64,))
    monkeypatch.setattr(daemon_bench, "LOOKUPS", {64: 3})
    monkeypatch.setattr(daemon_bench, "RECORD_SIZES", ())
    fill = daemon_bench.Process.do

    def less(process: daemon_bench.Process, order: Order) -> Answer:
        return fill(process, Order("fill", count=1) if order.verb == "fill" else order)

    monkeypatch.setattr(daemon_bench.Process, "do", less)
    assert daemon_bench.run(options("--json", "--pairs", "1")) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["verdict"] for line in lines} == {"INVALID"}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (Answer(loaded=100, stored=100), True),
        (Answer(loaded=99, stored=100, missing=1), True),
        (Answer(loaded=98, stored=100, missing=2), False),
        (Answer(loaded=100, stored=100, wrong=1), False),
        (Answer(loaded=100), False),
        (Answer(stored=100), False),
    ],
)
def test_a_client_has_to_load_and_store_what_is_right(answer: Answer, right: bool) -> None:
    assert daemon_bench._is_right(answer) is right


def test_jains_index() -> None:
    assert daemon_bench._jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert daemon_bench._jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert daemon_bench._jain([0.0, 0.0]) == 0.0


def test_rates_count_both_ways() -> None:
    answer = Answer(loaded=3, stored=1, seconds=2.0)
    assert daemon_bench._rates([answer], MIB) == [pytest.approx(2 * MIB / 1e6)]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_nothing_done_is_invalid_and_not_a_division_by_zero(higher_is_better: bool) -> None:
    case = daemon_bench._case(
        "x", MIB, "MB/s", [0.0], [1.0], higher_is_better=higher_is_better, valid=True
    )
    assert (case.verdict, case.exercised) == ("INVALID", False)
