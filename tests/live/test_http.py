"""The store's HTTP: what it answers, to whom, and that it bothers nobody."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.conftest import PATIENCE_S, PROGRAMS, eventually

from ebbtide import cli
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask
from ebbtide.connectors.endpoint import answers
from ebbtide.connectors.http import listener
from ebbtide.connectors.process import start_store
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.conftest import House

pytestmark = pytest.mark.live

TOKEN = "0123456789abcdef-secret"
ADDRESS = re.compile(r"HTTP http://(\S+?):(\d+),")


def address_of(house: House) -> tuple[str, int]:
    """Where the house's store listens, in its own words."""
    eventually(lambda: ADDRESS.search(house.log_text()))
    host, port = ADDRESS.findall(house.log_text())[-1]
    return host.strip("[]"), int(port)


def get(house: House, path: str, **headers: str) -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection(*address_of(house), timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def token_file(house: House, text: str = TOKEN, mode: int = 0o600) -> str:
    file: Path = house.directory / "token"
    file.write_text(text + "\n")
    file.chmod(mode)
    return str(file)


# -- what it answers ------------------------------------------------------------------------------


def test_probes_and_numbers_on_loopback(house: House) -> None:
    house.start(disk=True, http={"port": 0})
    assert address_of(house)[0] == "127.0.0.1"
    assert get(house, "/livez") == (200, "ok\n")
    status, text = get(house, "/readyz")
    ready = {"ready": True, "stopping": False, "tiers": {"memory": "up", "disk": "up"}}
    assert (status, json.loads(text)) == (200, ready)
    house.engine().do("put 0 3")
    status, text = get(house, "/stats")
    report: dict[str, Any] = json.loads(text)
    assert status == 200
    assert report["memory"]["records"] == 3
    assert report["server"]["requests"]["commit"] == 1
    status, text = get(house, "/metrics")
    assert status == 200
    assert "\nebbtide_store_records_stored_total 3.0\n" in text
    assert get(house, "/")[0] == get(house, "/reset")[0] == 404


def test_p80_nothing_can_be_changed_over_http(house: House) -> None:
    house.start(http={"port": 0})
    for path in ("/livez", "/readyz", "/metrics", "/stats", "/reset", "/pin", "/purge"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            connection = http.client.HTTPConnection(*address_of(house), timeout=PATIENCE_S)
            connection.request(method, path)
            assert connection.getresponse().status in (404, 405)
            connection.close()


def test_a_store_that_stops_is_live_and_not_ready_until_its_drain_ends(house: House) -> None:
    settings = {**house.settings(disk=True), "http": {"port": 0}}
    settings["limits"] = {"drain_timeout": "60s"}
    program = [sys.executable, "-P", str(PROGRAMS / "stuck_store.py")]
    with house.log.open("ab") as log:
        store = subprocess.Popen(
            [*program, "--extra", json.dumps(settings)], stdout=subprocess.PIPE, stderr=log
        )
    house.adopt(store)
    eventually(lambda: answers(house.socket))
    assert get(house, "/readyz")[0] == 200
    store.terminate()
    assert store.stdout is not None
    assert store.stdout.readline() == b"draining\n"
    store.stdout.close()
    time.sleep(0.5)
    assert get(house, "/livez")[0] == 200
    status, text = get(house, "/readyz")
    assert status == 503
    assert json.loads(text)["stopping"]
    begun = time.monotonic()
    store.terminate()
    assert store.wait(PATIENCE_S) == 1
    assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_stores_and_open_connections_keep_nobody(
    house: House, number: signal.Signals
) -> None:
    store = house.start(disk=True, http={"port": 0})
    house.engine().do("put 0 20")
    idle = socket.create_connection(address_of(house))
    begun = time.monotonic()
    store.send_signal(number)
    assert store.wait(PATIENCE_S) == 0
    assert time.monotonic() - begun < 10.0
    idle.close()
    assert "stopped: everything is written" in house.log_text()


# -- who may read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["file", "variable"])
def test_numbers_want_the_token_and_probes_do_not(
    house: House, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    settings: dict[str, Any] = {"port": 0}
    if door == "file":
        settings["token_file"] = token_file(house)
    else:
        monkeypatch.setenv("EBBTIDE_HTTP_TOKEN", TOKEN)
    monkeypatch.setenv("EBBTIDE_LOG", "debug")
    house.start(http=settings)
    for path in ("/metrics", "/stats"):
        assert get(house, path)[0] == 401
        for wrong in ("", TOKEN, f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", "Bearer \xff"):
            assert get(house, path, Authorization=wrong)[0] == 401
        assert get(house, path, Authorization=f"Bearer {TOKEN}")[0] == 200
    assert get(house, "/livez")[0] == get(house, "/readyz")[0] == 200
    assert TOKEN not in house.log_text()


def test_p80_another_machine_may_read_with_a_token_alone(house: House) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="open to other machines without a token"):
            start_store({**house.settings(), "http": {"port": 0, "host": host}})
    house.start(http={"port": 0, "host": "0.0.0.0", "token_file": token_file(house)})
    assert get(house, "/metrics")[0] == 401
    assert get(house, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("short", 0o600, "must have 16 to 4096 characters"),
        ("has a space in the middle", 0o600, "without spaces"),
        ("\N{SNOWMAN}" * 20, 0o600, "cannot be read"),
        (TOKEN, 0o604, "Everybody may read the HTTP token"),
    ],
)
def test_a_token_that_is_none_is_refused_and_not_quoted(
    house: House, text: str, mode: int, words: str
) -> None:
    settings = {"port": 0, "token_file": token_file(house, text, mode)}
    with pytest.raises(ConfigError, match=words) as caught:
        start_store({**house.settings(), "http": settings})
    assert text not in str(caught.value)


def test_two_tokens_no_file_and_a_taken_port_are_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        start_store({**house.settings(), "http": {"port": 0, "token_file": "/nowhere"}})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"port": taken.getsockname()[1]}
        with pytest.raises(ConfigError, match="HTTP address cannot be had"):
            start_store({**house.settings(), "http": settings})
    assert not os.path.exists(house.socket)
    monkeypatch.setenv("EBBTIDE_HTTP_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="Remove one of them"):
        start_store({**house.settings(), "http": {"port": 0, "token_file": token_file(house)}})


def test_a_missing_package_is_named_with_the_line_that_brings_it(house: House) -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from ebbtide.cli import main\n"
        "sys.exit(main(['serve', '--extra', sys.argv[1]]))"
    )
    settings = json.dumps({**house.settings(), "http": {"port": 0}})
    command = [sys.executable, "-P", "-c", program, settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert "needs the package uvicorn. Run: pip install 'ebbtide[http]'" in ended.stderr
    assert not os.path.exists(house.socket)


def test_a_store_without_http_reads_none_of_its_packages() -> None:
    program = (
        "import sys, ebbtide.connectors.serve\n"
        "print({'uvicorn', 'starlette', 'prometheus_client'} & sys.modules.keys())"
    )
    command = [sys.executable, "-P", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_config_check_refuses_what_a_start_would(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    file = house.directory / "store.toml"
    text = '[memory]\ncapacity = "16MiB"\n[http]\nport = 0\n'
    file.write_text(text)
    assert cli.main(["config", "check", str(file)]) == 0
    file.write_text(text + 'host = "0.0.0.0"\n')
    assert cli.main(["config", "check", str(file)]) == 2
    assert "without a token" in capsys.readouterr().err
    file.write_text(text + 'host = "example.org"\n')
    assert cli.main(["config", "check", str(file)]) == 2
    assert "no address" in capsys.readouterr().err
    file.write_text('[memory]\ncapacity = "16MiB"\n[http]\nhost = "127.0.0.1"\n')
    assert cli.main(["config", "check", str(file)]) == 2
    assert "http.port is not set" in capsys.readouterr().err


# -- whoever misbehaves ---------------------------------------------------------------------------


def test_garbage_and_many_connections_bother_no_engine(house: House) -> None:
    store = house.start(http={"port": 0})
    client = house.client()
    for stream in (b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 100_000):
        peer = socket.create_connection(address_of(house), PATIENCE_S)
        with peer, contextlib.suppress(ConnectionError):
            peer.sendall(stream)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass
    held = len(os.listdir(f"/proc/{store.pid}/fd"))
    idle = [socket.create_connection(address_of(house)) for _ in range(100)]
    time.sleep(0.5)
    assert len(os.listdir(f"/proc/{store.pid}/fd")) <= held + listener.CONNECTIONS_MAX
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    for one in idle:
        one.close()
    eventually(lambda: get(house, "/livez") == (200, "ok\n"))
    report = ask(client, wire.Stats())
    assert isinstance(report, wire.Report)
    assert "faults" not in report.report["counts"]
