"""`ebbtide serve` as a service: what it says, to whom, how it stops, and what it leaves behind."""

from __future__ import annotations

import configparser
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S, PROGRAMS, eventually

from ebbtide import cli
from ebbtide.connectors import serve
from ebbtide.connectors.endpoint import answers
from ebbtide.connectors.systemd import Notifier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tests.live.conftest import House

pytestmark = pytest.mark.live

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "ebbtide.service"


class Manager:
    """A service manager's socket: what a service tells it, in order."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(PATIENCE_S)

    def told(self) -> list[str]:
        """The assignments of the next datagram."""
        return self._socket.recv(1 << 16).decode().splitlines()

    def is_told_nothing(self) -> bool:
        """No datagram waits."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return not self._socket.recv(1 << 16)
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(house: House) -> Iterator[Manager]:
    found = Manager(str(house.directory / "notify"))
    yield found
    found.close()


def configure(house: House, *, disk: bool = True, more: str = "") -> Path:
    file = house.directory / "store.toml"
    text = f'socket = "{house.socket}"\n[memory]\ncapacity = "16MiB"\n'
    if disk:
        text += f'[disk]\npath = "{house.directory}/disk"\ncapacity = "64MiB"\n'
    file.write_text(text + more)
    return file


def serve_process(house: House, file: Path, *more: str, **environ: str) -> subprocess.Popen[bytes]:
    """`ebbtide serve` with its standard error in the house's log."""
    command = [sys.executable, "-P", "-m", "ebbtide", "serve", "--config", str(file), *more]
    with house.log.open("ab") as log:
        store = subprocess.Popen(command, stderr=log, env={**os.environ, **environ})
    return house.adopt(store)


# -- the service manager --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_manager_is_told_when_it_is_ready_and_when_it_stops(
    house: House, manager: Manager, number: signal.Signals
) -> None:
    file = configure(house, more='[limits]\ndrain_timeout = "20s"\n')
    store = serve_process(house, file, NOTIFY_SOCKET=manager.address)
    ready, status = manager.told()
    assert ready == "READY=1"
    assert house.socket in status
    assert answers(house.socket)
    house.engine().do("put 0 40")
    store.send_signal(number)
    stopping, extend, _ = manager.told()
    assert (stopping, extend) == ("STOPPING=1", "EXTEND_TIMEOUT_USEC=30000000")
    assert store.wait(PATIENCE_S) == 0
    assert manager.is_told_nothing()


def test_an_abstract_address_works_and_children_do_not_get_it(house: House) -> None:
    manager = Manager(f"@ebbtide-{os.getpid()}")
    environ = {"NOTIFY_SOCKET": manager.address}
    notifier = Notifier(environ)
    assert environ == {}
    notifier.tell("READY=1", "STATUS=two\nlines")
    assert manager.told() == ["READY=1", "STATUS=two lines"]
    manager.close()
    notifier.tell("STOPPING=1")  # nobody listens any more: no failure
    Notifier({}).tell("READY=1")


def test_a_manager_reads_why_a_start_was_refused(house: House, manager: Manager) -> None:
    file = configure(house, more="[limits]\ndrain_timout = '3s'\n")
    store = serve_process(house, file, NOTIFY_SOCKET=manager.address)
    assert store.wait(PATIENCE_S) == 2
    (status,) = manager.told()
    assert status.startswith("STATUS=ConfigError")
    assert "Did you mean 'limits.drain_timeout'?" in status
    assert "Did you mean 'limits.drain_timeout'?" in house.log_text()


def test_a_private_store_does_not_speak_for_its_engine(house: House, manager: Manager) -> None:
    file = configure(house)
    serve_process(house, file, "--private", NOTIFY_SOCKET=manager.address)
    eventually(lambda: answers(house.socket))
    house.client().close()  # the last engine has gone
    for store in house.stores:
        assert store.wait(PATIENCE_S) == 0
    assert manager.is_told_nothing()
    assert house.log_text() == ""


def test_the_unit_starts_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]  # names keep their case
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert service["Type"] == "notify"
    program, *words = shlex.split(service["ExecStart"])
    assert os.path.basename(program) == "ebbtide"
    seen: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    monkeypatch.setattr(serve, "run", run)
    assert cli.main(words) == 0
    assert (seen[0].config, seen[0].private) == ("/etc/ebbtide/store.toml", False)
    assert service["RuntimeDirectoryMode"] == service["CacheDirectoryMode"] == "0700"


# -- words ----------------------------------------------------------------------------------------


def test_a_shared_store_says_what_it_serves_and_where_at_any_log_level(house: House) -> None:
    store = serve_process(house, configure(house), EBBTIDE_LOG="error")
    eventually(lambda: "store ready" in house.log_text())
    (line,) = house.log_text().splitlines()
    for word in (house.socket, "memory 16MiB", f"in {house.directory}/disk", "0 records found"):
        assert word in line
    store.terminate()
    assert store.wait(PATIENCE_S) == 0
    lines = house.log_text().splitlines()[1:]
    assert [line.split(":")[1] for line in lines] == [" stopping", " stopped"]


# -- what stays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_p72_nothing_stays_in_shared_memory_or_the_temporary_folder(
    house: House, number: signal.Signals
) -> None:
    folder = house.directory / "tmp"
    folder.mkdir()
    before = set(os.listdir("/dev/shm"))
    store = serve_process(house, configure(house), TMPDIR=str(folder))
    eventually(lambda: answers(house.socket))
    house.engine().do("put 0 20")
    store.send_signal(number)
    assert store.wait(PATIENCE_S) == (-9 if number == signal.SIGKILL else 0)
    assert list(folder.iterdir()) == []
    assert {name for name in set(os.listdir("/dev/shm")) - before if "ebbtide" in name} == set()
    if number != signal.SIGKILL:
        names = {path.name for path in house.directory.iterdir()} - {"log", "store.toml", "tmp"}
        assert names == {"disk", "s.lock"}
    serve_process(house, house.directory / "store.toml")
    how = "not clean" if number == signal.SIGKILL else "clean"
    eventually(lambda: house.log_text().count("store ready") == 2)
    assert f"last stop {how}\n" in house.log_text().split("store ready")[2]


def test_a_stop_that_was_cut_short_leaves_no_clean_mark(house: House) -> None:
    file = configure(house, more='[limits]\ndrain_timeout = "60s"\n')
    program = [sys.executable, "-P", str(PROGRAMS / "stuck_store.py"), "--config", str(file)]
    with house.log.open("ab") as log:
        store = house.adopt(subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log))
    eventually(lambda: answers(house.socket))
    assert house.client().connected
    store.terminate()
    assert store.stdout is not None
    assert store.stdout.readline() == b"draining\n"
    store.stdout.close()
    store.terminate()
    assert store.wait(PATIENCE_S) == 1
    assert not (house.directory / "disk" / "LOCK").read_text().startswith("closed ")
    assert "without having written everything" in house.log_text()
    serve_process(house, file)
    eventually(lambda: "last stop not clean" in house.log_text())
