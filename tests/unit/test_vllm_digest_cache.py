"""Digests that outlive the process: when they are used, and when they must not be believed."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.model_directory import (
    count_reads,
    digest_of,
    make_model,
    names,
    remember_young_files,
    settled,
)

from ebbtide.connectors.vllm import digest_cache, weights
from ebbtide.connectors.vllm.digest_cache import DigestCache, default_cache_path
from ebbtide.connectors.vllm.weights import (
    WeightsIdentity,
)


@pytest.fixture(autouse=True)
def young_files_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_young_files(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "weights.json")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return count_reads(monkeypatch)


def test_the_second_time_no_byte_is_read(model: Path, tmp_path: Path, reads: list[str]) -> None:
    path = tmp_path / "cache" / "weights.json"
    before = digest_of(model, DigestCache(path))
    assert sorted(reads) == names(model)
    reads.clear()
    assert digest_of(model, DigestCache(path)) == before
    assert reads == []
    (model / "config.json").write_text('{"rope_theta": 10000.1}')
    digest_of(model, DigestCache(path))
    assert reads == ["config.json"]


def test_what_was_just_written_is_not_remembered(
    model: Path, cache: DigestCache, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the same tick of the clock would go unseen."""
    monkeypatch.setattr(weights, "SETTLED_NS", 3600 * 10**9)
    assert digest_of(model, cache) == digest_of(model, cache)
    assert sorted(reads) == sorted(names(model) * 2)


def moved(status: os.stat_result, field: str, change: int) -> Any:
    """The status with one number changed."""
    fields = [name for name in dir(status) if name.startswith("st_")]
    numbers = {name: getattr(status, name) for name in fields}
    return SimpleNamespace(**{**numbers, field: numbers[field] + change})


@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"])
def test_an_entry_is_found_by_each_of_its_five_numbers(model: Path, field: str) -> None:
    status = (model / "config.json").stat()
    cache = DigestCache(None)
    cache.put(status, "a" * 64)
    assert cache.get(moved(status, field, 0)) == "a" * 64
    assert cache.get(moved(status, field, 1)) is None


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_cache_is_private_whatever_the_umask(model: Path, tmp_path: Path, mask: int) -> None:
    path = tmp_path / "new" / "ebbtide" / "weights.json"
    previous = os.umask(mask)
    try:
        digest_of(model, DigestCache(path))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(os.listdir(path.parent)) == ["weights.json", "weights.json.lock"]


GOOD_KEY = "1:2:3:4:5"
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no json": b"\xff\x00",
    "cut": b'{"format": 1, "files": {',
    "deep": b"[" * 100_000,
    "list": b"[]",
    "other format": json.dumps({"format": 2, "files": {GOOD_KEY: "a" * 64}}).encode(),
    "no files": b'{"format": 1}',
    "bad key": json.dumps({"format": 1, "files": {"x": "a" * 64}}).encode(),
    "bad digest": json.dumps({"format": 1, "files": {GOOD_KEY: "a" * 63}}).encode(),
    "no digest": json.dumps({"format": 1, "files": {GOOD_KEY: 7}}).encode(),
    "too large": b" " * (1 << 20) + b'{"format": 1, "files": {}}',
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_cache_is_ignored_and_rewritten(
    model: Path, tmp_path: Path, reads: list[str], damage: bytes
) -> None:
    path = tmp_path / "cache" / "weights.json"
    before = digest_of(model, DigestCache(path))
    path.write_bytes(damage)
    reads.clear()
    assert digest_of(model, DigestCache(path)) == before
    assert sorted(reads) == names(model)
    assert len(json.loads(path.read_text())["files"]) == 3


def forge(path: Path) -> None:
    """Give every entry a digest that would be believed."""
    document = json.loads(path.read_text())
    document["files"] = dict.fromkeys(document["files"], "a" * 64)
    path.write_text(json.dumps(document))


def test_a_forged_cache_would_be_believed(model: Path, cache: DigestCache, tmp_path: Path) -> None:
    """What makes the next test able to fail."""
    before = digest_of(model, cache)
    path = tmp_path / "cache" / "weights.json"
    forge(path)
    assert digest_of(model, DigestCache(path)) != before


