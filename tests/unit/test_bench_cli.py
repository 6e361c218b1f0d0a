"""`ebbtide bench`: the case is chosen before its module is read; the machine comes first."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from ebbtide.bench import cli as bench_cli
from ebbtide.cli import EXIT_DONE, EXIT_USAGE, main

if TYPE_CHECKING:
    import argparse


class FakeCase(ModuleType):
    """A case that shows what it was given."""

    def __init__(self) -> None:
        super().__init__("fake_case")
        self.seen: argparse.Namespace | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=7)

    def run(self, args: argparse.Namespace) -> int:
        self.seen = args
        sys.stdout.write("measured\n")
        return 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCase:
    module = FakeCase()
    monkeypatch.setitem(sys.modules, "fake_case", module)
    cases = {"fake": bench_cli.BenchCase("fake_case", "measure a fake")}
    monkeypatch.setattr(bench_cli, "CASES", cases)
    return module


def test_the_machine_is_the_first_line(fake: FakeCase, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fake", "--size", "9", "--json", "--pairs", "12"]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert json.loads(first)["machine"]["cpu_cores"] >= 1
    assert rest == ["measured"]
    assert fake.seen is not None
    assert (fake.seen.size, fake.seen.json, fake.seen.pairs) == (9, True, 12)


def test_defaults(fake: FakeCase) -> None:
    main(["bench", "fake"])
    assert fake.seen is not None
    assert (fake.seen.size, fake.seen.json, fake.seen.pairs) == (7, False, None)


def test_help_of_the_verb_names_the_cases_and_help_of_a_case_its_options(
    fake: FakeCase, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--help"]) == EXIT_DONE
    assert "measure a fake" in capsys.readouterr().out
    assert main(["bench", "fake", "--help"]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert "--size" in shown
    assert "--pairs" in shown
    assert fake.seen is None


@pytest.mark.parametrize(
    "words", [[], ["nothing"], ["fake", "--sizes", "1"], ["fake", "--pairs", "0"]]
)
def test_wrong_use_measures_nothing(
    fake: FakeCase, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == EXIT_USAGE
    assert capsys.readouterr().out == ""
    assert fake.seen is None


def test_help_imports_no_case_and_no_tensor_library() -> None:
    code = (
        "import sys; from ebbtide.cli import main; main(['bench', '--help']);"
        "print('torch' in sys.modules, 'ebbtide.bench.offload' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == "False False\n"
    assert "offload" in done.stdout


def test_versions_that_belong_to_the_numbers_are_on_the_machine_line(
    fake: FakeCase, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bench_cli.BenchCase("fake_case", "measure a fake", ("msgspec", "no-such-package"))
    monkeypatch.setattr(bench_cli, "CASES", {"fake": case})
    main(["bench", "fake"])
    machine = json.loads(capsys.readouterr().out.splitlines()[0])["machine"]
    assert machine["msgspec"] == version("msgspec")
    assert "no-such-package" not in machine


# -- bench vllm: what is refused before an engine starts -------------------------------------------


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that `ebbtide bench vllm` finds installed, whatever this environment has."""
    packages: set[str] = set()
    monkeypatch.setattr(
        "ebbtide.bench.vllm_bench.find_spec", lambda name: object() if name in packages else None
    )
    return packages


def test_without_vllm_it_says_which_python_to_take(
    found: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "vllm", "--json"]) == EXIT_USAGE
    shown = capsys.readouterr()
    assert "verdict" not in shown.out
    assert "This Python has no vLLM" in shown.err
    assert ".venv-vllm/bin/ebbtide bench vllm" in shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peer", "lmcache"], "lmcache==0.5.6"),
        (["--model", "no/such/model"], "no directory of a model"),
        (["--dir", "no/such/place"], "no such directory"),
        (["--lengths", "32"], "above 32 tokens"),
        (["--lengths", "long"], "no list of lengths"),
        (["--cases", "miss,hit"], "names other cases"),
        (["--miss-prompts", "0"], "below one"),
    ],
)
def test_wrong_options_of_bench_vllm(
    found: set[str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found.add("vllm")
    assert main(["bench", "vllm", *words]) == EXIT_USAGE
    shown = capsys.readouterr()
    assert "verdict" not in shown.out
    assert said in " ".join(shown.err.split())
