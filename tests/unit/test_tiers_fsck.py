"""`ebbtide fsck`: what it says of a sound directory, of damaged ones, and what a repair leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import lmdb
import pytest
from tests.disk_rig import DiskRig
from tests.index_rows import changed_index, index_rows

from ebbtide.errors import ConfigError
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.fsck import check_directory

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.tiers.index_page import Rows

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


def first_offset(place: Path) -> int:
    return int(index_rows(place / "index")["offset"][0])


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


def damage(rows: Rows, kind: str) -> None:
    """Change the first rows, or one."""
    one, two = rows[0], rows[1]
    if kind == "swapped":  # each names the other's slot, all else is its own
        rows["offset"][:2] = two["offset"], one["offset"]
    elif kind == "exchanged":  # right digests under wrong keys
        rows["key"][:2] = rows["key"][:2][::-1].copy()
    elif kind == "overlapping":  # where the second record of another size would be
        two["length"] = 2 * PAGE
        two["offset"] -= PAGE
    elif kind == "outside":
        one["offset"] = 1 << 40
    elif kind == "longer":
        one["length"] = LENGTH + 1
    elif kind == "codec":
        one["head"] |= 7
    elif kind == "wide":
        one["tail"] |= 200 << 56
    else:
        assert kind == "padding"
        two["key"] = b"k" * 36
        two["tail"] = 20 << 56


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("swapped", {"misplaced": 2}),
        ("exchanged", {"corrupt": 2}),
        ("overlapping", {"misplaced": 1}),
        ("outside", {"misplaced": 1}),
        ("longer", {"corrupt": 1}),
        ("codec", {"unknown_codec": 1}),
        ("wide", {"malformed": 1}),
        ("padding", {"malformed": 1}),
    ],
)
def test_p81_entries_that_are_not_right_are_told_apart_and_taken_out(
    place: Path, kind: str, bad: dict[str, int]
) -> None:
    with changed_index(place / "index") as rows:
        damage(rows, kind)
    report = check_directory(str(place), repair=True)
    assert report.bad == bad
    assert report.repaired == sum(bad.values())
    after = check_directory(str(place))
    assert after.is_sound
    assert after.sound == RECORDS - report.repaired


def test_what_is_no_page_is_taken_out(place: Path) -> None:
    with lmdb.open(str(place / "index"), max_dbs=4) as env:
        pages = env.open_db(b"records")
        with env.begin(write=True, db=pages) as txn:
            ((name, value),) = [(bytes(name), bytes(value)) for name, value in txn.cursor()]
            txn.put(name, value[:-1])
            txn.put(b"of another length", value)
            txn.put(b"\xff" * 8, value)  # a page that no slab has
    report = check_directory(str(place), repair=True)
    assert (report.bad, report.records, report.repaired) == ({"unreadable_page": 3}, 0, 3)
    assert check_directory(str(place)).is_sound


def test_what_a_reset_left_is_no_corruption(place: Path) -> None:
    with changed_index(place / "index") as rows:
        rows["epoch"][0] = 77
    report = check_directory(str(place))
    assert report.is_sound
    assert report.garbage == 1


def test_a_truncated_payload_file_is_found(place: Path) -> None:
    offsets = index_rows(place / "index")["offset"].tolist()
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
