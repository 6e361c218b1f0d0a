"""A private store that dies is started again by the half that had started it."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import eventually

from ebbtide.connectors import protocol as wire
from ebbtide.connectors import store_keeper
from ebbtide.connectors.client_interface import ask
from ebbtide.connectors.process import ensure_store
from ebbtide.connectors.store_keeper import StoreKeeper

if TYPE_CHECKING:
    from tests.live.conftest import House

    from ebbtide.connectors.client import SocketClient

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keeper, "FIRST_PAUSE_S", 0.05)


def _pid(path: str) -> int | None:
    """The process behind a socket; None while nobody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return None
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], "little")


def test_a_killed_store_is_started_again_and_reached(house: House) -> None:
    settings = house.settings(disk=True)
    process = ensure_store(settings)
    assert process is not None
    keeper = StoreKeeper(process, settings)
    client = house.client(os.urandom(16), arena=True)
    pids = {process.pid}
    try:
        for _ in range(3):
            before = client.incarnation
            killed = _pid(house.socket)
            assert killed in pids
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: _reached_again(client, before), 20.0)  # noqa: B023  # at once
            pid = _pid(house.socket)
            assert pid is not None
            assert pid not in pids
            pids.add(pid)
            assert isinstance(ask(client, wire.Stats()), wire.Report)
    finally:
        keeper.close()
        client.close()
        _end(keeper)


def test_a_keeper_that_was_closed_starts_nothing(house: House) -> None:
    settings = house.settings()
    process = ensure_store(settings)
    assert process is not None
    keeper = StoreKeeper(process, settings)
    keeper.close()
    keeper.close()
    process.kill()
    process.wait()
    assert _pid(house.socket) is None


def test_a_store_that_another_half_restarted_is_left_to_it(house: House) -> None:
    settings = house.settings()
    first = ensure_store(settings)
    assert first is not None
    keeper = StoreKeeper(first, settings)
    first.kill()
    other = None
    while other is None:  # whoever takes the lock first starts it
        other = ensure_store(settings)
        if other is None and _pid(house.socket) is not None:
            break
    eventually(lambda: _pid(house.socket), 20.0)
    keeper.close()
    assert (other is None) == (keeper.process is not None)
    if other is not None:
        other.kill()
        other.wait()
    _end(keeper)


def _reached_again(client: SocketClient, incarnation: int) -> bool:
    client.poll()
    return client.incarnation > incarnation


def _end(keeper: StoreKeeper) -> None:
    if keeper.process is not None:
        keeper.process.kill()
        keeper.process.wait()
