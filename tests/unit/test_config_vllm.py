"""`ebbtide config vllm`: one line that vLLM's flag takes, and the same refusals as everywhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide import cli
from ebbtide.config import load_config
from ebbtide.sizes import GIB

if TYPE_CHECKING:
    from pathlib import Path

CODE = "import sys; from ebbtide.cli import main; sys.exit(main())"
DISK = ("--disk", "200GiB", "--dir", "/var/cache/ebbtide")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without the configuration of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("EBBTIDE_"):
            monkeypatch.delenv(name)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return what the verb prints, which has to be one line of JSON and nothing else."""
    assert cli.main(["config", "vllm", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert out.endswith("\n")
    tree: dict[str, Any] = json.loads(out)
    return tree


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line with which the verb refuses these options."""
    assert cli.main(["config", "vllm", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_memory_alone_is_a_whole_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--memory", "16GiB") == {
        "kv_connector": "EbbtideConnector",
        "kv_connector_module_path": "ebbtide.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"memory": {"capacity": "16GiB"}},
    }


def test_every_option_arrives_as_the_loader_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DISK, "--socket", "/run/e.sock", "--role", "kv_consumer"]
    for setting in (
        "connector.stores=lazy",
        "connector.always_load=true",
        "connector.compute_margin_ratio=0.5",
        "connector.load_timeout=3s",
        "connector.weights_revision=r=7",
        "limits.connections_max=9",
        "disk.read_threads=2",
    ):
        words += ["--set", setting]
    tree = printed(capsys, "--memory", "16GiB", *words)
    assert tree["kv_role"] == "kv_consumer"
    config = load_config(tree["kv_connector_extra_config"], {}).config
    assert config.memory.capacity_bytes == 16 * GIB
    assert config.disk is not None
    assert (config.disk.path, config.disk.capacity_bytes) == ("/var/cache/ebbtide", 200 * GIB)
    assert config.disk.read_threads == 2
    assert config.socket == "/run/e.sock"
    assert config.connector.stores == "lazy"
    assert config.connector.always_load is True
    assert config.connector.compute_margin_ratio == 0.5
    assert config.connector.load_timeout_s == 3.0
    assert config.connector.weights_revision == "r=7"
    assert config.limits.connections_max == 9


def test_paths_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = ["--memory", "1MiB", "--disk", "16MiB", "--dir=~/c", "--socket", "run/../s"]
    extra = printed(capsys, *words)["kv_connector_extra_config"]
    assert extra["disk"]["path"] == str(tmp_path / "home" / "c")
    assert extra["socket"] == str(tmp_path / "s")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--memory", "16"], "memory.capacity: size '16' has no unit"),
        (["--memory", "16GiB", "--disk", "200", "--dir", "/c"], "disk.capacity: size '200' has no"),
        (["--memory", "16GiB", "--disk", "200GiB"], "--disk is given without --dir"),
        (["--memory", "16GiB", "--dir", "/c"], "--dir is given without --disk"),
        (["--memory", "16GiB", "--disk", "1MiB", "--dir", "/c"], "the least that works is 16MiB"),
        (["--memory", "16GiB", "--disk", "16MiB", "--dir", ""], "--dir is empty"),
        (["--memory", "16GiB", "--socket", ""], "--socket is empty"),
        (["--memory", "16GiB", "--socket", "/" + "s" * 107], "Linux allows 107"),
        (["--memory", "16GiB", "--set", "connector.stores"], "has no value"),
        (["--memory", "16GiB", "--set", "connector.store=lazy"], "Did you mean 'connector.stores'"),
        (["--memory", "16GiB", "--set", "connector.stores=late"], "unknown value 'late'"),
        (["--memory", "16GiB", "--set", "connector.always_load=so"], "Expected `bool`"),
        (["--memory", "16GiB", "--set", "connector.store_budget=5"], "size '5' has no unit"),
        (["--memory", "16GiB", "--set", "connector.compute_margin_ratio=nan"], "Expected `float`"),
        (["--memory", "16GiB", "--set", "memory.capacity=1GiB"], "memory.capacity is given twice"),
        (["--memory", "16GiB", "--set", "disk=x"], "disk is not a table"),
        (["--memory", "16GiB", "--set", "disk.path=/c"], "disk.capacity is not set"),
        (["--memory", "16GiB", "--set", "=1"], "unknown key ''"),
        (["--memory", "16GiB", "--role", "kv_all"], "invalid choice: 'kv_all'"),
        (DISK, "the following arguments are required: --memory"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_printed(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refusal(capsys, *words)


def test_a_setting_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--set", "connector.stores=lazy", "--set", "connector.stores=eager"]
    assert "connector.stores is given twice" in refusal(capsys, "--memory", "1GiB", *twice)


def test_the_environment_that_vllm_will_start_with_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EBBTIDE_MEMORY__LOAD_WINDOW", "2GiB")
    assert "memory.load_window is 2GiB" in refusal(capsys, "--memory", "1GiB")
    assert printed(capsys, "--memory", "4GiB")["kv_connector_extra_config"] == {
        "memory": {"capacity": "4GiB"}
    }


@pytest.mark.parametrize("name", ["a b", "q\"uo'te", "$HOME `id` \\n", "new\nline", "ümlaut"])
def test_a_shell_passes_it_on_unchanged(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    script = (
        'printf %s "$("$PYTHON" -P -c "$CODE" config vllm --memory 1MiB --disk 16MiB --dir "$DIR")"'
    )
    environ = {**os.environ, "PYTHON": sys.executable, "CODE": CODE, "DIR": path}
    done = subprocess.run(
        ["sh", "-c", script], env=environ, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra["disk"]["path"] == path


def test_the_second_flag_is_named_on_a_terminal_only() -> None:
    words = [sys.executable, "-P", "-c", CODE, "config", "vllm", "--memory", "1MiB"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            words, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=30, check=True
        )
        assert json.loads(os.read(ours, 65536))["kv_role"] == "kv_both"
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.stderr == "Give vLLM also: --prefix-caching-hash-algo sha256_cbor\n"


def test_it_imports_neither_torch_nor_vllm_nor_numpy() -> None:
    code = (
        "import sys; from ebbtide.cli import main;"
        "main(['config', 'vllm', '--memory', '1MiB']);"
        "print(sorted({'torch', 'vllm', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == "[]\n"
