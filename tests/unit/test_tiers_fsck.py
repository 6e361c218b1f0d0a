"""`ebbtide fsck`: what it says of a sound directory, of damaged ones, and what a repair leaves."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import lmdb
import pytest
from tests.disk_rig import DiskRig

from ebbtide.errors import ConfigError
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.fsck import check_directory
from ebbtide.tiers.index import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096
MIB = 1 << 20
LENGTH = 3 * PAGE - 77
RECORDS = 40


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with real files and `RECORDS` records, closed in order."""
    with DiskRig(tmp_path / "disk", 16 * MIB, LENGTH) as rig:
        assert rig.put(range(RECORDS)) == [None] * RECORDS
        assert rig.flush()
    return tmp_path / "disk"


class Entries:
    """The raw index of a directory."""

    def __init__(self, place: Path) -> None:
        self._env = lmdb.open(str(place / "index"), max_dbs=4)
        self._db = self._env.open_db(b"records")

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self._env.close()

    def all(self) -> Iterator[tuple[bytes, bytes]]:
        with self._env.begin(db=self._db) as txn:
            yield from [(bytes(name), bytes(value)) for name, value in txn.cursor()]

    def put(self, name: bytes, value: bytes) -> None:
        with self._env.begin(write=True, db=self._db) as txn:
            txn.put(name, value)


def first_offset(place: Path) -> int:
    with Entries(place) as entries:
        _, value = next(entries.all())
    return int(RECORD.unpack(value)[4])


def flip(place: Path, offset: int) -> None:
    with open(place / "slab", "r+b") as slab:
        slab.seek(offset)
        (byte,) = slab.read(1)
        slab.seek(offset)
        slab.write(bytes([byte ^ 0x10]))


def test_a_sound_directory_is_said_to_be(place: Path) -> None:
    report = check_directory(str(place))
    assert report.is_sound
    assert (report.records, report.sound, report.namespaces) == (RECORDS, RECORDS, 1)
    assert report.payload_bytes == RECORDS * LENGTH
    assert report.slab_bytes - report.unused_bytes == RECORDS * 3 * PAGE


def test_looking_changes_nothing(place: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {name: (place / name).read_bytes() for name in ("FORMAT", "slab", "index/data.mdb")}

    before = everything()
    flip(place, first_offset(place))
    changed = everything()
    assert changed["slab"] != before["slab"]
    assert not check_directory(str(place)).is_sound
    assert everything() == changed


def test_p59_one_flipped_bit_is_found_and_a_repair_takes_that_entry_out(place: Path) -> None:
    flip(place, first_offset(place) + LENGTH - 1)
    report = check_directory(str(place), repair=True)
    assert (report.bad, report.sound, report.repaired) == ({"corrupt": 1}, RECORDS - 1, 1)
    again = check_directory(str(place))
    assert again.is_sound
    assert again.records == RECORDS - 1


def test_a_bit_in_the_padding_is_nobodys(place: Path) -> None:
    flip(place, first_offset(place) + LENGTH)
    assert check_directory(str(place)).is_sound


def damaged_entries(values: list[tuple[bytes, bytes]], kind: str) -> dict[bytes, bytes]:
    """Other values for two of the entries."""
    (one, a), (two, b) = values[:2]
    fields_a, fields_b = RECORD.unpack(a), RECORD.unpack(b)
    if kind == "swapped":  # each names the other's slot, all else is its own
        return {
            one: RECORD.pack(*fields_a[:4], fields_b[4], *fields_a[5:]),
            two: RECORD.pack(*fields_b[:4], fields_a[4], *fields_b[5:]),
        }
    if kind == "exchanged":  # whole values: right digests under wrong keys
        return {one: b, two: a}
    if kind == "shared":
        return {two: RECORD.pack(*fields_b[:4], fields_a[4], *fields_b[5:])}
    if kind == "outside":
        return {one: RECORD.pack(*fields_a[:4], 1 << 40, *fields_a[5:])}
    if kind == "longer":
        return {one: RECORD.pack(*fields_a[:3], LENGTH + 1, *fields_a[4:])}
    if kind == "codec":
        return {one: RECORD.pack(7, *fields_a[1:])}
    assert kind == "short"
    return {one: a[:-1]}


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("swapped", {"corrupt": 2}),
        ("exchanged", {"corrupt": 2}),
        ("shared", {"misplaced": 1}),
        ("outside", {"misplaced": 1}),
        ("longer", {"corrupt": 1}),
        ("codec", {"unknown_codec": 1}),
        ("short", {"malformed": 1}),
    ],
)
def test_p81_entries_that_are_not_right_are_told_apart_and_taken_out(
    place: Path, kind: str, bad: dict[str, int]
) -> None:
    with Entries(place) as entries:
        for name, value in damaged_entries(list(entries.all()), kind).items():
            entries.put(name, value)
    report = check_directory(str(place), repair=True)
    found = dict(report.bad)
    if kind == "shared":  # the one that kept the slot may not be the one that wrote it
        found.pop("corrupt", None)
    assert found == bad
    assert check_directory(str(place)).is_sound


def test_what_a_reset_left_is_no_corruption(place: Path) -> None:
    with Entries(place) as entries:
        name, value = next(entries.all())
        entries.put(struct.pack(">I", 77) + name[4:], value)
    report = check_directory(str(place))
    assert report.is_sound
    assert report.garbage == 1


def test_a_truncated_payload_file_is_found(place: Path) -> None:
    with Entries(place) as entries:
        offsets = sorted(RECORD.unpack(value)[4] for _, value in entries.all())
    os.truncate(place / "slab", offsets[RECORDS // 2] + 10)
    report = check_directory(str(place))
    assert not report.is_sound
    assert report.bad == {"truncated": RECORDS - RECORDS // 2}
    assert report.slab_missing_bytes > 0


@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_an_index_that_kills_who_reads_it(place: Path, damage: str) -> None:
    data = place / "index" / "data.mdb"
    if damage == "truncated":
        os.truncate(data, 5000)
    else:
        data.write_bytes(b"\xff" * data.stat().st_size)
    report = check_directory(str(place))
    assert not report.index_usable
    assert not report.is_sound
    assert not check_directory(str(place), repair=True).is_sound
    empty = check_directory(str(place))
    assert empty.is_sound
    assert empty.records == 0


def test_an_index_that_only_lmdb_refuses_is_repaired_alike(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is damaged between the probe and the opening."""
    data = place / "index" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with monkeypatch.context() as patch:
        patch.setattr("ebbtide.tiers.fsck.index_is_sound", lambda path: True)
        assert not check_directory(str(place)).index_usable
        assert not check_directory(str(place), repair=True).index_usable
    assert check_directory(str(place)).is_sound


def test_what_is_no_directory_of_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="no directory of a disk tier"):
            check_directory(str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.tiers.directory.LOCK_PATIENCE_S", 0.05)
    owner = Directory.existing(str(place))
    with pytest.raises(ConfigError, match="Another store owns"):
        check_directory(str(place))
    owner.close()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ebbtide", "fsck", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_says_what_it_found_and_ends_with_3_for_corruption(place: Path) -> None:
    sound = command(str(place))
    assert (sound.returncode, sound.stderr) == (0, "")
    assert f"{RECORDS} sound" in sound.stdout
    flip(place, first_offset(place))
    found = command(str(place), "--json")
    assert found.returncode == 3
    assert json.loads(found.stdout)["bad"] == {"corrupt": 1}
    assert command(str(place), "--repair").returncode == 3
    assert command(str(place)).returncode == 0
    assert command(str(place / "nothing")).returncode == 2
