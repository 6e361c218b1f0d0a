"""`ebbtide bench allocator`: what it prints, and that wrong answers make a line INVALID."""

from __future__ import annotations

import argparse
import gc
import json
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.allocator import hash_blocks
from ebbtide.bench import allocator_bench
from ebbtide.bench.allocator_load import (
    BLOCK_SIZE,
    PARTS,
    UNITS,
    Pool,
    Sample,
    Sizes,
    cpu_us,
    measure,
    prompt,
    quiet_collector,
)
from ebbtide.bench.allocator_ours import Ebbtide, EbbtideServing
from ebbtide.bench.pairs import INVALID, RESOLVED, UNRESOLVED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SMALL = Sizes(
    tokens=512,
    steps=40,
    decode_tokens=64,
    pool_blocks=300,
    few_blocks=64,
    few_pools=2,
    many_blocks=320,
)


class Peer(Ebbtide):
    """A second allocator of the same kind, to compare with."""

    def __init__(self) -> None:
        self.name = "peer"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_bench, "Sizes", lambda: SMALL)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int)
    allocator_bench.add_arguments(parser)
    return parser.parse_args(words)


def lines(text: str) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in map(json.loads, text.splitlines())}


@pytest.mark.usefixtures("small")
def test_without_a_peer_the_values_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert allocator_bench.run(options("--json", "--pairs", "2", "--no-peers")) == 0
    found = lines(capsys.readouterr().out)
    grown = found.pop("pool_allocate_free_1m.against_10k")
    assert grown["ratio"] == pytest.approx(grown["ceiling"] / grown["value"], rel=0.5)
    assert found.keys() == UNITS.keys()
    for case in found.values():
        assert case["value"] > 0
        assert [case[name] for name in allocator_bench.WITHOUT_PEER] == [None] * 4
        assert case["verdict"] == UNRESOLVED
        assert case["design"] == Ebbtide().name


@pytest.mark.usefixtures("small")
def test_a_peer_is_compared_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocator_bench, "Vllm", Peer)
    assert allocator_bench.run(options("--json", "--pairs", "2")) == 0
    for case in lines(capsys.readouterr().out).values():
        assert case["value"] > 0 < case["ceiling"]
        assert case["ratio_low"] <= case["ratio"] <= case["ratio_high"]
        assert (case["verdict"], case["pairs"]) == (UNRESOLVED, 2)
    assert allocator_bench.run(options("--pairs", "1")) == 0
    assert "hash_list" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_without_vllm_it_says_so_and_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Callable[[], object]:
        def build() -> object:
            raise ModuleNotFoundError("gone", name=name)

        return build

    monkeypatch.setattr(allocator_bench, "Vllm", missing("vllm"))
    assert allocator_bench.run(options("--pairs", "1", "--json")) == 0
    shown = capsys.readouterr()
    assert lines(shown.out)["allocate"]["ratio"] is None
    assert "vllm is not installed" in shown.err
    monkeypatch.setattr(allocator_bench, "Vllm", missing("torch"))
    with pytest.raises(ModuleNotFoundError):
        allocator_bench.run(options("--pairs", "1"))


class WrongNames(Peer):
    def hasher(self, tokens: Any) -> Callable[[], list[bytes]]:
        return lambda: hash_blocks(tokens, BLOCK_SIZE, algorithm="sha256")


class TooFewNames(Peer):
    def hasher(self, tokens: Any) -> Callable[[], list[bytes]]:
        return lambda: hash_blocks(tokens, BLOCK_SIZE)[1:]


class OtherServing(EbbtideServing):
    """Two of its tables differ from everybody's, it finds one block less, and it keeps one."""

    def table(self, request: Any) -> list[int]:
        return super().table(request)[::-1]

    def hit_tokens(self, computed: Any) -> int:
        return max(super().hit_tokens(computed) - BLOCK_SIZE, 0)

    def num_free(self) -> int:
        return super().num_free() - 1


class WrongServing(Peer):
    def serving(self, num_blocks: int, max_model_len: int) -> EbbtideServing:
        return OtherServing(num_blocks, max_model_len)


class WrongPool(Peer):
    """Hands one block out twice."""

    def pool(self, num_blocks: int) -> Pool:
        take, give = super().pool(num_blocks)

        def take_wrongly(count: int) -> Sequence[Any]:
            taken = list(take(count))
            return [*taken[:-1], taken[0]] if count < num_blocks else taken[1:]

        return Pool(take_wrongly, lambda blocks: give(set(blocks)))


