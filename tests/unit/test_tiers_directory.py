"""The disk tier's directory: who may own it, what it refuses, what a new capacity does to it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from contextlib import closing
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import pytest

from ebbtide.errors import ConfigError
from ebbtide.testing import SimRuntime, SimStore, disk_bytes_for
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import directory
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.directory import Directory, Geometry
from ebbtide.tiers.fsck import check_directory
from ebbtide.tiers.index import DurableIndex, IndexBatch, StoredNamespace
from ebbtide.tiers.index_page import Entry, rows_of_entries
from ebbtide.tiers.opening import OpenDisk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096
MIB = 1 << 20
SEGMENT_BYTES = 4 * MIB  # of a small capacity


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LOCK_PATIENCE_S", 0.05)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def open_disk(path: Path, slab_bytes: int = 64 * PAGE) -> OpenDisk:
    return OpenDisk(SimRuntime(1), str(path), disk_bytes_for(slab_bytes))


def close(disk: OpenDisk) -> None:
    disk.tier.close(clean=False)
    disk.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_p81_directory_and_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    place = tmp_path / "disk"
    close(open_disk(place))
    found = {path.relative_to(place).as_posix(): mode_of(path) for path in place.rglob("*")}
    assert mode_of(place) == 0o700
    assert found.pop("index") == 0o700
    assert set(found.values()) == {0o600}
    assert {"FORMAT", "LOCK", "slab", "index/data.mdb"} <= found.keys()


def test_p81_an_existing_directory_is_made_private(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir(mode=0o755)
    close(open_disk(place))
    assert mode_of(place) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_p81_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(ConfigError, match="Others may write"):
        Directory(str(place), 16 * MIB)
    assert list(place.iterdir()) == []


def test_p81_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="another user"):
        Directory(str(tmp_path / "disk"), 16 * MIB)


def test_p81_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "disk").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a directory"):
        Directory(str(tmp_path / "disk"), 16 * MIB)


@pytest.mark.parametrize("name", ["LOCK", "FORMAT", "slab", "index"])
def test_p81_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    place = tmp_path / "disk"
    close(open_disk(place))
    victim = tmp_path / "victim"
    (place / name).rename(victim)
    (place / name).symlink_to(victim)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in [victim, *victim.glob("*")])
    with pytest.raises((ConfigError, OSError)) as caught:
        close(open_disk(place))
    assert getattr(caught.value, "errno", errno.ELOOP) == errno.ELOOP
    assert sorted((p.name, p.stat().st_mtime_ns) for p in [victim, *victim.glob("*")]) == before


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("")
    with pytest.raises(ConfigError, match="cannot be created or opened"):
        Directory(str(tmp_path / "disk"), 16 * MIB)


def test_p18_a_second_opener_is_refused_and_told_the_owner(tmp_path: Path) -> None:
    first = Directory(str(tmp_path / "disk"), 16 * MIB)
    with pytest.raises(ConfigError, match=f"owner_pid={os.getpid()}"):
        Directory(str(tmp_path / "disk"), 16 * MIB)
    first.close()
    first.close()
    Directory(str(tmp_path / "disk"), 16 * MIB).close()


def test_p61_a_newer_format_is_refused_with_a_way_out_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    close(open_disk(place))
    fields = json.loads((place / "FORMAT").read_text())
    text = json.dumps({**fields, "format": 3, "unheard_of": True})
    (place / "FORMAT").write_text(text)
    with pytest.raises(ConfigError, match="newer ebbtide") as caught:
        open_disk(place)
    assert "another directory" in caught.value.next_step
    assert (place / "FORMAT").read_text() == text


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{}",
        "not json",
        {"segment_bytes": 0},
        {"segment_bytes": -4096},
        {"segment_bytes": 4_194_305},
        {"segment_bytes": "4194304"},
        {"segment_bytes": None},
        {"alignment": 512},
        {"directory": 7},
        {"slab_bytes": None},
        {"format": 0},
        {"unheard_of": 1},
    ],
)
def test_an_unreadable_format_starts_over(tmp_path: Path, damage: str | dict[str, object]) -> None:
    place = tmp_path / "disk"
    close(open_disk(place))
    good = json.loads((place / "FORMAT").read_text())
    text = damage if isinstance(damage, str) else json.dumps({**good, **damage})
    (place / "FORMAT").write_text(text)
    disk = open_disk(place)
    now = json.loads((place / "FORMAT").read_text())
    assert now["directory"] != good["directory"]
    assert {**now, "directory": ""} == {**good, "directory": ""}
    close(disk)


def test_a_directory_of_format_1_starts_empty_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "disk"
    store_one(place)
    fields = json.loads((place / "FORMAT").read_text())
    (place / "FORMAT").write_text(json.dumps({**fields, "format": 1}))
    with pytest.raises(ConfigError, match="an earlier one"):
        check_directory(str(place))
    disk = open_disk(place)
    assert disk.tier.records == 0
    close(disk)
    assert "is of format 1: a store starts empty on it" in caplog.text
    assert json.loads((place / "FORMAT").read_text())["format"] == 2


def test_format_says_what_the_documentation_says(tmp_path: Path) -> None:
    close(open_disk(tmp_path / "disk"))
    fields = json.loads((tmp_path / "disk" / "FORMAT").read_text())
    assert list(fields) == [
        "format",
        "directory",
        "alignment",
        "segment_bytes",
        "slab_bytes",
        "index_bytes",
    ]
    assert (fields["format"], fields["alignment"]) == (2, 4096)
    assert bytes.fromhex(fields["directory"]).hex() == fields["directory"]
    assert len(fields["directory"]) == 32


@pytest.mark.parametrize("capacity", [16 * MIB, 16 * MIB + 5000, 100 * MIB + 1, 3 << 40])
def test_p61_the_parts_never_exceed_the_capacity(capacity: int) -> None:
    geometry = Geometry.plan(capacity)
    assert geometry.slab_bytes + geometry.index_bytes + (64 << 10) <= capacity
    assert geometry.slab_bytes % PAGE == geometry.index_bytes % PAGE == 0
    assert geometry.slab_bytes > capacity * 0.9


def test_a_capacity_without_room_for_payload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no room for payload"):
        Directory(str(tmp_path / "disk"), MIB)
    Directory(str(tmp_path / "disk"), 16 * MIB).close()  # the lock was given back


# -- a capacity that changes ----------------------------------------------------------------------


def test_growing_keeps_every_record(tmp_path: Path) -> None:
    with SimStore(1, 64 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=48 * PAGE) as sim:
        keys = [key_of(n) for n in range(40)]
        sim.put(sim.namespace(), keys, PAGE)
        assert sim.restart(slab_bytes=96 * PAGE)
        space = sim.namespace()
        assert sim.get(space, keys) == [sim.content(space, key, PAGE) for key in keys]
        assert os.path.getsize(tmp_path / "d" / "slab") == 96 * PAGE


def test_p60_shrinking_keeps_what_fits(tmp_path: Path) -> None:
    with SimStore(1, 64 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=64 * PAGE) as sim:
        keys = [key_of(n) for n in range(40)]
        sim.put(sim.namespace(), keys, PAGE)
        assert sim.restart(slab_bytes=16 * PAGE)
        space = sim.namespace()
        found = sim.get(space, keys)
        right = [sim.content(space, key, PAGE) for key in keys]
        assert sum(f == r for f, r in zip(found, right, strict=True)) == 16
        assert os.path.getsize(tmp_path / "d" / "slab") == 16 * PAGE
        sim.store.check_integrity()


def store_one(place: Path) -> None:
    """Make a directory that holds one record, and close it in order."""
    with SimStore(1, 16 * PAGE, disk_path=str(place), slab_bytes=64 * PAGE) as sim:
        sim.put(sim.namespace(), [key_of(1)], PAGE)
        assert sim.drain()


def used_bytes(place: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())


def fill_index(place: Path, records: int) -> None:
    batch = IndexBatch()
    batch.put_namespace(StoredNamespace(bytes(32), 1, []))
    entries = [Entry(1, key_of(n), 0, PAGE, n * PAGE, n + 1, bytes(16)) for n in range(records)]
    batch.add(rows_of_entries(entries))
    with closing(DurableIndex(str(place / "index"), 8 * MIB, SEGMENT_BYTES)) as index:
        index.commit(batch)
        index.save_recency(np.arange(1, records + 1))


def test_p61_a_smaller_capacity_shrinks_the_index_too(tmp_path: Path) -> None:
    """LMDB never gives file space back by itself."""
    place = tmp_path / "disk"
    disk = OpenDisk(SimRuntime(1), str(place), 128 * MIB)
    close(disk)
    fill_index(place, 20_000)
    assert used_bytes(place / "index") > MIB
    disk = OpenDisk(SimRuntime(1), str(place), 16 * MIB)
    try:
        assert 0 < disk.tier.records <= disk.tier.records_max
        assert used_bytes(place) <= 16 * MIB
        disk.tier.evict(range(disk.tier.records // 2), 1)  # what is left can still be rewritten
        answers: list[bool] = []
        disk.tier.flush(answers.append)
        disk.tier._runtime.settle()  # type: ignore[attr-defined]
        assert answers == [True]
    finally:
        close(disk)


@pytest.mark.parametrize("crash", ["while it copies", "before it renames"])
def test_p60_an_opening_that_crashed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    place = tmp_path / "disk"
    close(OpenDisk(SimRuntime(1), str(place), 128 * MIB))
    fill_index(place, 20_000)

    def fail(self: DurableIndex | Directory, *args: object) -> None:
        if isinstance(self, Directory):
            shutil.rmtree(self.index_path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if crash == "while it copies":
            patch.setattr(DurableIndex, "copy_to", fail)
        else:
            patch.setattr(Directory, "replace_index", fail)
        with pytest.raises(KeyboardInterrupt):
            OpenDisk(SimRuntime(1), str(place), 16 * MIB)
    close(OpenDisk(SimRuntime(1), str(place), 16 * MIB))
    assert {path.name for path in place.iterdir()} == {"FORMAT", "LOCK", "slab", "index"}
    assert mode_of(place / "index") == 0o700
    assert used_bytes(place) <= 16 * MIB


@pytest.mark.parametrize("what", ["namespaces", "was_clean", "restore", "mark_clean", "remove"])
def test_any_lmdb_error_while_opening_starts_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place = tmp_path / "disk"
    store_one(place)
    real, calls = getattr(DurableIndex, what.replace("restore", "recency")), []

    def fail_once(*args: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise lmdb.CorruptedError("made up")
        return real(*args)

    monkeypatch.setattr(DurableIndex, what.replace("restore", "recency"), fail_once)
    if what == "remove":
        index = DurableIndex(str(place / "index"), MIB, MIB)
        with index._env.begin(write=True, db=index._records) as txn:
            txn.put(b"xxxxxxxx", b"bad")
        index.close()
    disk = open_disk(place)
    assert disk.tier.records == 0
    close(disk)
    assert calls


def test_an_index_that_has_no_room_to_be_opened_is_refused_with_the_numbers_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "disk"
    store_one(place)

    def fail(*args: object) -> object:
        raise lmdb.DiskError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(DurableIndex, "mark_clean", fail)
        with pytest.raises(ConfigError, match=r"free_bytes=\d+.*Free space"):
            open_disk(place)
    disk = open_disk(place)
    assert disk.tier.records == 1
    close(disk)


def test_a_failed_opening_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leak check of every test sees slab and index descriptors."""

    def fail(*args: object) -> object:
        raise OSError(errno.EIO, "made up")

    monkeypatch.setattr(DurableIndex, "recency", fail)
    with pytest.raises(OSError, match="made up"):
        open_disk(tmp_path / "disk")


@pytest.mark.parametrize("damage", ["garbage", "missing", "truncated"])
def test_p57_a_damaged_index_starts_empty(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "disk"
    store_one(place)
    data = place / "index" / "data.mdb"
    if damage == "missing":
        data.unlink()
    else:
        text = data.read_bytes()
        data.write_bytes(text[:5000] if damage == "truncated" else b"\xff" * len(text))
    disk = open_disk(place)
    assert disk.tier.records == 0
    close(disk)


def test_the_default_bounds_fit_into_the_arena() -> None:
    bounds = Bounds.for_capacity(64 * MIB)
    assert bounds.load_window_bytes == 16 * MIB
    assert bounds.dirty_max_bytes == bounds.pinned_max_bytes == 32 * MIB
