"""What a store in trouble may cost: time and hits, never a token, a request or the engine.

Each test has an engine in the test's process on a store in another one, does something to that
store and asks on. At its end the engine has answered everything as vLLM without a cache does, has
named a reason for every miss, and restores again once the store is well.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.copies import HeldLoads
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import prompt, tokens_of
from tests.engine.servers import SharedStore, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.counters import Counters
    from tests.engine.models import Models
    from tests.engine.prompts import Prompt

    Right = dict[Prompt, tuple[int, ...]]
    Shake = Callable[..., AbstractContextManager["Shaken"]]

USERS = [prompt(seed) for seed in range(3)]
OTHERS = [prompt(seed) for seed in (1001, 1002)]  # enough to push a user off the device
STOPPED_S = float(os.environ.get("EBBTIDE_TEST_STOPPED_S", "10"))
RECORD_BYTES = 128 << 10  # of the Llama
SMALL_FILES_BYTES = 64 << 10
PATIENCE_S = 30.0


class Shaken:
    """An engine on a store of its own, and the answers that it has to give whatever happens."""

    def __init__(self, engine: Engine, store: SharedStore, right: Right) -> None:
        self.engine = engine
        self.store = store
        self.misses: dict[str, int] = {}  # by reason, of the last `ask`
        self.restored: dict[str, int] = {}  # tokens by tier, of the last `ask`
        self._right = right

    def ask(self, prompts: list[Prompt]) -> None:
        """One by one. Every answer is compared and every block accounted for."""
        before = self.engine.counters()
        answers = self.engine.one_by_one(prompts)
        assert tokens_of(answers) == [self._right[one] for one in prompts]
        self.count(before, len(prompts))

    def count(self, before: Counters, requests: int) -> None:
        """What was counted since `before`, which must be whole."""
        counters = self.engine.counters().since(before)
        assert_counters_add_up(counters, requests=requests)
        self.misses = counters.by("ebbtide_miss_blocks_total", "reason")
        tokens = counters.by("ebbtide_hit_tokens_total", "tier")
        self.restored = {tier: n for tier, n in tokens.items() if tier != "device"}

    def again_well(self) -> None:
        """The engine finds the store again, stores, and restores."""
        self.engine.ready()
        self.ask(USERS[:1])
        self.empty_device()
        self.ask(USERS[:1])
        assert self.restored, self.misses
        self.empty_device()

    def empty_device(self) -> None:
        """The device forgets; no block may be held when this is asked for."""
        assert self.engine.reset()
        assert self.engine.free_blocks == self.engine.blocks - 1


@pytest.fixture(scope="module")
def right(plain: Plain) -> Right:
    """What vLLM without a connector answers."""
    prompts = [*USERS, *OTHERS]
    return dict(zip(prompts, tokens_of(plain(prompts)), strict=True))


@pytest.fixture
def shake(models: Models, right: Right, tiers: Tiers, tmp_path: Path) -> Shake:
    """Begin with a store of these sizes; at the end everything has to be well again."""

    @contextmanager
    def begin(**sizes: Any) -> Iterator[Shaken]:
        with SharedStore(tmp_path, **sizes) as store:
            transfer = tiers(disk=False, socket=store.socket, load_timeout="2s")
            with Engine(models["llama"], transfer=transfer) as engine:
                found = Shaken(engine, store, right)
                yield found
                found.again_well()

    return begin


def test_reads_that_fail_are_misses(shake: Shake) -> None:
    with shake(memory="16MiB") as found:
        found.ask(USERS)
        found.store.stop()
        found.store.start()  # all of it is on the disk alone
        found.engine.ready()
        os.truncate(found.store.slab, 0)  # every read ends before its end
        found.ask(USERS[:1])
        assert found.misses.get("io_error", 0) > 0, found.misses
        assert not found.restored
        found.ask(USERS[1:])  # what is written meanwhile can be read, and holes hold zeros
        # So many zeros look like a broken drive: out of service for some seconds.
        eventually(lambda: not found.store.stats()["disk"]["down"], PATIENCE_S, "it stays down")
        found.store.stop()
        found.store.start()


def test_records_that_rot_on_the_disk_are_misses(shake: Shake) -> None:
    with shake() as found:
        found.ask(USERS)
        found.store.stop()
        found.store.flip_disk(RECORD_BYTES)
        found.store.start()
        found.engine.ready()
        found.ask(USERS)
        assert found.misses.get("corrupt", 0) > 0, found.misses
        assert not found.restored
        assert found.store.stats()["disk"]["corrupt"] > 0


def test_records_that_rot_in_memory_are_misses(shake: Shake) -> None:
    with shake(disk=None) as found:
        found.ask(USERS)
        found.empty_device()
        found.store.flip_memory(RECORD_BYTES)
        found.ask(USERS)
        assert found.misses.get("corrupt", 0) > 0, found.misses
        assert not found.restored


def test_a_store_killed_during_a_load(
    shake: Shake, right: Right, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shake(memory="16MiB") as found:
        found.ask(USERS[:2])
        found.empty_device()
        before = found.engine.counters()
        held = HeldLoads(monkeypatch)
        found.engine.add("during", USERS[0])
        core = found.engine.llm.llm_engine
        deadline = time.monotonic() + PATIENCE_S
        while not held.begun:
            assert time.monotonic() < deadline, "no load begins"
            core.step()
        found.store.kill()
        held.release()
        answered: list[tuple[int, ...]] = []
        while core.has_unfinished_requests():
            assert time.monotonic() < deadline, "the request never ends"
            done = [output for output in core.step() if output.finished]
            answered += [tuple(output.outputs[0].token_ids) for output in done]
        assert answered == [right[USERS[0]]]
        found.count(before, 1)
        assert {"unknown", "io_error"} & found.misses.keys(), found.misses
        found.empty_device()
        found.ask(USERS[:2])  # nobody answers
        assert found.misses.get("unknown", 0) > 0, found.misses
        assert not found.restored
        found.store.start()


def test_a_disk_that_takes_no_more(shake: Shake) -> None:
    """Writes fail as on a full file system: beyond a size, every one of them."""
    with shake(memory="16MiB") as found:
        found.ask(USERS[:1])
        limits = resource.prlimit(found.store.process.pid, resource.RLIMIT_FSIZE)
        full = (SMALL_FILES_BYTES, limits[1])
        resource.prlimit(found.store.process.pid, resource.RLIMIT_FSIZE, full)
        for _ in range(2):
            found.ask([*USERS, *OTHERS])
        assert found.store.stats()["disk"]["down"]
        assert found.misses.keys() & {"evicted", "never_seen", "io_error"}, found.misses
        resource.prlimit(found.store.process.pid, resource.RLIMIT_FSIZE, limits)
        found.store.kill()
        found.store.start()


def test_tiers_that_are_too_small_for_what_is_asked(shake: Shake) -> None:
    """Each takes over the room of others; whoever comes last is served."""
    with shake(memory="4MiB", disk="16MiB") as found:
        for _ in range(2):
            found.ask([*USERS, *OTHERS])
        assert found.misses.get("evicted", 0) > 0, found.misses
        assert found.store.stats()["disk"]["evicted"] > 0


def test_a_socket_path_that_is_removed(shake: Shake) -> None:
    with shake() as found:
        found.ask(USERS[:1])
        found.empty_device()
        os.unlink(found.store.socket)
        found.ask(USERS[:1])  # the connection needs no path
        assert found.restored
        found.store.kill()
        found.empty_device()
        found.ask(USERS[:1])
        assert found.misses.get("unknown", 0) > 0, found.misses
        assert not found.restored
        found.store.start()


def test_a_store_that_is_stopped_for_a_while(shake: Shake) -> None:
    with shake() as found:
        found.ask(USERS)
        found.store.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        woken = threading.Timer(STOPPED_S, found.store.process.send_signal, (signal.SIGCONT,))
        woken.start()
        answered, reasons = 0, set[str]()
        while time.monotonic() - began < STOPPED_S:
            found.ask([USERS[answered % len(USERS)]])
            reasons |= found.misses.keys()
            answered += woken.is_alive()
        woken.join()
        assert answered >= 2, "nothing was answered while the store stood still"
        assert "timeout" in reasons
