"""Replays against a real store: hits as a model has them, bytes compared, every block counted."""

from __future__ import annotations

import errno
import json
import random
import sys
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide import cli
from ebbtide.bench import progress as progress_module
from ebbtide.bench import replay as replay_module
from ebbtide.bench.records import block_key
from ebbtide.bench.replay import Replay, report_of
from ebbtide.bench.rig import Capacity, Rig
from ebbtide.bench.trace import read_requests
from ebbtide.errors import MisuseError
from ebbtide.tiers.slab import SlabFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RECORD = 4096


@contextmanager
def replaying(
    memory_records: int, disk_records: int | None = None, **options: Any
) -> Iterator[tuple[Replay, Rig]]:
    """Yield a replay on a store of exactly so many records."""
    disk = None if disk_records is None else Capacity(None, disk_records)
    rig = Rig(Capacity(None, memory_records), disk, RECORD, **options)
    try:
        replay = Replay(rig)
        yield replay, rig
        replay.check_sums()
        rig.store.check_integrity()
    finally:
        rig.close()


class LruModel:
    """The simulator's LRU: hits are the longest resident prefix, then tail first."""

    def __init__(self, records: int) -> None:
        self.records = records
        self.order: OrderedDict[int, None] = OrderedDict()

    def request(self, ids: Sequence[int]) -> int:
        """Return the hits of one request."""
        hits = next((n for n, block in enumerate(ids) if block not in self.order), len(ids))
        for block in reversed(ids):
            if block in self.order:
                self.order.move_to_end(block)
                continue
            if len(self.order) >= self.records:
                self.order.popitem(last=False)
            self.order[block] = None
        return hits


def chats(seed: int, requests: int, sessions: int, longest: int) -> list[list[int]]:
    """Return requests of chats that grow, start over and come back, with a shared first block."""
    draw = random.Random(seed)
    lengths = [0] * sessions
    found = []
    for _ in range(requests):
        session = min(draw.randrange(sessions), draw.randrange(sessions))
        lengths[session] = (lengths[session] + draw.randrange(1, 9)) % longest + 1
        first = 1000 * (session + 1)
        found.append([0, *range(first, first + lengths[session])])
    return found


@pytest.mark.parametrize(("records", "longest"), [(100, 20), (100, 80), (333, 60)])
def test_memory_hits_are_exactly_the_models(records: int, longest: int) -> None:
    """Chains of 80 blocks are longer than the load window and than what is free."""
    model = LruModel(records)
    with replaying(records) as (replay, rig):
        for number, ids in enumerate(chats(records + longest, 400, 24, longest)):
            before = replay.hits.total()
            replay.request(ids)
            assert replay.hits.total() - before == model.request(ids), f"request {number}"
        resident = rig.store.memory.index(rig.store.namespace(0).epoch)  # type: ignore[union-attr]
        assert set(resident) == {block_key(block) for block in model.order}
        assert (replay.wrong_bytes, replay.shed) == (0, 0)
        assert replay.hits.total() > 0
        assert replay.misses["evicted"] > 0


def test_blocks_behind_a_gap_are_misses_although_they_are_held() -> None:
    """What follows a gap is computed and offered again, and not stored twice."""
    with replaying(100) as (replay, _):
        replay.request([1, 2, 3])
        replay.request([9, 2, 3])
        assert replay.hits.total() == 0
        assert replay.misses == {"never_seen": 2, "behind_miss": 4}
        assert replay.written_records == 4  # 1, 2, 3 and then 9 alone


def test_storing_evicts_no_block_of_the_chain_it_belongs_to() -> None:
    """Block 2 is the second coldest, behind a gap: the second new block must not take its slot."""
    requests: list[list[int]] = [[5], [2], [*range(100, 118)], [1, 2, 3], [2]]
    model = LruModel(20)
    with replaying(20) as (replay, _):
        hits = []
        for ids in requests:
            before = replay.hits.total()
            replay.request(ids)
            hits.append(replay.hits.total() - before)
        assert hits == [model.request(ids) for ids in requests] == [0, 0, 0, 0, 1]


