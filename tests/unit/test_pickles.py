"""Pickles where ebbtide reads bytes that others may have written: garbage, and never run."""

from __future__ import annotations

import logging
import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import lmdb
import pytest
from tests.disk_rig import EPOCH, DiskRig

from ebbtide import cli
from ebbtide.errors import ConfigError
from ebbtide.testing.conformance import key_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = 4096
CAPACITY_BYTES = 16 << 20


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return (open, (self._marker, "w"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def pickled(marker: Path) -> bytes:
    found = pickle.dumps(Trap(marker), 0)  # the one that can also be text
    pickle.loads(found).close()  # it would work
    assert marker.exists()
    marker.unlink()
    return found


def in_file(name: str) -> Callable[[Path, bytes], None]:
    def plant(place: Path, data: bytes) -> None:
        (place / name).write_bytes(data)

    return plant


def in_slots(place: Path, data: bytes) -> None:
    size = (place / "slab").stat().st_size
    (place / "slab").write_bytes((data + bytes(PAGE - len(data))) * (size // PAGE))


def in_index(database: bytes) -> Callable[[Path, bytes], None]:
    """Every value, and one more."""

    def plant(place: Path, data: bytes) -> None:
        with lmdb.open(str(place / "index"), max_dbs=4) as env:
            found = env.open_db(database)
            with env.begin(write=True, db=found) as txn:
                for name in [bytes(name) for name, _ in txn.cursor()]:
                    txn.put(name, data)
                txn.put(b"recency/00000000", data + bytes(-len(data) % 8))

    return plant


PLACES = {
    "FORMAT": in_file("FORMAT"),
    "LOCK": in_file("LOCK"),
    "data.mdb": in_file("index/data.mdb"),
    "slab": in_slots,
    **{name: in_index(name.encode()) for name in ("records", "namespaces", "meta")},
}


@pytest.mark.parametrize("where", PLACES)
def test_p83_a_pickle_anywhere_in_a_directory_is_garbage(
    where: str, tmp_path: Path, pickled: bytes, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    place = tmp_path / "disk"
    with DiskRig(place, CAPACITY_BYTES, PAGE) as rig:
        assert rig.put(range(4)) == [None] * 4
        assert rig.flush()
    PLACES[where](place, pickled)
    for verb in ("fsck", "stats"):
        cli.main([verb, str(place)])
    with DiskRig(place, CAPACITY_BYTES, PAGE) as rig:
        assert rig.held <= {key_of(n) for n in range(4)}
        assert rig.disk.tier.find(EPOCH, key_of(9)) is None
        assert rig.put(range(4, 8)) == [None] * 4
        assert rig.flush()
        assert {key_of(n) for n in range(4, 8)} <= rig.held
    with suppress(ConfigError):
        cli.main(["purge", str(place), "--all"])
    assert not marker.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["config", "check", "FILE"],
        ["config", "show", "--file", "FILE"],
        ["serve", "--config", "FILE"],
        ["doctor", "--config", "FILE"],
        ["replay", "FILE"],
        ["serve", "--extra", "TEXT"],
        ["doctor", "--kv-transfer-config", "TEXT"],
    ],
)
def test_p83_a_pickle_given_to_a_command_is_refused(
    words: list[str], tmp_path: Path, pickled: bytes, marker: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(pickled)
    given = {"FILE": str(file), "TEXT": pickled.decode()}
    assert cli.main([given.get(word, word) for word in words]) != 0
    assert not marker.exists()
