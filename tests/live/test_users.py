"""Who may be at the other end of the socket: real processes of other users."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S, PROGRAMS, House, eventually

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient
from ebbtide.connectors.endpoint import answers
from ebbtide.connectors.owner import OwnerClient
from ebbtide.connectors.process import start_store
from ebbtide.errors import ConfigError, TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="NO ROOT: only root can become another user to try"
    ),
]

STORE_UID, ENGINE_UID, STRANGER_UID = 65_534, 54_321, 54_322


@pytest.fixture
def house() -> Iterator[House]:
    """A house to which every user may walk: pytest closes its own directories."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-users-", dir="/tmp") as directory:
        os.chmod(directory, 0o711)
        found = House(Path(directory))
        yield found
        found.close()
        assert "Traceback" not in found.log_text(), found.log_text()


def as_user(uid: int, *words: str) -> str:
    command = [sys.executable, "-P", str(PROGRAMS / "as_user.py"), str(uid), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_p80_another_user_is_told_why_and_turned_away_before_its_first_word(house: House) -> None:
    house.start(server={"allow_uids": [ENGINE_UID]})
    os.chmod(house.socket, 0o666)  # even then
    found = wire.Decoder().feed(bytes.fromhex(as_user(STRANGER_UID, "raw", house.socket)))
    ((ticket, failure),) = found
    assert ticket == 0
    assert isinstance(failure, wire.Failure)
    assert failure.error == "AccessDeniedError"
    assert f"Add {STRANGER_UID} to [server] allow_uids" in failure.next_step
    assert "does not serve this user" in as_user(STRANGER_UID, "engine", house.socket, "0")
    assert "does not serve this user" in house.log_text()
    assert as_user(ENGINE_UID, "engine", house.socket, "0") == "0 records"
    assert as_user(0, "engine", house.socket, "0") == "0 records"


def test_a_closed_socket_keeps_everybody_out_whom_the_list_would_let_in(house: House) -> None:
    house.start(server={"allow_uids": [ENGINE_UID]})
    assert stat.S_IMODE(os.stat(house.socket).st_mode) == 0o600
    assert "Permission denied" in as_user(ENGINE_UID, "engine", house.socket, "0")
    assert "server.allow_uids lets nobody in" in house.log_text()


def test_a_store_and_an_engine_of_two_users_meet_in_a_group(house: House) -> None:
    place = house.directory / "run"
    place.mkdir()
    os.chown(place, STORE_UID, STORE_UID)
    house.socket = str(place / "ebbtide" / "s")
    settings = {
        **house.settings(),
        "server": {"allow_uids": [ENGINE_UID], "socket_group": str(STORE_UID)},
    }
    command = [sys.executable, "-P", str(PROGRAMS / "as_user.py"), str(STORE_UID), "store"]
    with house.log.open("ab") as log:
        store = subprocess.Popen([*command, "--extra", json.dumps(settings)], stderr=log)
    house.adopt(store)
    eventually(lambda: answers(house.socket))
    for path, mode in ((place / "ebbtide", 0o750), (place / "ebbtide" / "s", 0o660)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_gid == STORE_UID
    assert stat.S_IMODE((place / "ebbtide" / "s.lock").stat().st_mode) == 0o600
    assert "Permission denied" in as_user(ENGINE_UID, "engine", house.socket, str(STORE_UID))

    os.chown(place / "ebbtide", -1, ENGINE_UID)  # as if the engine were in the group
    os.chown(house.socket, -1, ENGINE_UID)
    assert as_user(ENGINE_UID, "engine", house.socket, str(STORE_UID)) == "0 records"
    assert "not in [server] allow_uids" in as_user(ENGINE_UID, "engine", house.socket, "1")
    with pytest.raises(TierUnavailableError, match=f"of another user .{STORE_UID}."):
        house.client()  # root does not trust whoever listens there, either
    SocketClient(house.socket, bytes(16), "tool", arena=True, allow_uids=[STORE_UID]).close()
    with OwnerClient(house.socket) as owner:  # a command that names the socket means its owner
        assert owner.survey()["namespaces"]


def test_a_group_that_the_store_cannot_give_is_refused(house: House) -> None:
    with pytest.raises(ConfigError, match="no such group"):
        start_store({**house.settings(), "server": {"socket_group": "nobody-at-all"}})
    os.chown(house.directory, STORE_UID, STORE_UID)
    settings = {**house.settings(), "server": {"socket_group": str(ENGINE_UID)}}
    command = [sys.executable, "-P", str(PROGRAMS / "as_user.py"), str(STORE_UID), "store"]
    command += ["--extra", json.dumps(settings)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert "Make this user a member" in ended.stderr


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o700, False), (0o755, False), (0o775, True), (0o777, True), (0o1777, False)],
)
def test_a_directory_where_others_could_replace_the_socket_is_refused(
    house: House, mode: int, refused: bool
) -> None:
    place = house.directory / "run"
    place.mkdir()
    place.chmod(mode)
    house.socket = str(place / "s")
    if not refused:
        house.start()
        assert house.client().connected
        assert stat.S_IMODE(place.stat().st_mode) == mode
        return
    with pytest.raises(ConfigError, match="Others may write to the socket's directory"):
        house.start()
    assert not list(place.iterdir())


def test_a_directory_of_a_stranger_is_refused(house: House) -> None:
    place = house.directory / "run"
    place.mkdir()
    place.chmod(0o755)
    assert as_user(STORE_UID, "check", str(place)) == "ok"  # root's
    os.chown(place, STRANGER_UID, -1)
    assert "belongs to another user" in as_user(STORE_UID, "check", str(place))
    assert as_user(STRANGER_UID, "check", str(place)) == "ok"
    assert as_user(0, "check", str(place)) == "ok"  # root may use any