def test_a_chain_larger_than_memory_ends_and_costs_only_hits() -> None:
    with replaying(20) as (replay, _):
        for _ in range(3):
            replay.request(range(60))
        assert replay.wrong_bytes == 0
        assert replay.blocks == 180


def test_disk_hits_come_back_right() -> None:
    requests = chats(7, 500, 40, 30)
    with replaying(60, 400) as (replay, rig):
        for ids in requests:
            replay.request(ids)
        report = report_of(replay, "chats", 1.0, rig.records_max())
    alone = LruModel(60)
    in_memory_alone = sum(alone.request(ids) for ids in requests)
    edges = report["bytes_by_edge"]
    assert report["wrong_bytes"] == 0
    assert report["shed"] == 0
    assert report["hits"]["disk"] > 0
    assert sum(report["hits"].values()) > in_memory_alone
    assert edges["disk_to_memory"] == report["hits"]["disk"] * RECORD
    assert edges["memory_to_disk"] > 0
    assert edges["memory_to_engine"] == sum(report["hits"].values()) * RECORD
    assert report["not_exercised"] == []


def flip_a_byte(rig: Rig, block: int) -> None:
    """Change the block's record in the arena behind the store's back."""
    namespace = rig.store.namespace(0)
    assert namespace is not None
    record = rig.store.memory.find(namespace.epoch, block_key(block))
    assert record is not None
    rig.store.view(record, RECORD)[1234] ^= 0x40


def test_a_flipped_byte_is_seen_by_the_replay_when_the_store_does_not_look() -> None:
    with replaying(100, verify_memory=False) as (replay, rig):
        replay.request([1, 2, 3])
        flip_a_byte(rig, 2)
        replay.request([1, 2, 3])
        assert (replay.wrong_bytes, replay.wrong_records) == (1, 1)
        assert replay.hits.total() == 3


def test_a_flipped_byte_is_a_counted_miss_when_the_store_verifies() -> None:
    with replaying(100) as (replay, rig):
        replay.request([1, 2, 3, 4])
        flip_a_byte(rig, 2)
        replay.request([1, 2, 3, 4])
        assert replay.wrong_bytes == 0
        assert replay.hits.total() == 1
        assert replay.misses == {"never_seen": 1, "behind_miss": 5, "corrupt": 1}
        replay.request([1, 2, 3, 4])  # it was computed and stored again
        assert replay.hits.total() == 5


def test_a_block_that_is_counted_twice_is_an_error() -> None:
    with replaying(100) as (replay, _):
        replay.request([1, 2])
        replay.misses["never_seen"] += 1
        with pytest.raises(MisuseError, match="lost in counting"):
            replay.check_sums()
        replay.misses["never_seen"] -= 1


