"""What can happen to a host, in a random order, while three engines serve from one store.

The store and the engines are killed, and stopped, while copies are under way; a client vanishes in
the middle of a frame. Every answer is compared with the one of no cache, all the time. Whenever
nobody asks, the store holds nothing for anybody, and what is on its disk is what was stored there.

`EBBTIDE_TEST_CHAOS_KILLS=50` kills that many stores and that many engines,
`EBBTIDE_TEST_CHAOS_STOPPED_S=10` stops a store for so long, `EBBTIDE_TEST_CHAOS_SEED` draws another
run. What is drawn follows from the seed; when the machine lets it happen does not.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.live.answering import HANG_S
from tests.live.chaos import DISK_BYTES, Chaos
from tests.live.test_commands_live import command
from tests.live.test_disk_bound import Watch

from ebbtide.config import load_config
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.live.conftest import House

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

SEED = int(os.environ.get("EBBTIDE_TEST_CHAOS_SEED", "1"))
KILLS = int(os.environ.get("EBBTIDE_TEST_CHAOS_KILLS", "2"))  # of stores, and of engines
STOPPED_S = float(os.environ.get("EBBTIDE_TEST_CHAOS_STOPPED_S", "1"))
ROUNDS = max(1, KILLS // 10)  # of what is no mere kill
QUIET_EVERY = 8  # steps
Step = tuple[str, ...]  # a method of `Chaos` and its arguments
STEPS: tuple[Step, ...] = (
    *[("kill_store",)] * (KILLS - ROUNDS),
    *[("kill_engine",)] * (KILLS - 2 * ROUNDS),
    *[
        ("stop_store",),  # kills an engine
        ("stop_engine", "is killed"),
        ("stop_engine", "goes on"),
        ("stop_engine", "finds another store"),  # kills the store
        ("vanish",),
    ]
    * ROUNDS,
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of every process that starts."""
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setenv("TMPDIR", str(found))
    return found


@pytest.mark.timeout(300 + 40 * KILLS + 6 * STOPPED_S * ROUNDS)
def test_engines_serve_right_whatever_happens(house: House, temporary: Path) -> None:
    draw = Random(SEED)
    with closing(Chaos(house, draw, stopped_s=STOPPED_S)) as chaos:
        steps = draw.sample(STEPS, len(STEPS))
        watch = Watch(chaos.disk)
        with watch.watching(), chaos.serving():
            for number, step in enumerate(steps, 1):
                with _told(f"seed {SEED}, {KILLS} kills, step {number}: {' '.join(step)}"):
                    getattr(chaos, step[0])(*step[1:])
                    if number % QUIET_EVERY == 0 or number == len(steps):
                        chaos.quiet()
        _sum_up(chaos, watch)
        for asker in chaos.askers:
            assert asker.engine.finish() == 0
        chaos.store.terminate()
        assert chaos.store.wait(HANG_S) == 0
        _nothing_is_left(chaos, temporary)


@contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(where)
        raise


def _sum_up(chaos: Chaos, watch: Watch) -> None:
    """One line of figures. A run that has cut nothing, or restored nothing, says nothing."""
    did, askers = chaos.did, chaos.askers
    requests = sum(asker.requests for asker in askers)
    restored = sum(asker.restored_tokens for asker in askers)
    misses = sum((asker.misses for asker in askers), Counter[str]())
    faults = sum(asker.engine.faults for asker in askers)  # none, or its answer had failed the test
    longest_s = max(asker.longest_s for asker in askers)
    events = ", ".join(f"{count} {what}" for what, count in sorted(did.items()))
    lost = {reason: misses[reason] for reason in ("unknown", "timeout", "io_error", "corrupt")}
    print(  # noqa: T201  # shown with -s
        f"seed {SEED}: {events}; {requests} requests right, {restored} tokens restored,"
        f" {faults} faults of hooks, blocks missed for {lost},"
        f" disk {watch.most} of {DISK_BYTES} bytes, longest answer {longest_s:.2f} s"
    )
    assert min(did["times during loads"], did["times during stores"]) >= KILLS / 4
    assert restored > 500 * KILLS
    assert did["records evicted from disk"] > 0
    assert lost["unknown"] > 0
    assert lost["corrupt"] == 0
    assert DISK_BYTES / 2 < watch.most <= DISK_BYTES


def _nothing_is_left(chaos: Chaos, temporary: Path) -> None:
    """No process, no file that is not the disk tier's, and a directory that agrees with itself."""
    socket_path = chaos.house.socket.encode()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert socket_path not in place.read_bytes(), place
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    assert not list(temporary.iterdir())
    assert not Path(chaos.house.socket).exists()
    engines_said = (chaos.house.directory / "engines.log").read_text()
    assert "Traceback" not in engines_said, engines_said
    checked = command("fsck", str(chaos.disk))
    assert checked.returncode == 0, checked.stdout
    runtime = ThreadRuntime()
    opened = OpenStore(load_config(chaos.settings).config, runtime)
    try:
        opened.store.check_integrity()
    finally:
        runtime.close()
        opened.close(clean=True)
