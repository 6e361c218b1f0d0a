"""A store that runs for long: clients of every kind come, work, vanish and are killed.

Nothing may grow, every number must add up, every byte must be right, and nothing that was reset
comes back. `EBBTIDE_TEST_SOAK_S=600` says for how long, `EBBTIDE_TEST_SOAK_SEED` what happens. The
short form looks at everything but the slope of the store's memory.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.books import assert_adds_up, imbalances
from tests.controls import one_thread
from tests.live.conftest import PATIENCE_S, PROGRAMS, House, eventually
from tests.live.programs.soak_client import COUNTS, KINDS, SPACES, Ledger
from tests.live.soak_rig import Sample, SteadyEngine, slope_mib
from tests.live.test_http import address_of
from tests.live.test_metrics import series_of

import ebbtide
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask
from ebbtide.connectors.owner import OwnerClient
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.runtime import POOL_THREADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ebbtide.connectors.client import SocketClient

pytestmark = [pytest.mark.live, pytest.mark.slow]

SOAK_S = float(os.environ.get("EBBTIDE_TEST_SOAK_S", "5"))
SEED = int(os.environ.get("EBBTIDE_TEST_SOAK_SEED", "1"))
WARM_S = 180.0  # before that, and before its bounded tables are full, a store does grow
GHOSTS, EVENTS = 2000, Bounds.for_capacity(1 << 20).event_entries
SLOPE_MAX_MIB = 1.0  # a minute
SAMPLES_LEAST = 60  # for a slope
FILL_RECORDS = 256
CLIENTS = 4
LOOK_S = 1.0  # between two samples, two scrapes and two looks at the books
TICK_S = 0.02
SLOW_S = 90.0  # that a busy machine gets on top, until everything has happened
# After how much of the clients' work something happens: not by a clock, so that on a busy machine
# there is as much work between two kills. The long form takes its time.
WORK = {"kill": 700, "reset": 1200, "purge": 2000, "kill engine": 100_000}
LONGER = 6
MEMORY = "32MiB"
SETTINGS: dict[str, Any] = {
    "http": {"port": 0},
    "limits": {"ghost_entries": GHOSTS, "store_window": "2MiB"},
    "fairness": {
        "cap": 0.7,
        "namespace": [
            {"match": "model=quiet", "floor": 0.2},
            {"match": "model=wide", "cap": 0.2},
        ],
    },
}
DISK = {"capacity": "64MiB", "write_after": "500ms", "lru_save_interval": "5s"}
NEVER = ("wrong", "stale")
DESCRIPTORS_MAX = 8 * (CLIENTS + 3)  # connections and watched processes of all who come


@dataclass
class Soak:
    """One store, who uses it, who runs it, and what was seen of it."""

    house: House
    store: subprocess.Popen[bytes]
    ledger: Ledger
    engine: SteadyEngine
    operator: SocketClient
    idle: int  # descriptors of the store before anybody else came
    draw: Random = field(default_factory=lambda: Random(SEED))
    clients: list[subprocess.Popen[bytes]] = field(default_factory=list)
    opened: dict[str, wire.NamespaceOpened] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)  # of the latest scrape
    asked: tuple[int, list[str]] = (0, [])  # the ticket of a reset or purge under way, and of what
    full: bool = False  # all tables were, once
    warm_s: float | None = None  # since when the store should not grow
    lacking: list[str] = field(default_factory=lambda: ["everything"])
    kills: int = 0
    resets: int = 0
    purges: int = 0
    scrapes: int = 0
    spawned: int = 0

    def __post_init__(self) -> None:
        """Open all namespaces."""
        for space in SPACES:
            opened = ask(self.operator, wire.OpenNamespace([["model", space]]))
            assert isinstance(opened, wire.NamespaceOpened)
            self.opened[space] = opened

    # -- clients --------------------------------------------------------------------------------

    def spawn(self, row: int) -> subprocess.Popen[bytes]:
        self.spawned += 1
        program = [sys.executable, "-P", str(PROGRAMS / "soak_client.py"), self.house.socket]
        program += [str(self.house.directory / "ledger"), str(row), f"{SEED}-{self.spawned}"]
        with (self.house.directory / "clients").open("ab") as log:
            return subprocess.Popen([*program, KINDS[row % len(KINDS)]], stderr=log)

    def kill(self) -> None:
        """One client vanishes, whatever it holds, and another one comes."""
        row = self.draw.randrange(len(self.clients))
        self.clients[row].kill()
        self.clients[row].wait(PATIENCE_S)
        self.clients[row] = self.spawn(row)
        self.kills += 1

    def look_at_clients(self) -> None:
        """They live, and have seen nothing that is not right."""
        bad = self.ledger.total("wrong") + self.ledger.total("stale")
        failed = sum(client.poll() not in (None, 0) for client in self.clients)
        assert bad + failed == 0, (self.house.directory / "clients").read_text()

    # -- the operator ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Have a namespace forgotten, now and then all, unless one is just being."""
        if self.draw.random() < 0.2:
            self._forget([*SPACES], wire.Reset())
        else:
            space = self.draw.choice([*SPACES])
            self._forget([space], wire.Reset(self.opened[space].namespace))

    def purge(self) -> None:
        """The same, and what it held is overwritten."""
        space = self.draw.choice([*SPACES])
        self._forget([space], wire.Purge(self.opened[space].digest))

    def _forget(self, spaces: list[str], request: wire.Message) -> None:
        if not self.asked[1]:
            self.ledger.begin_reset(spaces)
            self.asked = self.operator.submit(request), spaces

    def look_at_answers(self) -> None:
        """A reset that is answered is one that nothing may outlive."""
        for completion in self.operator.poll():
            assert completion.ticket == self.asked[0]
            assert isinstance(completion.message, wire.Ok | wire.Report), completion.message
            self.ledger.end_reset(self.asked[1])
            self.purges += isinstance(completion.message, wire.Report)
            self.resets += isinstance(completion.message, wire.Ok)
            self.asked = 0, []

    # -- what is seen ---------------------------------------------------------------------------

    def look(self, at_s: float) -> None:
        """Sample, scrape, and compare the books."""
        self.samples.append(Sample.take(self.store.pid, at_s))
        now = {
            series: value
            for series, value in series_of(self.scrape("/metrics")).items()
            if series.partition("{")[0].endswith("_total")
        }
        for series, value in self.counters.items():
            assert now[series] >= value, series
        self.counters = now
        assert "faults" not in json.loads(self.scrape("/stats"))["counts"]
        survey = self.survey()
        assert_adds_up(survey, at_rest=False)
        self.lacking = self.lacks(survey)
        self.full |= survey["store"]["ghosts"] == GHOSTS and survey["store"]["events"] > EVENTS
        if self.warm_s is None and self.full and at_s >= WARM_S:
            self.warm_s = at_s

    def survey(self) -> dict[str, Any]:
        with OwnerClient(self.house.socket) as owner:
            return owner.survey()

    def scrape(self, path: str) -> str:
        connection = http.client.HTTPConnection(*address_of(self.house), timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200
            self.scrapes += 1
            return answer.read().decode()
        finally:
            connection.close()

    # -- begin and end --------------------------------------------------------------------------

    def fill_tables(self) -> None:
        """With many small records: those who come would take minutes to do it."""
        self.idle += 1  # this process is watched until it ends
        with ebbtide.Client(self.house.socket) as client:
            space = client.namespace(model="filler")
            for number in range(EVENTS // FILL_RECORDS + 1):
                marks = (b"%d %d" % (number, record) for record in range(FILL_RECORDS))
                space.put_many({hashlib.sha256(mark).digest(): b"fill" for mark in marks})

    def run(self) -> None:
        """Until the time is up."""
        begun = time.monotonic()
        longer = 1 if SOAK_S < WARM_S else LONGER
        acts = {
            self.kill: WORK["kill"] * longer,
            self.reset: WORK["reset"] * longer,
            self.purge: WORK["purge"] * longer,
            self.engine.kill: WORK["kill engine"],
        }
        if SOAK_S > WARM_S:
            self.fill_tables()
        due = dict(acts)
        look_at = begun
        self.clients = [self.spawn(row) for row in range(CLIENTS)]
        until, at_most = begun + SOAK_S, begun + SOAK_S + SLOW_S
        while (now := time.monotonic()) < until or (self.lacking and now < at_most):
            done = self.ledger.work()
            for act in [act for act, at in due.items() if at <= done]:
                act()
                due[act] = done + int(acts[act] * self.draw.uniform(0.5, 1.5))
            if look_at <= now:
                self.look(now - begun)
                look_at = now + LOOK_S
            self.look_at_clients()
            self.look_at_answers()
            self.engine.look()
            time.sleep(TICK_S)

    def let_go(self) -> None:
        """Everybody leaves: then nothing is held, and every account is balanced."""
        self.ledger.end()
        for client in self.clients:
            assert client.wait(PATIENCE_S) == 0
        self.look_at_clients()
        self.engine.close()
        deadline = time.monotonic() + PATIENCE_S
        while held := self._held():
            assert time.monotonic() < deadline, held
            time.sleep(LOOK_S / 10)

    def _held(self) -> list[str]:
        """What somebody seems to hold still, and what does not add up."""
        self.look_at_answers()
        descriptors = Sample.take(self.store.pid, 0.0).descriptors
        survey = self.survey()
        store, memory = survey["store"], survey["store"]["memory"]
        held = {what: memory[f"{what}_bytes"] for what in ("reserved", "pinned", "kept")}
        held |= {what: store[what] for what in ("loads", "reservations")}
        held |= {"descriptors": descriptors - self.idle}
        found = [f"{what}: {number}" for what, number in held.items() if number > 0]
        return found + self.asked[1] + imbalances(survey, at_rest=True)

    def figures(self) -> tuple[str, float | None]:
        """One line to be quoted; and the slope, if there was time for one."""
        did = {what: self.ledger.total(what) for what in COUNTS}
        late = [] if self.warm_s is None else [s for s in self.samples if s.at_s >= self.warm_s]
        slope = slope_mib(late) if len(late) >= SAMPLES_LEAST else None
        grown = f"{slope:.3f} MiB/min over {len(late)} samples" if slope is not None else "no slope"
        store = self.survey()["store"]
        words = [
            f"soak: {SOAK_S:.0f} s, seed {SEED}",
            f"{sum(did.values())} records and frames by {CLIENTS} clients at a time "
            f"({did['put']} put, {did['got']} got), {self.engine.answers} answers of an engine",
            f"{self.kills + self.engine.kills} kills, {self.resets} resets, {self.purges} purges, "
            f"{self.scrapes} scrapes",
            f"{store['counts'].get('memory_evicted', 0)} records evicted from memory, "
            f"{store['disk']['evicted']} from disk",
            f"RssAnon: {grown}, at most "
            f"{max(sample.rss_anon_bytes for sample in self.samples) / (1 << 20):.1f} MiB",
            f"at most {max(sample.descriptors for sample in self.samples)} descriptors and "
            f"{max(sample.threads for sample in self.samples)} threads",
            f"{did['wrong']} wrong, {did['stale']} stale",
        ]
        return "; ".join(words), slope

    def lacks(self, survey: dict[str, Any]) -> list[str]:
        """What has not happened yet: without it the rest shows nothing."""
        store = survey["store"]
        counts, capped = store["counts"], 0
        for space in survey["namespaces"]:
            capped += space["left_memory"].get("over_quota", 0)
        did = {what: self.ledger.total(what) for what in COUNTS if what not in NEVER}
        did |= {"kills": self.kills, "resets": self.resets, "purges": self.purges}
        did |= {what: counts.get(what, 0) for what in ("memory_evicted", "promoted")}
        did |= {"reclaimed slots": counts.get("reclaimed_slots", 0), "evicted by a cap": capped}
        if SOAK_S > WARM_S:
            did |= {"full tables": self.warm_s is not None}
        did |= {"evicted from disk": store["disk"]["evicted"], "restored": self.engine.restored}
        return [what for what, count in did.items() if not count]


@pytest.fixture
def soak(house: House) -> Iterator[Soak]:
    disk = {"path": str(house.directory / "disk"), **DISK}
    store = house.start(memory=MEMORY, disk=disk, **SETTINGS)
    operator = house.client()
    idle = Sample.take(store.pid, 0.0).descriptors
    settings = house.settings(memory=MEMORY)
    with (
        one_thread(),
        closing(Ledger(str(house.directory / "ledger"))) as ledger,
        closing(SteadyEngine(settings, house.directory / "engine", SEED)) as engine,
    ):
        eventually(engine.is_ready, PATIENCE_S)
        found = Soak(house, store, ledger, engine, operator, idle)
        try:
            yield found
        finally:
            for client in found.clients:
                client.kill()
                client.wait(PATIENCE_S)


@pytest.mark.timeout(SOAK_S + 240)
def test_a_store_runs_for_long_and_nothing_grows_and_all_adds_up(soak: Soak) -> None:
    soak.run()
    soak.let_go()
    with OwnerClient(soak.house.socket) as owner:
        assert owner.check(lambda done, of: None).is_sound
    figures, slope = soak.figures()
    print(figures)  # noqa: T201  # shown with -s
    soak.store.terminate()
    assert soak.store.wait(PATIENCE_S) == 0
    command = [sys.executable, "-P", "-m", "ebbtide", "fsck", str(soak.house.directory / "disk")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not soak.lacking, f"INVALID: nothing of {soak.lacking}"
    assert max(sample.threads for sample in soak.samples) <= 1 + sum(POOL_THREADS.values())
    assert max(sample.descriptors for sample in soak.samples) <= soak.idle + DESCRIPTORS_MAX
    if SOAK_S > WARM_S:
        assert slope is not None, f"INVALID: too few samples: {figures}"
        assert slope < SLOPE_MAX_MIB, figures
