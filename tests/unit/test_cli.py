"""The command line: what it loads, where it writes, and the code with which it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from ebbtide import __version__, cli, config_cli
from ebbtide.config import load_config
from ebbtide.errors import ConfigError, CorruptRecordError, NoSpaceError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

HEAVY = {"torch", "numpy", "rich", "msgspec", "lmdb", "asyncio"}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without the configuration of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("EBBTIDE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a configuration file that every machine can hold."""
    path = tmp_path / "ebbtide.toml"
    path.write_text(
        f'[memory]\ncapacity = "1MiB"\n[disk]\npath = "{tmp_path}/cache"\ncapacity = "16MiB"\n'
    )
    return path


def ebbtide(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    code = "import sys; from ebbtide.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def verb(monkeypatch: pytest.MonkeyPatch, work: Callable[[], int]) -> None:
    """Put a verb `work` into the table."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=1)

    module = SimpleNamespace(add_arguments=add_arguments, run=lambda args: work())
    monkeypatch.setitem(sys.modules, "ebbtide_work", module)
    monkeypatch.setitem(cli.VERBS, "work", cli.Verb("ebbtide_work", "work"))


def fail(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def test_help_is_quick_and_imports_nothing_heavy_and_no_verb() -> None:
    code = (
        "import sys; from ebbtide.cli import VERBS, main; code = main(['--help']);"
        f"heavy = {HEAVY!r} | {{verb.module for verb in VERBS.values()}};"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr); sys.exit(code)"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < 2
    assert done.stderr == "[]\n"
    for name, entry in cli.VERBS.items():
        assert name in done.stdout
        assert entry.purpose in done.stdout


def test_only_the_chosen_verb_is_imported() -> None:
    code = (
        "import sys; from ebbtide.cli import main; main(['config', '--help']);"
        "print('torch' in sys.modules, 'ebbtide.bench.cli' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == "False False\n"
    assert "check" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ebbtide {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [[], ["fly"], ["--fast"], ["config"], ["config", "check"], ["config", "show", "--jso"]],
)
def test_wrong_usage_is_code_2_and_says_so_on_stderr(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: ebbtide" in err


@pytest.mark.parametrize(
    ("work", "code", "line"),
    [
        (lambda: 0, 0, ""),
        (lambda: 1, 1, ""),
        (fail(ConfigError("no", next_step="Do this")), 2, "ebbtide: no. Do this\n"),
        (fail(NoSpaceError("full\nup", free=1)), 1, "ebbtide: full up (free=1)\n"),
        (fail(CorruptRecordError("bad", next_step="Drop it")), 3, "ebbtide: bad. Drop it\n"),
        (fail(KeyboardInterrupt()), 130, ""),
        (
            fail(ModuleNotFoundError("No module", name="uvicorn.config")),
            1,
            "ebbtide: this needs the package uvicorn. Install it: pip install 'ebbtide[http]'\n",
        ),
        (
            fail(ModuleNotFoundError("No module", name="shtab")),
            1,
            "ebbtide: this needs the package shtab. Install it: pip install 'shtab'\n",
        ),
    ],
)
def test_exit_codes_and_one_line_of_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    work: Callable[[], int],
    code: int,
    line: str,
) -> None:
    verb(monkeypatch, work)
    assert cli.main(["work", "--count", "3"]) == code
    assert capsys.readouterr() == ("", line)


def test_a_fault_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, fail(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["work"])


def test_a_verb_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.VERBS, "work", cli.Verb("ebbtide.absent", "work"))
    assert cli.main(["work"]) == 1
    assert "lacks ebbtide.absent" in capsys.readouterr().err


@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_a_reader_that_leaves_ends_it_quietly(file: Path, buffering: list[str]) -> None:
    code = (
        "import sys; from ebbtide.cli import main; sys.stdin.read();"
        f"sys.exit(main(['config', 'show', '--file', {str(file)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", *buffering, "-c", code],
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate("", timeout=30)
    assert (process.returncode, err) == (1, "")


def test_another_broken_pipe_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, fail(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        cli.main(["work"])


def test_a_wrong_log_level_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(monkeypatch, lambda: 0)
    monkeypatch.setenv("EBBTIDE_LOG", "loud")
    assert cli.main(["work"]) == 2
    assert "EBBTIDE_LOG is 'loud'. Use one of debug" in capsys.readouterr().err


def test_logs_go_to_stderr_and_data_to_stdout_without_colour(file: Path) -> None:
    done = ebbtide(
        "config", "show", "--file", str(file), NO_COLOR="1", EBBTIDE_MEMORY__POPULATE="0"
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert "populate = false" in done.stdout
    assert done.stderr == ""
    done = ebbtide("config", "check", str(file), EBBTIDE_MEMORY__CAPACITY="32MiB")
    assert done.stdout == f"{file}: ok\n"
    assert done.stderr.startswith("ebbtide: WARNING: disk.capacity is below memory.capacity")


def test_config_check_accepts_and_refuses(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", str(file)]) == 0
    assert capsys.readouterr() == (f"{file}: ok\n", "")
    file.write_text('[memory]\ncapacity = "4096TiB"\n')
    assert cli.main(["config", "check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ebbtide: memory.capacity is 4096TiB, but ")
    assert cli.main(["config", "check", "--any-machine", str(file)]) == 0
    file.write_text("[memory]\ncapacitty = 1\n")
    assert cli.main(["config", "check", str(file)]) == 2
    assert "Did you mean 'memory.capacity'?" in capsys.readouterr().err


def test_p86_config_show_prints_toml_that_loads_to_the_same(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "show", "--file", str(file)]) == 0
    text = capsys.readouterr().out
    shown = tmp_path / "shown.toml"
    shown.write_text(text)
    assert load_config(None, {}, shown).config == load_config(None, {}, file).config
    assert "# Size of the arena in system RAM, in total and not per rank." in text


def test_config_show_json_is_what_the_engine_passes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "show", "--json", "--file", str(file)]) == 0
    text = capsys.readouterr().out
    assert load_config(text, {}).config == load_config(None, {}, file).config


def test_p86_config_show_says_where_values_came_from(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EBBTIDE_CONFIG", str(file))
    monkeypatch.setenv("EBBTIDE_LIMITS__DRAIN_TIMEOUT", "3s")
    assert cli.main(["config", "show", "--origin"]) == 0
    text = capsys.readouterr().out
    tomllib.loads(text)
    lines = {line.split(" ", 1)[0]: line.split("#")[-1].strip() for line in text.splitlines()}
    assert lines["drain_timeout"] == "environment EBBTIDE_LIMITS__DRAIN_TIMEOUT"
    assert lines["capacity"] == f"file {file}"
    assert lines["lookup_timeout"] == "default"
    assert cli.main(["config", "show", "--origin", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["memory.load_window"]["value"] == "256KiB"
    assert rows["memory.load_window"]["origin"] == "default min(memory.capacity / 4, 256MiB)"
    assert rows["socket"]["value"] is None


def test_quotes_in_a_path_survive(tmp_path: Path) -> None:
    extra = {
        "memory": {"capacity": "1MiB"},
        "disk": {"path": '/a"b\\c\x7fü', "capacity": "16MiB"},
    }
    loaded = load_config(extra, {})
    shown = tmp_path / "shown.toml"
    shown.write_text(config_cli.as_toml(loaded, origin=False), encoding="utf-8")
    assert load_config(None, {}, shown).config == loaded.config
