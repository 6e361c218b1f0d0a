"""`ebbtide purge` without a store: names, the order of its steps, and what it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from tests.disk_rig import NAMESPACE, DiskRig, payload_of
from tests.index_rows import changed_index, index_rows

from ebbtide.chosen import choose
from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.fsck import check_directory
from ebbtide.tiers.index import DurableIndex, IndexBatch, StoredNamespace
from ebbtide.tiers.index_page import Entry, entries_of, rows_of_entries
from ebbtide.tiers.offline import open_offline
from ebbtide.tiers.purge_offline import Purged, purge_offline

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
MIB = 1 << 20
LENGTH = 3 * PAGE - 77
RECORDS = 20
OTHER = StoredNamespace(bytes(range(32)), 7, [["model", "other"]])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """`RECORDS` records of one namespace, closed in order."""
    with DiskRig(tmp_path / "disk", 16 * MIB, LENGTH) as rig:
        assert rig.put(range(RECORDS)) == [None] * RECORDS
        assert rig.flush()
    return tmp_path / "disk"


def entries(place: Path) -> list[Entry]:
    return entries_of(index_rows(place / "index"))


def change(place: Path, *added: Entry, namespace: StoredNamespace | None = None) -> None:
    with closing(DurableIndex(str(place / "index"), MIB, MIB)) as index:
        batch = IndexBatch()
        if namespace is not None:
            batch.put_namespace(namespace)
        batch.add(rows_of_entries(added))
        index.commit(batch)


def purge(place: Path, digest: bytes = NAMESPACE.digest) -> Purged:
    with open_offline(str(place)) as (directory, index):
        return purge_offline(directory, index, [digest])[digest]


def traces(place: Path) -> int:
    """How many payloads lie anywhere in the file."""
    slab = (place / "slab").read_bytes()
    return sum(payload_of(key_of(number), LENGTH)[:500] in slab for number in range(RECORDS))


def test_nothing_is_left_and_the_directory_is_sound(place: Path) -> None:
    assert traces(place) == RECORDS
    assert purge(place) == Purged(RECORDS, RECORDS * LENGTH, 0)
    assert traces(place) == 0
    assert entries(place) == []
    report = check_directory(str(place))
    assert report.is_sound
    assert (report.records, report.namespaces) == (0, 1)
    with closing(Directory.existing(str(place))) as directory:
        assert directory.index_is_untouched
        directory.say_goodbye()
    with DiskRig(place, 16 * MIB, LENGTH) as rig:
        assert rig.put(range(RECORDS)) == [None] * RECORDS
        assert rig.flush()
    assert check_directory(str(place)).sound == RECORDS


def test_another_namespace_is_left_alone(place: Path) -> None:
    lent = entries(place)[:5]
    change(place, *(entry._replace(epoch=7) for entry in lent), namespace=OTHER)
    before = {entry.offset: read(place, entry) for entry in lent}
    assert purge(place).disk_records == RECORDS - 5
    assert {entry.offset: read(place, entry) for entry in lent} == before
    assert {entry.epoch for entry in entries(place)} == {7}
    assert traces(place) == 5
    assert purge(place, OTHER.digest).disk_records == 5
    assert traces(place) == 0


def read(place: Path, entry: Entry) -> bytes:
    with open(place / "slab", "rb") as slab:
        return os.pread(slab.fileno(), entry.length, entry.offset)


@pytest.mark.parametrize("shift", [-2 * PAGE, 0, 2 * PAGE])
def test_a_slot_that_another_entry_claims_too_is_not_overwritten(place: Path, shift: int) -> None:
    change(place, namespace=OTHER)
    with changed_index(place / "index") as rows:
        rows["epoch"][0] = 7
        rows["offset"][0] = int(rows["offset"][RECORDS // 2]) + shift
    (claim,) = [entry for entry in entries(place) if entry.epoch == 7]
    before = read(place, claim)
    assert purge(place).kept_slots == (1 if shift == 0 else 2)
    assert read(place, claim) == before


def test_a_slot_outside_the_file_is_not_written(place: Path) -> None:
    size = (place / "slab").stat().st_size
    with changed_index(place / "index") as rows:
        rows["offset"][:2] = size, (1 << 64) - PAGE
    assert purge(place).kept_slots == 2
    assert (place / "slab").stat().st_size == size
    assert entries(place) == []


def test_a_purge_that_is_cut_short_brings_nothing_back_and_can_be_run_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def fail(fd: int, data: bytes, offset: int) -> int:
        if len(data) < PAGE:  # the lock file's text
            return real(fd, data, offset)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(TierUnavailableError, match="cannot be overwritten"):
            purge(place)
    report = check_directory(str(place))
    assert (report.sound, report.garbage) == (0, RECORDS)
    assert traces(place) == RECORDS
    purge(place)
    assert traces(place) == 0
    assert entries(place) == []


def test_entries_go_only_after_the_zeros_are_synced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for owner, name in ((os, "pwrite"), (os, "fdatasync"), (DurableIndex, "commit")):
        watch(monkeypatch, owner, name, steps)
    watch(monkeypatch, DurableIndex, "remove", steps)
    purge(place)
    order = [step for number, step in enumerate(steps) if number == 0 or step != steps[number - 1]]
    order = order[order.index("commit") :]
    assert order[:4] == ["commit", "pwrite", "fdatasync", "remove"]


def watch(patch: pytest.MonkeyPatch, owner: object, name: str, steps: list[str]) -> None:
    real = getattr(owner, name)

    def recorded(*args: object) -> object:
        steps.append(name)
        return real(*args)

    patch.setattr(owner, name, recorded)


# -- names ----------------------------------------------------------------------------------------

A, B, C = bytes.fromhex("aabbcc01" * 8), bytes.fromhex("aabbcc02" * 8), bytes.fromhex("11" * 32)
KNOWN: dict[bytes, dict[str, str | int]] = {A: {"model": "a"}, B: {"model": "b"}, C: {}}


def test_a_name_is_so_many_digits_as_leave_one_namespace() -> None:
    assert choose(KNOWN, "aabbcc01") == [A]
    assert choose(KNOWN, "AABBCC02aabb") == [B]
    assert choose(KNOWN, C.hex()) == [C]
    assert choose(KNOWN, None) == [A, B, C]
    assert choose({}, None) == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("aabbcc", "Several namespaces begin with these digits"),
        ("aabbcc03", "no such namespace"),
        ("aabbc", "6 hex digits"),
        ("", "6 hex digits"),
        ("aabbccxy", "6 hex digits"),
        (A.hex() + "00", "no such namespace"),
    ],
)
def test_any_other_name_is_refused_and_the_right_ones_are_shown(wanted: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        choose(KNOWN, wanted)
    if "hex" not in words:
        assert "(a), " in caught.value.next_step
        assert "(b)" in caught.value.next_step


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ebbtide", "purge", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_purges_by_name_and_by_all(place: Path) -> None:
    name = NAMESPACE.digest.hex()[:12]
    for words in (["--namespace", "abcdef"], [], ["--namespace", name, "--all"]):
        refused = command(str(place), *words)
        assert refused.returncode == 2
        assert refused.stdout == ""
    assert f"Known are: {name} (made-up)" in command(str(place), "--namespace", "abcdef").stderr
    done = command(str(place), "--namespace", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{name}: forgotten and overwritten: {RECORDS} records on disk" in done.stdout
    assert traces(place) == 0
    again = json.loads(command(str(place), "--all", "--json").stdout)
    assert [one["disk_records"] for one in again["namespaces"]] == [0]
    assert command(str(place / "nothing"), "--all").returncode == 2
