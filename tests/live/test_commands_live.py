"""`ebbtide fsck`, `stats` and `purge` against a store that runs: through its socket, at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.disk_rig import raw_entries
from tests.live.conftest import PATIENCE_S, eventually
from tests.live.programs.engine import RECORD_BYTES, key_of, payload_of

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.tiers.directory import LOCK_PATIENCE_S
from ebbtide.tiers.lock_file import Owner, find_owner

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.conftest import House

pytestmark = pytest.mark.live

RECORDS = 20
DISK = {"capacity": "64MiB", "write_after": "0s", "commit_interval": "5ms"}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ebbtide", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer_of(*words: str, code: int = 0) -> dict[str, Any]:
    done = command(*words, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Writer:
    """An engine in this process that stores the records of one namespace."""

    def __init__(self, client: SocketClient, model: str) -> None:
        self.client = client
        opened = ask(client, wire.OpenNamespace([["model", model], ["kv_dtype", "float16"]]))
        assert isinstance(opened, wire.NamespaceOpened)
        self.namespace, self.name = opened.namespace, opened.digest.hex()[:12]

    def put(self, first: int, count: int) -> None:
        """Store records, and wait until they are durable."""
        keys = tuple(key_of(number) for number in range(first, first + count))
        for key in keys:
            grants = ask(self.client, wire.Reserve(self.namespace, RECORD_BYTES, (key,)))
            assert isinstance(grants, wire.Grants)
            ((offset, sequence),) = grants.grants
            assert self.client.arena is not None
            self.client.arena.view(offset, RECORD_BYTES)[:] = payload_of(key)
            assert ask(self.client, wire.Commit((sequence,))) == wire.Settled(b"\0")
        eventually(self._clean)
        assert isinstance(ask(self.client, wire.Flush()), wire.Ok)

    def load(self, first: int, count: int) -> None:
        """Have records granted, compare them, and give them back."""
        keys = tuple(key_of(number) for number in range(first, first + count))
        ticket, seen = self.client.submit(wire.LoadKeys(self.namespace, keys)), 0
        deadline = time.monotonic() + PATIENCE_S
        while seen < count:
            assert time.monotonic() < deadline
            for completion in self.client.poll():
                assert not isinstance(completion.message, wire.Failed)
                if isinstance(completion.message, wire.Batch):
                    for position, length, _, offset in completion.message.granted:
                        assert self.client.arena is not None
                        view = self.client.arena.view(offset, length)
                        assert view == payload_of(keys[position])
                        seen += 1
                    self.client.notify(wire.Ack(ticket, completion.message.batch))
            self.client.wait(0.05)

    def states(self, first: int, count: int) -> bytes:
        keys = tuple(key_of(number) for number in range(first, first + count))
        answer = ask(self.client, wire.Lookup(self.namespace, keys))
        assert isinstance(answer, wire.States)
        return answer.codes

    def _clean(self) -> bool:
        answer = ask(self.client, wire.Stats())
        assert isinstance(answer, wire.Report)
        dirty_bytes: int = answer.report["memory"]["dirty_bytes"]
        return dirty_bytes == 0


def place_of(house: House) -> Path:
    return house.directory / "disk"


def start(house: House, **more: Any) -> subprocess.Popen[bytes]:
    return house.start(disk={"path": str(place_of(house)), **DISK}, **more)


def copy_of_index(place: Path, to: Path) -> Path:
    """The committed index, as another process may read it while its owner lives."""
    (to / "index").mkdir(parents=True)
    (to / "index" / "data.mdb").write_bytes((place / "index" / "data.mdb").read_bytes())
    return to


def test_fsck_asks_the_store_that_runs_and_does_not_wait_for_its_lock(house: House) -> None:
    store, place = start(house), place_of(house)
    assert find_owner(str(place)) == Owner(str(store.pid), house.socket)
    writer = Writer(house.client(arena=True), "m")
    writer.put(0, RECORDS)
    begun = time.monotonic()
    report = answer_of("fsck", str(place))
    assert time.monotonic() - begun < LOCK_PATIENCE_S
    assert report["by_store"]
    assert (report["records"], report["sound"], report["bad"]) == (RECORDS, RECORDS, {})
    assert report["payload_bytes"] == RECORDS * RECORD_BYTES

    _, offset, _ = next(raw_entries(copy_of_index(place, house.directory / "copy")))
    with open(place / "slab", "r+b", buffering=0) as slab:
        os.pwrite(slab.fileno(), b"\xff" * 4096, offset)
        os.fsync(slab.fileno())
    report = answer_of("fsck", str(place), code=3)
    assert (report["sound"], report["bad"]) == (RECORDS - 1, {"corrupt": 1})
    said = command("fsck", str(place), "--repair")
    assert said.returncode == 0, said.stderr
    assert "Checked by the store that runs on it" in said.stdout
    assert "Traceback" not in house.log_text()


def test_a_killed_store_is_no_owner_and_fsck_reads_the_files(house: House) -> None:
    store, place = start(house), place_of(house)
    Writer(house.client(arena=True), "m").put(0, RECORDS)
    store.kill()
    store.wait(PATIENCE_S)
    assert str(store.pid) in (place / "LOCK").read_text()
    eventually(lambda: find_owner(str(place)) is None)
    report = answer_of("fsck", str(place))
    assert not report["by_store"]
    assert report["sound"] == RECORDS


def test_a_command_neither_ends_a_private_store_nor_keeps_it_alive(house: House) -> None:
    store, place = start(house, private=True), place_of(house)
    assert answer_of("fsck", str(place))["by_store"]
    visitor = SocketClient(house.socket, os.urandom(16), wire.COMMAND_ROLE, arena=False)
    engine = SocketClient(house.socket, os.urandom(16), "worker", arena=False)
    time.sleep(0.2)
    assert store.poll() is None
    engine.close()
    assert store.wait(PATIENCE_S) == 0
    visitor.close()


def test_stats_tells_each_namespace_with_its_hits_and_drops(house: House) -> None:
    start(house)
    place, client = place_of(house), house.client(arena=True)
    one, two = Writer(client, "one"), Writer(client, "two")
    one.put(0, RECORDS)
    two.put(0, 3)
    assert ask(client, wire.Reset(two.namespace)) == wire.Ok()
    one.load(0, 5)
    found = answer_of("stats", str(place))
    assert found["by_store"]
    namespaces = {namespace["name"]: namespace for namespace in found["namespaces"]}
    assert set(namespaces) == {one.name, two.name}
    first, second = namespaces[one.name], namespaces[two.name]
    assert first["fields"] == {"model": "one", "kv_dtype": "float16"}
    assert (first["disk_records"], first["disk_bytes"]) == (RECORDS, RECORDS * RECORD_BYTES)
    assert (first["memory_records"], first["hits"]) == (RECORDS, {"memory": 5})
    assert 0 <= first["newest_s"] <= first["oldest_s"] < 180
    assert (second["disk_records"], second["drops"]) == (0, {"reset": 3})
    assert found["store"]["disk"]["capacity_bytes"] > 0
    said = command("stats", str(place))
    assert f"{one.name}  model=one  kv_dtype=float16" in said.stdout
    assert f"  memory: {RECORDS} records, 2.5MiB" in said.stdout
    assert "hits: 5 memory" in said.stdout
