"""Each leak check turns a leaking test red, and names what leaked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

LEAKY = """
import asyncio, os, subprocess, threading
from pathlib import Path

kept = []

def test_descriptor():
    kept.append(os.open(__file__, os.O_RDONLY))

def test_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="plain-thread")
    thread.start()
    kept.append((stop, thread))

def test_daemon_thread():
    threading.Thread(target=threading.Event().wait, name="ebbtide-io", daemon=True).start()

def test_child():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_zombie():
    process = subprocess.Popen(["true"])
    kept.append(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

def test_shared_memory():
    path = Path("/dev/shm/ebbtide-leak-check-%d" % os.getpid())
    path.touch()
    kept.append(path)

async def test_task():
    kept.append(asyncio.create_task(asyncio.sleep(60), name="endless"))

async def test_task_that_ends():
    kept.append(asyncio.create_task(asyncio.sleep(0.05)))

def test_clean():
    with open(__file__):
        pass
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=lambda: None)
    thread.start()

def test_tidy_up():
    for thing in kept:
        if isinstance(thing, Path):
            thing.unlink()
        elif isinstance(thing, tuple):
            thing[0].set()
            thing[1].join()
        elif isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what pytest says about the leaky tests, run with this repository's conftest."""
    root = tmp_path_factory.mktemp("leaky")
    (root / "tests").mkdir()
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(TESTS / name, root / "tests" / name)
    # These leaks last, so a shorter grace changes nothing but the time this takes.
    checks = (TESTS / "leaks.py").read_text().replace("GRACE_S = 1.0", "GRACE_S = 0.2")
    (root / "tests" / "leaks.py").write_text(checks)
    (root / "tests" / "test_leaky.py").write_text(LEAKY)
    (root / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:cacheprovider\nasyncio_mode = auto\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    # Options meant for the outer run must not reach the inner one.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-rA", "--import-mode=importlib"],
        cwd=root,
        env={**inherited, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("test_descriptor", r"descriptors: \S*test_leaky\.py"),
        ("test_thread", r"threads: plain-thread"),
        ("test_daemon_thread", r"threads: ebbtide-io"),
        ("test_child", r"children: sleep 60"),
        ("test_zombie", r"children: \(ended, but nobody waited for it\)"),
        ("test_shared_memory", r"shared_memory: /dev/shm/ebbtide-leak-check-\d+"),
        ("test_task", r"task: endless"),
    ],
)
def test_a_leak_fails_its_test_and_is_named(report: str, test: str, named: str) -> None:
    line = re.search(rf"^ERROR \S+::{test} - (.*)$", report, re.MULTILINE)
    assert line, report
    assert re.search(named, line[1]), line[0]


@pytest.mark.parametrize("test", ["test_clean", "test_task_that_ends", "test_tidy_up"])
def test_what_ends_is_no_leak(report: str, test: str) -> None:
    assert not re.search(rf"^ERROR \S+::{test}\b(?!_)", report, re.MULTILINE), report
    assert re.search(rf"^PASSED \S+::{test}$", report, re.MULTILINE), report
