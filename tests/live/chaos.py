"""A house where everything goes wrong: a store, three engines that serve from it, their ends.

`Chaos` has a method for each thing that can happen. Meanwhile every engine is asked all the time
and every answer compared; whenever all are at rest, nothing is held for anybody.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.controls import TINY, Reference, conversations
from tests.live.answering import HANG_S, Asker, EngineProcess
from tests.live.conftest import eventually

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.owner import reach_running
from ebbtide.connectors.process import start_store
from ebbtide.tiers.fsck import check_directory

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence

    from tests.live.conftest import House

    from ebbtide.connectors.reference import ModelConfig

CATCHES_MAX = 100  # engines stopped until one is in the middle of a copy
ARENAS_MAX = 2  # mapped by an engine: the store's, and that of the last copy
DISK_BYTES = 24 << 20
OTHER = replace(TINY, num_layers=3, num_kv_heads=4, head_dim=64)  # records twelve times as large
MODELS = (TINY, TINY, OTHER)


class Held(NamedTuple):
    """What engines hold of the store's memory."""

    reserved_bytes: int  # being stored
    loads: int


NOTHING = Held(0, 0)


class Chaos:
    """A store, three engines that are asked all the time, and what happens to them."""

    def __init__(self, house: House, draw: Random, *, stopped_s: float) -> None:
        """`stopped_s`: how long a store is stopped."""
        self.house, self.draw = house, draw
        self.stopped_s = stopped_s
        self.did: Counter[str] = Counter()
        self.disk = house.directory / "disk"
        self.settings: dict[str, Any] = {
            "socket": house.socket,
            "memory": {"capacity": "16MiB"},
            "limits": {"store_window": "2MiB"},  # an engine that is stopped leaves room
            "disk": {"path": str(self.disk), "capacity": "24MiB", "write_after": "0s"},
        }
        self._evicted = 0  # from the disk, by the store that lives
        self.store = self._start_store()
        prompts = conversations(1, users=40, turns=2, opening=200)
        right = {model: Reference(model).answers(prompts) for model in set(MODELS)}
        self.askers = [
            Asker(partial(self._start_engine, model), prompts, right[model], Random(draw.random()))
            for model in MODELS
        ]
        self._serving: list[Future[None]] = []
        self._wanted = cycle(Held._fields)  # under way when the next thing happens

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Everybody asks meanwhile."""
        with ThreadPoolExecutor(len(self.askers)) as threads:
            try:
                self._serving = [threads.submit(asker.serve) for asker in self.askers]
                yield
            finally:
                for asker in self.askers:
                    asker.leave()
                    asker.go_on()
        self.check()

    def check(self) -> None:
        """Raise what an asker has found."""
        for serving in self._serving:
            if serving.done():
                serving.result()

    def close(self) -> None:
        for asker in self.askers:
            asker.engine.end()

    # -- what happens ---------------------------------------------------------------------------

    def kill_store(self) -> None:
        self._cut(self._catch())
        self._replace_store()

    def kill_engine(self) -> None:
        """Whichever: what was under way may have been another one's."""
        self._eventually(lambda: any(asker.is_up for asker in self.askers))
        self._cut(self._catch())
        self.draw.choice([asker for asker in self.askers if asker.is_up]).kill()
        self.did["engines killed"] += 1

    def stop_store(self) -> None:
        """All engines serve on without it; then one is killed, and comes back to a stopped one."""
        self._await_all()
        self._cut(self._catch())
        self.store.send_signal(signal.SIGSTOP)
        until = time.monotonic() + self.stopped_s
        self._await_answers()
        self.draw.choice(self.askers).kill()
        self.did["engines killed"] += 1
        self._await_answers()
        time.sleep(max(0.0, until - time.monotonic()))
        self.store.send_signal(signal.SIGCONT)
        self.did["stores stopped"] += 1
        for _ in range(2):  # what was granted too late goes back with an engine's next steps
            self._await_answers()

    def stop_engine(self, then: str) -> None:
        """In the middle of a copy. What it holds stays its own while the others fill the tiers."""
        asker, held = self._stop_in_a_copy()
        self._cut(held)
        others = [one for one in self.askers if one is not asker]
        time.sleep(self.draw.uniform(0.2, 0.8))
        with self._at_rest(others):
            now = self._held()
            assert now.reserved_bytes == held.reserved_bytes
            assert now.loads <= held.loads  # one that waited for its turn may have failed
        if then == "is killed":
            asker.kill()
            self.did["engines killed"] += 1
        elif then == "finds another store":
            self._replace_store()
        if then != "is killed":
            asker.go_on()
        self.did["engines stopped"] += 1
        self.quiet()

    def vanish(self) -> None:
        """A client takes slots and goes away in the middle of a COMMIT."""
        keys = tuple(self.draw.randbytes(36) for _ in range(8))
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(self.house.socket)
            peer.settimeout(HANG_S)
            peer.sendall(
                wire.encode(0, wire.Hello(self.draw.randbytes(16), "tool", False))
                + wire.encode(1, wire.OpenNamespace([["model", "vanishing"]]))
            )
            decoder = wire.Decoder()
            opened = _next(peer, decoder, wire.NamespaceOpened)
            peer.sendall(wire.encode(2, wire.Reserve(opened.namespace, 8192, keys)))
            granted = [slot[1] for slot in _next(peer, decoder, wire.Grants).grants if slot[1]]
            frame = wire.encode(3, wire.Commit((*granted, 0)))
            peer.sendall(frame[: self.draw.randrange(1, len(frame))])
        self.did["slots of vanished clients"] += len(granted)
        self.quiet()

    def quiet(self) -> None:
        """Nobody asks: nothing is held for anybody, and every record is right."""
        with self._at_rest(self.askers):
            self._eventually(lambda: self._held() == NOTHING)
            self._eventually(lambda: not self._stats()["memory"]["pinned_bytes"])  # written
            with reach_running(self.house.socket) as owner:
                report = owner.check(lambda done, of: None)
            assert report.is_sound, report
            self._eventually(lambda: self._watched() <= len(self.askers))
            for asker in self.askers:
                assert _arenas_of(asker.engine) <= ARENAS_MAX
        self.did["times quiet"] += 1

    # -- inside ---------------------------------------------------------------------------------

    def _start_store(self) -> subprocess.Popen[bytes]:
        log = str(self.house.log)
        return self.house.adopt(start_store(self.settings, private=False, log_path=log))

    def _start_engine(self, model: ModelConfig) -> EngineProcess:
        return EngineProcess(
            {"socket": self.house.socket},
            model=model,
            blocks=100,
            store="optional",
            lookup_timeout_s=0.05,
            load_timeout_s=0.3,
            log=self.house.directory / "engines.log",
        )

    def _replace_store(self) -> None:
        """Kill it, look at what it left, and start another one."""
        self.store.kill()
        self.store.wait(HANG_S)
        report = check_directory(str(self.disk))
        assert report.is_sound, report
        time.sleep(self.draw.choice([0.0, 0.0, 0.2]))
        self.store = self._start_store()
        self._evicted = 0
        self.did["stores killed"] += 1
        self.did["records left by killed stores"] += report.sound

    def _stats(self) -> dict[str, Any]:
        """Of a store that is well."""
        stats = self.house.stats()
        assert stats["memory"]["used_bytes"] <= stats["memory"]["capacity_bytes"]
        assert stats["disk"]["used_bytes"] <= stats["disk"]["capacity_bytes"]
        assert stats["disk"]["corrupt"] == stats["counts"].get("memory_corrupt", 0) == 0
        assert not stats["disk"]["down"]
        assert not stats["counts"].get("faults")
        self.did["records evicted from disk"] += stats["disk"]["evicted"] - self._evicted
        self._evicted = stats["disk"]["evicted"]
        return stats

    def _watched(self) -> int:
        """Processes that the store watches because they map its arena."""
        watched = 0
        for file in Path(f"/proc/{self.store.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                watched += os.readlink(file) == "anon_inode:[pidfd]"
        return watched

    def _held(self) -> Held:
        stats = self._stats()
        return Held(stats["memory"]["reserved_bytes"], stats["loads"])

    def _catch(self) -> Held:
        """Return right behind a look at the store that has found copies under way: these."""
        wanted = next(self._wanted)
        held: list[Held] = []

        def under_way() -> int:
            held.append(self._held())
            found: int = getattr(held[-1], wanted)
            return found

        self._eventually(under_way)
        return held[-1]

    def _cut(self, held: Held) -> None:
        self.did["times during stores"] += held.reserved_bytes > 0
        self.did["times during loads"] += held.loads > 0

    def _await_answers(self) -> None:
        """From every engine."""
        before = [asker.requests for asker in self.askers]
        self._eventually(
            lambda: all(one.requests > n for one, n in zip(self.askers, before, strict=True))
        )

    def _eventually(self, condition: Callable[[], object]) -> None:
        def met() -> object:
            self.check()
            return condition()

        eventually(met, HANG_S)

    def _await_all(self) -> None:
        self._eventually(lambda: all(asker.is_up for asker in self.askers))

    @contextmanager
    def _at_rest(self, askers: Sequence[Asker]) -> Iterator[None]:
        """These ask nothing meanwhile, and have nothing under way."""
        for asker in askers:
            asker.rest()
        self._eventually(lambda: all(asker.is_at_rest for asker in askers))
        yield
        for asker in askers:
            asker.resume()

    def _stop_in_a_copy(self) -> tuple[Asker, Held]:
        """An engine that was stopped while it held slots, and what they are."""
        self._await_all()
        for _ in range(CATCHES_MAX):
            asker = self.draw.choice(self.askers)
            self._catch()
            asker.stop()
            with self._at_rest([one for one in self.askers if one is not asker]):
                held = self._held()
            if held != NOTHING:
                return asker, held
            asker.go_on()
        raise AssertionError("no engine was stopped in the middle of a copy")


def _next(peer: socket.socket, decoder: wire.Decoder, kind: type[Any]) -> Any:
    """The next message of a kind."""
    while data := peer.recv(1 << 16):
        for _, message in decoder.feed(data):
            if isinstance(message, kind):
                return message
    raise AssertionError("the store closed the connection")


def _arenas_of(engine: EngineProcess) -> int:
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "memfd:" in line})  # the inode
