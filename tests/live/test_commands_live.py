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
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.conftest import House

pytestmark = pytest.mark.live

RECORDS = 20
MANY = 240  # 30 MiB: to overwrite them takes a while
LIVES_MAX = 8
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
        self.namespace, self.digest = opened.namespace, opened.digest
        self.name = opened.digest.hex()[:12]

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


def slots_of(place: Path, to: Path, keys: set[bytes]) -> list[int]:
    """Where these records lie in the slab."""
    return [offset for key, offset, _ in raw_entries(copy_of_index(place, to)) if key in keys]


def in_slab(place: Path, offset: int) -> bytes:
    with open(place / "slab", "rb", buffering=0) as slab:
        return os.pread(slab.fileno(), RECORD_BYTES, offset)


def test_purge_forgets_one_namespace_and_leaves_zeros_where_it_was(house: House) -> None:
    store, place = start(house), place_of(house)
    client = house.client(arena=True)
    one, two = Writer(client, "one"), Writer(client, "two")
    one.put(0, RECORDS)
    two.put(100, RECORDS)
    slots = slots_of(place, house.directory / "copy", {key_of(n) for n in range(RECORDS)})
    assert len(slots) == RECORDS
    assert bytes(RECORD_BYTES) not in {in_slab(place, offset) for offset in slots}
    refused = command("purge", str(place), "--namespace", "0" * 12)
    assert refused.returncode == 2
    assert f"{one.name} (one)" in refused.stderr
    report = answer_of("purge", str(place), "--namespace", one.name)
    assert report["by_store"]
    (purged,) = report["namespaces"]
    assert (purged["name"], purged["disk_records"]) == (one.name, RECORDS)
    assert purged["disk_bytes"] == RECORDS * RECORD_BYTES
    assert purged["held_slots"] == 0
    assert {in_slab(place, offset) for offset in slots} == {bytes(RECORD_BYTES)}
    assert client.arena is not None
    arena = bytes(client.arena.buffer)
    assert not any(payload_of(key_of(n)) in arena for n in range(RECORDS))
    assert set(one.states(0, RECORDS)) == {Miss.RESET}
    two.load(100, RECORDS)
    assert answer_of("fsck", str(place))["sound"] == RECORDS
    one.put(0, RECORDS)  # its slots are used again
    two.load(100, RECORDS)
    store.kill()
    store.wait(PATIENCE_S)
    assert answer_of("fsck", str(place))["sound"] == 2 * RECORDS


def kill_while_it_purges(house: House, digest: bytes, slots: list[int]) -> int:
    """Kill the store when the first slot is overwritten; how many were not by then."""
    (store,) = [one for one in house.stores if one.poll() is None]
    first = min(slots)
    house.client().submit(wire.Purge(digest))
    deadline = time.monotonic() + PATIENCE_S
    with open(place_of(house) / "slab", "rb", buffering=0) as slab:
        while any(os.pread(slab.fileno(), 16, first)):
            assert time.monotonic() < deadline
    store.kill()
    store.wait(PATIENCE_S)
    return sum(any(in_slab(place_of(house), offset)) for offset in slots)


def test_a_store_killed_in_the_middle_of_a_purge_brings_nothing_back(house: House) -> None:
    """Some kills may come too late on a busy machine; one in the middle is needed."""
    place, left = place_of(house), 0
    for life in range(LIVES_MAX):
        start(house, memory="64MiB")
        client = house.client(arena=True)
        one, two = Writer(client, "one"), Writer(client, "two")
        one.put(0, MANY)
        two.put(MANY, RECORDS)
        keys = {key_of(number) for number in range(MANY)}
        slots = slots_of(place, house.directory / f"copy-{life}", keys)
        assert len(slots) == MANY
        left = kill_while_it_purges(house, one.digest, slots)
        report = answer_of("fsck", str(place))  # entries of an epoch that is over are garbage
        assert (report["sound"], report["bad"]) == (RECORDS, {})
        if left:
            break
    assert 0 < left < MANY
    start(house, memory="64MiB")
    again = house.client(arena=True)
    one, two = Writer(again, "one"), Writer(again, "two")
    assert set(one.states(0, MANY)) <= {Miss.NEVER_SEEN, Miss.BEHIND_MISS}
    two.load(MANY, RECORDS)
    assert answer_of("fsck", str(place))["sound"] == RECORDS
