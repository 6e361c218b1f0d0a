"""Real stores and real engines, each a process of its own; all are gone when a test ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.process import start_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS = Path(__file__).resolve().parent / "programs"
PATIENCE_S = 30.0


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


class Engine:
    """A process that runs `programs/engine.py`."""

    def __init__(self, socket_path: str, engine: bytes, model: str = "m") -> None:
        program = [sys.executable, "-P", str(PROGRAMS / "engine.py"), socket_path, engine.hex()]
        program.append(model)
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.answer() == "ready"

    def send(self, command: str) -> None:
        """Give a command without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next answer."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the engine does not answer"
        return self.process.stdout.readline().strip()

    def do(self, command: str) -> str:
        """Give a command and wait for its answer."""
        self.send(command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, whatever its state, and collect it."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class House:
    """A directory with a socket and a disk tier, and whoever lives there during one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = str(directory / "s")
        self.store: subprocess.Popen[bytes] | None = None  # the one that a module shares
        self.stores: list[subprocess.Popen[bytes]] = []
        self._engines: list[Engine] = []
        self._clients: list[SocketClient] = []

    def settings(self, *, disk: bool = False, memory: str = "16MiB") -> dict[str, Any]:
        """A small store's configuration."""
        found: dict[str, Any] = {"socket": self.socket, "memory": {"capacity": memory}}
        if disk:
            found["disk"] = {"path": str(self.directory / "disk"), "capacity": "64MiB"}
        return found

    def start(
        self,
        *,
        disk: bool | dict[str, Any] = False,
        private: bool = False,
        memory: str = "16MiB",
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a store. `disk`: the usual one, or one of these settings."""
        settings = {**self.settings(disk=bool(disk), memory=memory), **more}
        if isinstance(disk, dict):
            settings["disk"] = disk
        return self.adopt(start_store(settings, private=private, log_path=str(self.log)))

    def adopt(self, store: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """See to it that a store ends with the test."""
        self.stores.append(store)
        return store

    def engine(self, engine: bytes | None = None, *, model: str = "m") -> Engine:
        """Start an engine's worker process."""
        found = Engine(self.socket, engine or os.urandom(16), model)
        self._engines.append(found)
        return found

    def client(self, engine: bytes | None = None, *, arena: bool = False) -> SocketClient:
        """Connect this process. With an arena it counts as an engine until pytest ends."""
        found = SocketClient(self.socket, engine or os.urandom(16), "tool", arena=arena)
        self._clients.append(found)
        return found

    def stats(self) -> dict[str, Any]:
        """The numbers of the store that answers now."""
        with contextlib.closing(SocketClient(self.socket, bytes(16), "tool", arena=False)) as tool:
            report = ask(tool, wire.Stats())
        assert isinstance(report, wire.Report)
        return report.report

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def log_text(self) -> str:
        """What the stores have written to their standard error."""
        return self.log.read_text() if self.log.exists() else ""

    def close(self) -> None:
        """End everything."""
        for client in self._clients:
            client.close()
        for engine in self._engines:
            engine.end()
        for store in self.stores:
            if store.poll() is None:
                store.send_signal(signal.SIGCONT)
                store.kill()
            store.wait(PATIENCE_S)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """An empty house. A fault that a store logs fails the test."""
    found = House(tmp_path)
    yield found
    found.close()
    assert "Traceback" not in found.log_text(), found.log_text()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house whose store serves all tests of a module: memory only, shared."""
    found = House(tmp_path_factory.mktemp("lasting"))
    found.store = found.start()
    yield found
    found.close()
    assert "Traceback" not in found.log_text(), found.log_text()


@pytest.fixture
def shared(lasting: House) -> Iterator[House]:
    """A test's own engines and clients on the module's store, which must survive them."""
    found = House(lasting.directory)
    found.store = lasting.store
    yield found
    found.close()
    assert lasting.store is not None
    assert lasting.store.poll() is None
