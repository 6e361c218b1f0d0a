"""Every metric moves when its thing happens: one store, one story, and what was scraped on the way.

The chapters of the story are in `tell`; `MOVES` says which chapter moves which series, and how.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.disk_rig import raw_entries
from tests.live.conftest import PROGRAMS, House, eventually
from tests.live.programs.engine import RECORD_BYTES, key_of
from tests.live.test_commands_live import Writer, copy_of_index
from tests.live.test_http import address_of, get

from ebbtide import __version__
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.http.metrics import LOOKUP, LOOKUP_HELP, METRICS, PREFIX, C
from ebbtide.tiers.reasons import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.live

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "metrics.md"
MANY = 700  # records of 128 KiB: more than memory and disk hold
FILE_LIMIT_BYTES = 4096
OTHER_USER = 65_534


@dataclass
class Story:
    """What was scraped at the end of each chapter: series -> number."""

    house: House
    scrapes: dict[str, dict[str, float]] = field(default_factory=dict)

    def end(self, chapter: str) -> dict[str, float]:
        """Scrape."""
        status, text = get(self.house, "/metrics")
        assert status == 200
        found = self.scrapes[chapter] = series_of(text)
        return found

    def now(self, series: str) -> float:
        return series_of(get(self.house, "/metrics")[1]).get(series, 0.0)


def series_of(text: str) -> dict[str, float]:
    """Series by name and labels, as Prometheus reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def tell(story: Story) -> None:
    house = story.house
    disk = {
        "path": str(house.directory / "disk"),
        "capacity": "64MiB",
        "write_after": "0s",
        "commit_interval": "5ms",
    }
    store = house.start(disk=disk, http={"port": 0}, limits={"connections_max": 8})
    address_of(house)
    story.end("empty")

    engine = house.engine()
    assert engine.do(f"put 0 {MANY}") == str(MANY)
    eventually(lambda: story.now("ebbtide_store_memory_dirty_bytes") == 0)
    story.end("put")

    assert engine.do(f"load {MANY - 10} 10") == "10 0 0"
    story.end("load from memory")
    assert engine.do(f"load {MANY - 300} 20") == "20 0 0"
    story.end("load from disk")
    assert engine.do("load 9000 3") == "0 0 3"
    story.end("load of nothing")

    engine.do("put 0 20")  # was evicted, is computed and put again
    story.end("put again")

    writer = Writer(house.client(arena=True), "n")
    writer.put(100, 2)
    before = story.end("second namespace")
    assert before["ebbtide_store_faults_total"] == 0
    writer.states(0, 5)
    story.end("lookup")
    engine.do("hold 0 4")
    story.end("hold")
    assert isinstance(ask(writer.client, wire.PinRecords(writer.digest)), wire.Report)
    story.end("pin")
    assert isinstance(ask(writer.client, wire.UnpinRecords(writer.digest)), wire.Report)
    story.end("unpin")
    spoil_memory(writer)
    story.end("corrupt memory")
    spoil_disk(house)
    story.end("corrupt disk")

    greedy = house.engine()
    greedy.do("reserve 5000 500")  # more than there is
    story.end("reserve")
    greedy.signal(signal.SIGKILL)
    eventually(lambda: story.now("ebbtide_store_memory_reserved_bytes") == 0)
    story.end("killed engine")
    assert isinstance(ask(writer.client, wire.Reset(writer.namespace)), wire.Ok)
    story.end("reset")

    turn_away(house)
    story.end("strangers")
    lose_disk(store, engine, story)


def spoil_memory(writer: Writer) -> None:
    """What the arena holds is changed behind the store's back."""
    key = key_of(12_345)
    answer = ask(writer.client, wire.Reserve(writer.namespace, RECORD_BYTES, (key,)))
    assert isinstance(answer, wire.Grants)
    ((offset, sequence),) = answer.grants
    assert ask(writer.client, wire.Commit((sequence,))) == wire.Settled(b"\0")
    assert writer.client.arena is not None
    writer.client.arena.view(offset, 8)[:] = b"spoiled!"
    for load in (wire.LoadToVerify, wire.LoadKeys):
        ticket = writer.client.submit(load(writer.namespace, (key,)))
        if load is wire.LoadToVerify:
            eventually(lambda: any(completion.final for completion in writer.client.poll()))
            writer.client.notify(wire.Dispute(ticket, 0, (0,)))
    eventually(lambda: any(completion.final for completion in writer.client.poll()))


