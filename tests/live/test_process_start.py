"""Starting, refusing, stopping and killing the store's process."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.conftest import PATIENCE_S, PROGRAMS, eventually
from tests.live.programs.engine import RECORD_BYTES

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.endpoint import Endpoint, answers
from ebbtide.connectors.process import ensure_store, start_store
from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.sizes import parse_size

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

RESTARTS = int(os.environ.get("EBBTIDE_TEST_RESTARTS", "20"))


def _held(house: House) -> int:
    opened = ask(house.client(), wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    return opened.records


def _stop(store: subprocess.Popen[bytes]) -> int:
    store.terminate()
    return store.wait(PATIENCE_S)


# -- starting -------------------------------------------------------------------------------------


def test_a_started_store_answers_at_once(house: House) -> None:
    house.start()
    assert house.stats()["memory"]["capacity_bytes"] == 16 << 20


def test_of_two_processes_that_start_a_store_one_does(house: House) -> None:
    program = (
        "import json, sys, time\n"
        "from ebbtide.connectors.process import ensure_store\n"
        "store = ensure_store(json.loads(sys.argv[1]))\n"
        "print(store.pid if store else 'found', flush=True)\n"
        "sys.stdin.read()\n"
        "store and store.terminate()\n"
        "store and store.wait()\n"
    )
    command = [sys.executable, "-P", "-c", program, json.dumps(house.settings())]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    said = [racer.stdout.readline().decode().strip() for racer in racers if racer.stdout]
    assert sorted(word == "found" for word in said) == [False, True, True]
    house.client()
    for racer in racers:
        racer.communicate()


def test_a_private_store_is_found_by_the_next_half_and_started_once(house: House) -> None:
    store = ensure_store(house.settings())
    assert store is not None
    house.adopt(store)
    assert ensure_store(house.settings()) is None


def _too_long(house: House) -> dict[str, Any]:
    return {**house.settings(), "socket": "/" + "s" * 120}


def _unknown_key(house: House) -> dict[str, Any]:
    return {**house.settings(), "memory": {"capacity": "16MiB", "capazity": 1}}


def _not_a_socket(house: House) -> dict[str, Any]:
    Path(house.socket).write_text("precious")
    return house.settings()


def _no_directory(house: House) -> dict[str, Any]:
    return {**house.settings(), "socket": "/proc/nowhere/s"}


def _too_much_memory(house: House) -> dict[str, Any]:
    return house.settings(memory="900TiB")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (_too_long, "107"),
        (_unknown_key, "Did you mean 'memory.capacity'"),
        (_not_a_socket, "no socket"),
        (_no_directory, "cannot be used"),
        (_too_much_memory, "Lower memory.capacity"),
    ],
)
def test_what_the_store_refuses_comes_back_in_its_own_words(
    house: House, bad: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        start_store(bad(house))


def test_a_file_at_the_socket_path_survives_the_refusal(house: House) -> None:
    with pytest.raises(ConfigError):
        start_store(_not_a_socket(house))
    assert Path(house.socket).read_text() == "precious"


def test_a_served_socket_and_an_owned_directory_are_refused(house: House) -> None:
    house.start(disk=True)
    with pytest.raises(ConfigError, match="Another store serves this socket"):
        start_store(house.settings())
    elsewhere = {**house.settings(disk=True), "socket": house.socket + "2"}
    with pytest.raises(ConfigError, match="directory"):
        start_store(elsewhere)
    assert house.client().connected


def test_a_store_that_cannot_be_executed_is_no_configuration_error(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TierUnavailableError, match="did not start"):
        start_store(house.settings())
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(TierUnavailableError, match="could not be started"):
        start_store(house.settings())


def test_serve_reads_its_file_and_answers_and_stops(house: House) -> None:
    config = house.directory / "ebbtide.toml"
    disk = house.directory / "disk"
    config.write_text(
        f'socket = "{house.socket}"\n[memory]\ncapacity = "16MiB"\n'
        f'[disk]\npath = "{disk}"\ncapacity = "64MiB"\n'
    )
    command = [sys.executable, "-P", "-m", "ebbtide", "serve", "--config", str(config)]
    store = subprocess.Popen(
        command, stderr=subprocess.PIPE, env={**os.environ, "EBBTIDE_LOG": "info"}
    )
    house.adopt(store)
    assert store.stderr is not None
    line = store.stderr.readline().decode()
    assert "store ready" in line
    assert str(disk) in line
    assert house.client().connected
    assert _stop(store) == 0
    store.stderr.close()
    assert not os.path.exists(house.socket)


def test_serve_without_a_socket_says_what_to_set(house: House) -> None:
    config = house.directory / "ebbtide.toml"
    config.write_text('[memory]\ncapacity = "16MiB"\n')
    command = [sys.executable, "-P", "-m", "ebbtide", "serve", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert "socket =" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_p70_a_store_that_may_lock_no_memory_starts_and_works(house: House) -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        store = house.start()
        engine = house.engine()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert resource.prlimit(store.pid, resource.RLIMIT_MEMLOCK)[0] == 64 << 10
    assert engine.do("put 0 40") == "40"
    assert engine.do("load 0 40") == "40 0 0"


# -- closed by default ----------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_p80_p81_the_socket_is_private_whatever_the_umask(house: House, umask: int) -> None:
    house.socket = str(house.directory / "new" / "s")
    previous = os.umask(umask)
    try:
        house.start()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(house.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(house.socket)).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(house.socket + ".lock").st_mode) == 0o600


def test_p80_a_store_listens_on_no_network_port(house: House) -> None:
    store = house.start()
    house.client()
    inodes = set()
    for fd in os.listdir(f"/proc/{store.pid}/fd"):
        target = os.readlink(f"/proc/{store.pid}/fd/{fd}")
        inodes |= set(re.findall(r"socket:\[(\d+)\]", target))
    assert inodes
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        path = Path(f"/proc/{store.pid}/net/{table}")
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        assert not inodes & {line.split()[9] for line in lines}


# -- ending ---------------------------------------------------------------------------------------


def test_p64_a_stop_drains_and_the_records_are_found_again(house: House) -> None:
    store = house.start(disk=True)
    engine = house.engine()
    assert engine.do("put 0 40") == "40"
    assert _stop(store) == 0
    assert not os.path.exists(house.socket)
    house.start(disk=True)
    assert _held(house) == 40
    assert house.engine().do("load 0 40") == "40 0 0"


def _stuck(house: House, drain_timeout: str) -> subprocess.Popen[bytes]:
    """A store that has been told to stop and whose drain hangs."""
    settings = {**house.settings(disk=True), "limits": {"drain_timeout": drain_timeout}}
    program = [sys.executable, "-P", str(PROGRAMS / "stuck_store.py")]
    program += ["--extra", json.dumps(settings)]
    with house.log.open("ab") as log:
        store = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log)
    house.adopt(store)
    eventually(lambda: answers(house.socket))
    assert house.client().connected
    store.terminate()
    assert store.stdout is not None
    assert store.stdout.readline() == b"draining\n"
    store.stdout.close()
    return store


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_p78_a_second_signal_ends_a_drain_that_hangs(house: House, number: signal.Signals) -> None:
    store = _stuck(house, "60s")
    time.sleep(0.2)
    assert store.poll() is None
    begun = time.monotonic()
    store.send_signal(number)
    assert store.wait(PATIENCE_S) == 1
    assert time.monotonic() - begun < 1.0
    assert not os.path.exists(house.socket)


def test_p78_a_drain_that_hangs_ends_with_its_timeout(house: House) -> None:
    store = _stuck(house, "200ms")
    begun = time.monotonic()
    assert store.wait(PATIENCE_S) == 1
    assert time.monotonic() - begun < 3.0
    assert "without having written everything" in house.log_text()


def test_p67_p78_a_stop_on_a_slow_disk_ends_in_time_and_says_what_it_lost(house: House) -> None:
    """What was stored first is written first, so that what is kept can be used."""
    settings = {
        **house.settings(disk=True, memory="64MiB"),  # all in one batch of the write queue
        "limits": {"drain_timeout": "1200ms"},
    }
    settings["disk"] |= {"write_threads": 1}
    program = [sys.executable, "-P", str(PROGRAMS / "slow_store.py")]
    with house.log.open("ab") as log:
        store = subprocess.Popen(
            [*program, "--extra", json.dumps(settings)],
            stderr=log,
            env={**os.environ, "EBBTIDE_LOG": "warning"},
        )
    house.adopt(store)
    eventually(lambda: answers(house.socket))
    assert house.engine().do("put 0 60") == "60"
    begun = time.monotonic()
    assert _stop(store) == 1
    assert time.monotonic() - begun < 4.0
    dirty, lost = (
        parse_size(found)
        for found in re.findall(r"(?:stopping|everything): (\S+) (?:that|are)", house.log_text())
    )
    house.start(disk=True)
    kept = _held(house)
    assert 0 < kept < 60
    assert 0 < lost < dirty
    assert lost == pytest.approx((60 - kept) * RECORD_BYTES, rel=0.01)
    assert house.engine().do(f"load 0 {kept}") == f"{kept} 0 0"


def test_p72_a_successor_waits_for_the_drain_of_its_predecessor(house: House) -> None:
    store = house.start(disk=True)
    house.engine().do("put 0 40")
    store.terminate()
    house.start(disk=True)  # at once, same socket, same directory
    assert store.wait(PATIENCE_S) == 0
    assert _held(house) == 40


def test_a_store_waits_for_a_socket_whose_owner_no_longer_answers(house: House) -> None:
    ending = Endpoint(house.socket, 0.0)
    threading.Timer(1.0, ending.close).start()
    begun = time.monotonic()
    house.start()
    assert time.monotonic() - begun > 0.9
    assert house.client().connected


def test_p72_20_kills_hinder_no_start_and_leave_no_shared_memory(house: House) -> None:
    before = set(os.listdir("/dev/shm"))
    for number in range(RESTARTS):
        store = house.start(disk=number % 2 == 0)
        assert house.client(arena=True).connected
        store.kill()
        store.wait(PATIENCE_S)
        assert os.path.exists(house.socket)
    house.start(disk=True)
    assert house.client().connected
    assert {name for name in set(os.listdir("/dev/shm")) - before if "ebbtide" in name} == set()


def test_a_start_that_loses_its_parent_goes_on(house: House) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    command = [sys.executable, "-P", "-m", "ebbtide", "serve", "--extra"]
    command += [json.dumps(house.settings()), "--ready-fd", str(write_fd)]
    with house.log.open("ab") as log:
        house.adopt(subprocess.Popen(command, stderr=log, pass_fds=(write_fd,)))
    os.close(write_fd)
    eventually(lambda: answers(house.socket))
    eventually(lambda: "is gone" in house.log_text())
    assert house.client().connected


def test_a_store_holds_the_same_descriptors_after_many_connections(house: House) -> None:
    store = house.start()

    def held() -> int:
        return len(os.listdir(f"/proc/{store.pid}/fd"))

    house.client(arena=True)
    before = held()
    engine = os.urandom(16)
    for _ in range(30):
        SocketClient(house.socket, engine, "worker", arena=True).close()
    eventually(lambda: held() <= before + 1)  # one pidfd for the one process of this engine


def test_a_client_of_no_store_is_told_so_at_once(house: House) -> None:
    begun = time.monotonic()
    with pytest.raises(TierUnavailableError, match="listens"):
        house.client()
    assert time.monotonic() - begun < 1.0


def test_a_stopped_store_keeps_a_greeting_waiting_no_longer_than_its_bound(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = house.start()
    store.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("ebbtide.connectors.client.HANDSHAKE_TIMEOUT_S", 0.5)
    with pytest.raises(TierUnavailableError, match="No store answers"):
        house.client()
    threading.Timer(0.2, store.send_signal, [signal.SIGCONT]).start()
    monkeypatch.setattr("ebbtide.connectors.client.HANDSHAKE_TIMEOUT_S", 10.0)
    assert house.client().connected