@pytest.mark.parametrize("fault", ["owner", "mode", "link", "directory", "pipe"])
def test_a_cache_that_is_not_ours_alone_is_ignored_and_rewritten(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = tmp_path / "cache" / "weights.json"
    before = digest_of(model, DigestCache(path))
    forge(path)
    with monkeypatch.context() as injected:
        if fault == "owner":
            real = os.fstat
            status = path.stat()

            def foreign(fd: int) -> os.stat_result:
                found = real(fd)
                if found.st_ino != status.st_ino:
                    return found
                values = list(found)
                values[4] = os.geteuid() + 1
                return os.stat_result(values)

            injected.setattr(os, "fstat", foreign)
        elif fault == "mode":
            path.chmod(0o660)
        elif fault == "link":
            path.rename(tmp_path / "target")
            path.symlink_to(tmp_path / "target")
        else:
            path.unlink()
            path.mkdir() if fault == "directory" else os.mkfifo(path)
        assert digest_of(model, DigestCache(path)) == before
    if fault != "directory":  # that one cannot be replaced: it costs time
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_ISREG(path.lstat().st_mode)
        assert digest_of(model, DigestCache(path)) == before


def unwritable(place: Path, fault: str) -> Path:
    """A cache path that cannot be written, also not by root."""
    place.mkdir(mode=0o700)
    if fault == "parent is a file":
        (place / "file").touch()
        return place / "file" / "weights.json"
    if fault == "others may write":
        place.chmod(0o777)
    if fault == "is a directory":
        (place / "weights.json").mkdir()
    if fault == "lock is a link":
        (place / "weights.json.lock").symlink_to(place / "nothing")
    return place / "weights.json"


@pytest.mark.parametrize(
    "fault", ["parent is a file", "others may write", "is a directory", "lock is a link"]
)
def test_a_cache_that_cannot_be_written_costs_time_and_one_line(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reads: list[str], fault: str
) -> None:
    cache = DigestCache(unwritable(tmp_path / "c", fault))
    with caplog.at_level(logging.INFO):
        before = digest_of(model, cache)
        (model / "config.json").write_text("{}")
        assert digest_of(model, cache) != before
    assert len(caplog.records) == 1
    assert "read again at every start" in caplog.text
    assert len(reads) == 4  # what this process has read it does not read again


def test_a_lock_that_is_never_given_back_costs_time(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "LOCK_RETRY_S", 0.0)
    path = tmp_path / "weights.json"
    tmp_path.chmod(0o700)
    held = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        digest_cache._wait_for(held)
        digest_of(model, DigestCache(path))
    finally:
        os.close(held)
    assert "another process keeps it locked" in caplog.text
    assert not path.exists()
    digest_of(model, DigestCache(path))
    assert path.exists()


def test_leftovers_of_a_killed_writer_do_no_harm(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    tmp_path.chmod(0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.link(victim, f"{path}.new")
    digest_of(model, DigestCache(path))
    assert path.exists()
    assert victim.read_text() == "precious"


def test_the_cache_is_bounded_and_drops_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "CACHED_FILES_MAX", 4)
    path = tmp_path / "cache" / "weights.json"
    cache = DigestCache(path)
    files = [moved(tmp_path.stat(), "st_ino", number) for number in range(6)]
    for number, status in enumerate(files):
        cache.put(status, f"{number:064}")
    for again in (cache, DigestCache(path)):
        found = [again.get(status) for status in files]
        assert found == [None, None, *(f"{number:064}" for number in range(2, 6))]


def test_a_full_cache_fits_into_what_is_read(tmp_path: Path) -> None:
    longest = ":".join([str(2**64 - 1)] * 3 + [str(-(2**63))] * 2)
    entry = len(json.dumps({longest: "a" * 64}))
    assert entry * digest_cache.CACHED_FILES_MAX < digest_cache.CACHE_BYTES_MAX


def test_two_processes_keep_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "weights.json"
    mine, theirs = DigestCache(path), DigestCache(path)
    first, second = (moved(tmp_path.stat(), "st_ino", number) for number in range(2))
    assert mine.get(first) is theirs.get(first) is None
    mine.put(first, "a" * 64)
    theirs.put(second, "b" * 64)
    assert DigestCache(path).get(first) == "a" * 64
    assert DigestCache(path).get(second) == "b" * 64


def test_where_the_cache_lies_by_default() -> None:
    end = Path("ebbtide/weights.json")
    assert default_cache_path({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == "/x" / end
    assert default_cache_path({"HOME": "/h"}) == "/h/.cache" / end
    assert default_cache_path({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == "/h/.cache" / end
    assert default_cache_path({"HOME": "relative"}) is None


def test_the_default_cache_is_used(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    settled(WeightsIdentity(model))
    assert (tmp_path / "xdg" / "ebbtide" / "weights.json").is_file()