# -- the verb -------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    """Return a Mooncake trace of 300 requests."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {"timestamp": number, "input_length": 1, "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(chats(3, 300, 20, 30))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_is_the_last_line_and_adds_up(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", trace_file, "--memory", "100records", "--json"]
    assert cli.main([*words, "--disk", "64MiB", "--requests", "250"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["requests"] == 250
    assert report["trace"] == "chats"
    assert sum(report["hits"].values()) + sum(report["misses"].values()) == report["blocks"]
    assert report["hit_rate"] == pytest.approx(sum(report["hit_rate_by_tier"].values()))
    assert set(report["hit_rate_by_tier"]) == {"memory", "disk"}
    assert set(report["bytes_by_edge"]) == {
        "engine_to_memory",
        "memory_to_engine",
        "memory_to_disk",
        "disk_to_memory",
    }
    assert report["wrong_bytes"] == 0
    assert report["records_max"]["memory"] == 100
    assert report["machine"]["cpu_cores"] >= 1


def test_a_directory_that_is_kept_makes_the_next_replay_warm(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--disk", "3000records", "--dir", str(tmp_path / "tier"), "--json"]
    reports = []
    for _ in range(2):
        assert cli.main(["replay", trace_file, "--memory", "100records", *kept]) == 0
        reports.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    cold, warm = reports
    assert cold["found"] == 0
    assert warm["found"] > 100  # more than memory alone ever held
    assert warm["hit_rate"] == 1.0
    assert warm["wrong_bytes"] == 0


def test_wrong_bytes_end_with_exit_code_1(
    trace_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class UnverifiedRig(Rig):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, verify_memory=False)

    class DamagingReplay(Replay):
        def request(self, block_ids: Sequence[int]) -> None:
            super().request(block_ids)
            if self.requests == 1:
                flip_a_byte(self._rig, 0)

    monkeypatch.setattr(replay_module, "Rig", UnverifiedRig)
    monkeypatch.setattr(replay_module, "Replay", DamagingReplay)
    assert cli.main(["replay", trace_file, "--memory", "2000records"]) == 1
    # Block 0 is every chat's first block: it is compared, and wrong, in every later request.
    assert "wrong bytes: 299 in 299 of " in capsys.readouterr().out


def test_a_disk_tier_that_went_down_ends_with_exit_code_1(
    trace_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(slab: SlabFile, offset: int, views: Sequence[memoryview]) -> None:
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(SlabFile, "write", refused)
    words = ["replay", trace_file, "--memory", "100records", "--disk", "64MiB", "--json"]
    assert cli.main(words) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "no more" in report["disk_down"]
    assert report["wrong_bytes"] == 0
    assert sum(report["hits"].values()) + sum(report["misses"].values()) == report["blocks"]


def test_what_was_not_exercised_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "once.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1, 2, 3]}\n')
    assert cli.main(["replay", str(path), "--memory", "1MiB", "--disk", "64MiB"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "not exercised" in line]
    assert [line.split(": ")[1] for line in said] == [
        "reading",
        "the cost of eviction",
        "demotion",
        "the disk tier",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "0"],
        ["--dir", "somewhere"],
        ["--memory", "12"],
        ["--disk", "0records"],
        ["--block-bytes", "0B"],
        ["--block-bytes", "1GiB"],
    ],
)
def test_usage_errors_have_exit_code_2(
    trace_file: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", trace_file, *words]) == 2
    assert capsys.readouterr().err.startswith("ebbtide: ")


def test_a_malformed_line_in_the_middle_closes_the_store(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(trace_file, "a") as file:
        file.write("{\n")
    assert cli.main(["replay", trace_file, "--disk", "64MiB"]) == 2
    assert "line=301" in capsys.readouterr().err


def test_progress_is_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    with progress_module.progress(7) as advanced:
        advanced(3, 0.25)
    with progress_module.progress(None) as advanced:
        advanced(4, 0.5)
    assert capsys.readouterr().err.splitlines() == [
        "replayed 3 of 7 requests, hit rate 0.2500",
        "replayed 4 requests, hit rate 0.5000",
    ]


def test_progress_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress_module.progress(7) as advanced:
        for done in range(8):
            advanced(done, 0.25)
    assert "7/7" in capsys.readouterr().err


async def test_a_recorded_trace_matches_the_model(traces_dir: Path) -> None:
    """The first 1,500 requests of a real hour of chat, at a size at which most blocks go again."""
    path = str(traces_dir / "mooncake_conversation.kvtrace.jsonl.gz")
    model, hits = LruModel(3655), 0
    with replaying(3655) as (replay, _):
        async for request in read_requests(path, 1500):
            replay.request(request.block_ids)
            hits += model.request(request.block_ids)
        assert replay.requests == 1500
        assert replay.hits.total() == hits > 1000
        assert replay.wrong_bytes == 0
        assert replay.misses["evicted"] > 0