def spoil_disk(house: House) -> None:
    """What the slab holds is changed behind the store's back, and then loaded."""
    client = house.client(arena=True)
    opened = ask(client, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    place = house.directory / "disk"
    index = copy_of_index(place, house.directory / "copy")
    keys = {key: offset for key, offset, _ in raw_entries(index)}
    states = ask(client, wire.Lookup(opened.namespace, tuple(keys)))
    assert isinstance(states, wire.States)
    on_disk = [key for key, code in zip(keys, states.codes, strict=True) if code == Place.DISK]
    with open(place / "slab", "r+b", buffering=0) as slab:
        os.pwrite(slab.fileno(), b"\xff" * 4096, keys[on_disk[0]])
        os.fsync(slab.fileno())
    client.submit(wire.LoadKeys(opened.namespace, (on_disk[0],)))
    eventually(lambda: any(completion.final for completion in client.poll()))


def turn_away(house: House) -> None:
    """A stranger, a peer that does not keep to the protocol, and one too many."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(house.socket)
        peer.sendall(b"\xff" * 64)
        while peer.recv(4096):
            pass
    many = []
    for _ in range(9):
        many.append(socket.socket(socket.AF_UNIX))
        many[-1].connect(house.socket)
    many[-1].recv(4096)
    for peer in many:
        peer.close()
    if os.geteuid() == 0:
        os.chmod(house.socket, 0o666)
        command = [sys.executable, "-P", str(PROGRAMS / "as_user.py"), str(OTHER_USER), "raw"]
        subprocess.run([*command, house.socket], check=True, stdout=subprocess.DEVNULL)


def lose_disk(store: subprocess.Popen[bytes], engine: object, story: Story) -> None:
    """No file may be written behind its first page: the next write fails. Then it may again."""
    hard = resource.prlimit(store.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(store.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, hard))
    writer = Writer(story.house.client(arena=True), "o")
    with contextlib.suppress(AssertionError):  # they do not become clean
        writer.put(20_000, 1)
    eventually(lambda: story.now('ebbtide_store_tier_up{tier="disk"}') == 0)
    story.end("disk down")
    resource.prlimit(store.pid, resource.RLIMIT_FSIZE, (hard, hard))
    eventually(lambda: story.now('ebbtide_store_tier_up{tier="disk"}') == 1, timeout_s=30.0)
    story.end("disk back")


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    # In a directory to which every user may walk: pytest closes its own.
    with tempfile.TemporaryDirectory(prefix="ebbtide-story-", dir="/tmp") as directory:
        os.chmod(directory, 0o711)
        house = House(Path(directory))
        try:
            found = Story(house)
            tell(found)
            yield found
        finally:
            house.close()
        assert "Traceback" not in house.log_text(), house.log_text()


UP, DOWN = "rises", "falls"
RECORD = RECORD_BYTES
# (series without prefix, chapter before, chapter after, a change or its direction)
MOVES: list[tuple[str, str, str, float | str]] = [
    ("records_stored_total", "empty", "put", MANY),
    ("records_asked_total", "put", "load from memory", 10),
    ('records_restored_total{tier="memory"}', "put", "load from memory", 10),
    ('records_restored_total{tier="disk"}', "load from memory", "load from disk", 20),
    ("records_promoted_total", "load from memory", "load from disk", 20),
    ("records_written_total", "empty", "put", MANY),
    ("records_found_total", "disk down", "disk back", UP),
    ('records_left_total{reason="evicted",tier="memory"}', "empty", "put", UP),
    ('records_left_total{reason="corrupt",tier="disk"}', "corrupt memory", "corrupt disk", 1),
    ('records_evicted_total{tier="memory"}', "empty", "put", UP),
    ('records_evicted_total{tier="disk"}', "empty", "put", UP),
    ('records_missed_total{reason="never_seen"}', "empty", "put", MANY),
    ('records_missed_total{reason="evicted"}', "load of nothing", "put again", 20),
    ('records_abandoned_total{reason="cancelled"}', "reserve", "killed engine", UP),
    ('records_dropped_total{reason="evicted"}', "empty", "put", UP),
    # Or two: its copy on disk is as the bytes were when it was written.
    ('records_dropped_total{reason="corrupt"}', "hold", "corrupt memory", UP),
    ('records_dropped_total{reason="reset"}', "killed engine", "reset", UP),
    ('records_corrupt_total{tier="memory"}', "hold", "corrupt memory", 1),
    ("records_disputed_total", "hold", "corrupt memory", 1),
    ('records_corrupt_total{tier="disk"}', "corrupt memory", "corrupt disk", 1),
    ('load_failures_total{reason="never_seen"}', "load from disk", "load of nothing", 3),
    ('moved_bytes_total{edge="device_to_memory"}', "empty", "put", MANY * RECORD),
    ('moved_bytes_total{edge="memory_to_disk"}', "empty", "put", MANY * RECORD),
    ('moved_bytes_total{edge="disk_to_memory"}', "load from memory", "load from disk", 20 * RECORD),
    ('moved_bytes_total{edge="memory_to_device"}', "put", "load from memory", 10 * RECORD),
    ('reserves_refused_total{reason="busy"}', "corrupt disk", "reserve", UP),
    ("slots_reclaimed_total", "reserve", "killed engine", UP),
    ("resets_total", "killed engine", "reset", 1),
    ("disk_reopened_total", "disk down", "disk back", 1),
    ("connections_accepted_total", "empty", "put", 1),
    ('connections_refused_total{reason="protocol"}', "reset", "strangers", 1),
    ('connections_refused_total{reason="full"}', "reset", "strangers", UP),
    ('connections_refused_total{reason="user"}', "reset", "strangers", 1),
    ('requests_total{verb="commit"}', "empty", "put", UP),
    ('requests_total{verb="load"}', "put", "load from memory", 1),
    ('requests_total{verb="lookup"}', "second namespace", "lookup", 1),
    ('requests_total{verb="open_namespace"}', "put again", "second namespace", 1),
    ('requests_total{verb="reset"}', "killed engine", "reset", 1),
    ("lookup_latency_seconds_count", "second namespace", "lookup", 1),
    ("lookup_latency_seconds_sum", "second namespace", "lookup", UP),
    ('lookup_latency_seconds_bucket{le="+Inf"}', "second namespace", "lookup", 1),
    ('tier_up{tier="disk"}', "strangers", "disk down", -1),
    ('tier_used_bytes{tier="memory"}', "empty", "put", UP),
    ('tier_used_bytes{tier="disk"}', "empty", "put", UP),
    ('tier_payload_bytes{tier="memory"}', "empty", "put", UP),
    ('tier_records{tier="disk"}', "empty", "put", UP),
    ("memory_reserved_bytes", "corrupt disk", "reserve", UP),
    ("memory_pinned_bytes", "lookup", "hold", 4 * RECORD),
    ("memory_dirty_bytes", "strangers", "disk down", UP),
    ("memory_kept_bytes", "hold", "pin", 2 * RECORD),
    ("memory_kept_bytes", "pin", "unpin", -2 * RECORD),
    ("disk_quarantined_bytes", "corrupt memory", "corrupt disk", RECORD),
    ("connections", "empty", "put", 1),
    ("engines", "reserve", "killed engine", -1),
    ("namespaces", "put again", "second namespace", 1),
    ("loads", "lookup", "hold", 1),
    ("reservations", "corrupt disk", "reserve", UP),
]
# Constant while a store lives, and what no honest story shows: a test of its own each.
ELSEWHERE = {"tier_capacity_bytes", "build_info", "faults", "disk_lost_batches"}


@pytest.mark.parametrize(("series", "before", "after", "change"), MOVES)
def test_a_metric_moves_when_its_thing_happens(
    story: Story, series: str, before: str, after: str, change: float | str
) -> None:
    if 'reason="user"' in series and os.geteuid() != 0:
        pytest.skip("NO ROOT: only root can become another user to try")
    name = PREFIX + series
    moved = story.scrapes[after].get(name, 0.0) - story.scrapes[before].get(name, 0.0)
    assert name in story.scrapes[after]
    assert moved > 0 if change == UP else moved == change


def test_every_metric_has_its_move() -> None:
    moved = {re.sub(r"(_total)?(\{.*)?$", "", series) for series, *_ in MOVES}
    moved = {re.sub(r"_(count|sum|bucket)$", "", name) for name in moved}
    assert moved | ELSEWHERE == {metric.name for metric in METRICS} | {LOOKUP}


def test_sizes_and_the_version_are_told(story: Story) -> None:
    scrape = story.scrapes["empty"]
    assert scrape['ebbtide_store_tier_capacity_bytes{tier="memory"}'] == 16 << 20
    assert 50 << 20 < scrape['ebbtide_store_tier_capacity_bytes{tier="disk"}'] < 64 << 20
    assert scrape[f'ebbtide_store_build_info{{version="{__version__}"}}'] == 1
    assert (
        scrape["ebbtide_store_faults_total"]
        == story.scrapes["disk back"]["ebbtide_store_faults_total"]
        == 0
    )


def test_no_counter_ever_falls_also_when_the_disk_tier_is_replaced(story: Story) -> None:
    scrapes = list(story.scrapes.values())
    for before, after in pairwise(scrapes):
        for series, value in before.items():
            if re.search(r"_total(\{|$)|_bucket|_count$|_sum$", series):
                assert after[series] >= value, series


@pytest.mark.parametrize("chapter", sorted({after for _, _, after, _ in MOVES}))
def test_the_numbers_of_a_scrape_add_up(story: Story, chapter: str) -> None:
    """As `docs/metrics.md` says. Each scrape is of one moment, whatever is under way."""

    def total(name: str, *labels: str) -> float:
        return sum(
            value
            for series, value in story.scrapes[chapter].items()
            if series.partition("{")[0] == PREFIX + name and all(one in series for one in labels)
        )

    under_way = total("reservations")
    stored = total("records_stored_total")
    abandoned = total("records_abandoned_total")
    assert total("records_missed_total") == stored + abandoned + under_way
    loaded = total("records_restored_total") + total("load_failures_total")
    assert loaded == total("records_asked_total")  # a load that is held has named every key
    arrived = {
        "memory": stored + total("records_promoted_total"),
        "disk": total("records_found_total") + total("records_written_total"),
    }
    for tier in ("memory", "disk"):
        left, here = total("records_left_total", tier), total("tier_records", tier)
        assert arrived[tier] == left + here
        evicted = sum(
            total("records_left_total", tier, f'"{why}"') for why in ("evicted", "over_quota")
        )
        assert evicted == total("records_evicted_total", tier)


def test_names_keep_to_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert ("bytes" in metric.help.lower()) <= (
            metric.name.endswith("_bytes") or "corrupt" in metric.name or "quarant" in metric.name
        )
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    ours = {PREFIX + metric.name + "_total" * (metric.kind is C) for metric in METRICS}
    texts = [file.read_text() for file in (REPOSITORY / "connectors" / "vllm").glob("*.py")]
    engines = set(re.findall(r"ebbtide_[a-z_]+", "".join(texts)))
    assert "ebbtide_requests_total" in engines  # what an engine's own /metrics has
    assert not ours & engines


def test_the_document_has_each_metric_once_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", DOCUMENT.read_text(), re.M)
    wanted = [
        (
            PREFIX + metric.name + ("_total" if metric.kind is C else ""),
            "counter" if metric.kind is C else "gauge",
            ", ".join(f"`{name}`" for name in metric.labels) or "-",
            metric.help,
        )
        for metric in METRICS
    ]
    assert rows == [*wanted, (PREFIX + LOOKUP, "histogram", "-", LOOKUP_HELP)]


def test_the_story_was_told_by_the_one_store_that_ends_well(story: Story) -> None:
    client = SocketClient(story.house.socket, os.urandom(16), "tool", arena=False)
    assert isinstance(ask(client, wire.Stats()), wire.Report)
    client.close()