@pytest.mark.parametrize(
    ("peer", "wrong"),
    [
        (Peer, set()),
        (WrongNames, {"hash_list", "hash_int64"}),
        (TooFewNames, {"hash_list", "hash_int64"}),
        (WrongServing, {"allocate", "lookup_full_hit", "decode_step", "free"}),
        (WrongPool, {"pool_build", "pool_allocate_free_10k", "pool_allocate_free_1m"}),
    ],
)
def test_wrong_answers_make_a_line_invalid(peer: type[Peer], wrong: set[str]) -> None:
    ours = Ebbtide()
    rounds = allocator_bench.measure_rounds([ours, peer()], SMALL, 1, tuple(PARTS))
    cases = allocator_bench.cases(rounds, ours.name, "peer")
    found = {case.case: case.verdict for case, _ in cases}
    assert {case for case, verdict in found.items() if verdict == INVALID} == wrong


@pytest.mark.usefixtures("small")
def test_cases_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert allocator_bench.run(options("--json", "--pairs", "1", "--cases", "hash")) == 0
    assert lines(capsys.readouterr().out).keys() == {"hash_list", "hash_int64"}
    for wrong in ("", "hashes", "hash,hash"):
        with pytest.raises(SystemExit):
            options("--cases", wrong)


class Fickle(Ebbtide):
    """Answers otherwise every other time."""

    asked = 0

    def hasher(self, tokens: Any) -> Callable[[], list[bytes]]:
        self.asked += 1
        return super().hasher([self.asked % 4 // 2, *range(1, len(tokens))])


def test_an_answer_that_changes_within_a_round_is_wrong() -> None:
    assert not measure(Fickle(), SMALL, 0, ["hash"])["hash_list"].is_right
    assert measure(Ebbtide(), SMALL, 0, ["hash"])["hash_list"].is_right


def test_a_wrong_line_is_an_exit_code_of_one(
    monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocator_bench, "Vllm", WrongNames)
    assert allocator_bench.run(options("--pairs", "1", "--json")) == 1
    assert lines(capsys.readouterr().out)["hash_list"]["verdict"] == INVALID


def test_a_time_is_compared_upside_down() -> None:
    mine, other = [Sample(2.0, True)] * 11, [Sample(6.0, True)] * 11
    case = allocator_bench._case("hash_list", "ebbtide", mine, other)
    assert (case.ratio, case.verdict) == (3.0, RESOLVED)


def test_what_is_compared_with_what() -> None:
    steady = {name: Sample(2.0, True) for name in UNITS}
    steady[allocator_bench.FEW] = Sample(1.5, True)
    rounds = {"ebbtide": [steady] * 11, "peer": [{name: Sample(8.0, True) for name in UNITS}] * 11}
    for peer, verdict in (("peer", RESOLVED), (None, UNRESOLVED)):
        cases = allocator_bench.cases(rounds, "ebbtide", peer)
        found = {case.case: (case, has_peer) for case, has_peer in cases}
        grown, _ = found.pop("pool_allocate_free_1m.against_10k")
        assert (grown.value, grown.ceiling, grown.ratio, grown.verdict) == (2, 1.5, 0.75, RESOLVED)
        assert {(case.verdict, has) for case, has in found.values()} == {(verdict, peer == "peer")}
        case, _ = found["allocate"]
        assert (case.value, case.ceiling) == (2.0, 8.0 if peer else 2.0)


def test_each_case_is_measured_by_itself() -> None:
    found = measure(Ebbtide(), SMALL, 0, tuple(PARTS))
    assert found.keys() == UNITS.keys()
    assert all(sample.is_right for sample in found.values())
    assert 50 < found["block_bytes"].value < 2000
    names = hash_blocks(prompt(SMALL.tokens, 0), BLOCK_SIZE)
    assert found["hash_list"].proof == found["hash_int64"].proof == names[-1:]
    assert len(prompt(100, 0)) == 100
    assert prompt(100, 0) != prompt(100, 1)


def test_the_collector_rests_between_and_the_clock_counts_this_thread() -> None:
    with quiet_collector():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    spent_us, result = cpu_us(lambda: sum(range(200_000)))
    assert result == 19_999_900_000
    assert spent_us > 0
