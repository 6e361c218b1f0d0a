"""A disk tier's files over several lives: nothing cut, nothing promised too early, no growth."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.disk_rig import EPOCH, PAGE, DiskRig, StoreOnFiles
from tests.index_rows import changed_index, key_in

from ebbtide.errors import ConfigError
from ebbtide.testing import FAULTS, Fault, SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import directory
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.fsck import check_directory
from ebbtide.tiers.reasons import Miss, Place

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
LENGTH = 3 * PAGE - 100
CAPACITY_BYTES = 16 * MIB


def test_p18_no_opener_truncates_what_another_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOCK_PATIENCE_S", 0.0)
    place = tmp_path / "disk"
    files = (place / "slab", place / "index" / "data.mdb", place / "FORMAT")
    for life in range(3):
        with DiskRig(place, CAPACITY_BYTES, LENGTH) as rig:
            assert rig.held == {key_of(n) for n in range(4 * life)}
            assert rig.put(range(4 * life, 4 * life + 4)) == [None] * 4
            assert rig.flush()
            before = [path.read_bytes() for path in files]
            for _ in range(5):  # the other ranks and replicas
                with pytest.raises(ConfigError, match=r"Another store owns.*owner_pid"):
                    DiskRig(place, CAPACITY_BYTES, LENGTH)
            assert [path.read_bytes() for path in files] == before
    assert check_directory(str(place)).sound == 12


@pytest.mark.parametrize("fault", [fault for fault in FAULTS["write"] if fault is not Fault.FLIP])
def test_p59_of_six_blocks_of_which_the_fourth_fails_three_are_seen_before_and_after(
    fault: Fault, tmp_path: Path
) -> None:
    """Payload and index become visible together: no entry without its bytes, none of the other
    kind either.
    """
    place, chain = tmp_path / "disk", [key_of(n) for n in range(6)]
    bounds = Bounds.for_capacity(8 * PAGE * 3, write_after_s=0.0)
    with StoreOnFiles(
        1, 8 * PAGE * 3, disk_path=str(place), slab_bytes=24 * PAGE, bounds=bounds
    ) as sim:
        sim.put(sim.namespace(), chain[:3], LENGTH)
        assert sim.drain()
        assert sim.slab is not None
        sim.slab.fail_next("write", fault)
        sim.put(sim.namespace(), chain[3:], LENGTH)
        assert not sim.drain()
        assert sim.store.disk is not None
        assert set(sim.store.disk.keys(sim.namespace().epoch)) == set(chain[:3])
        sim.restart(clean=False)
        space = sim.namespace()
        assert sim.store.lookup(space, chain) == bytes([Place.DISK] * 3 + [Miss.NEVER_SEEN] * 3)
        assert sim.get(space, chain[:3]) == [sim.content(space, k, LENGTH) for k in chain[:3]]
    report = check_directory(str(place))
    assert report.is_sound
    assert (report.records, report.sound, report.garbage) == (3, 3, 0)


def test_p52_records_of_all_sizes_that_come_and_go_let_no_file_grow(tmp_path: Path) -> None:
    """The index has 80 bytes of each, whatever its size, so LMDB never looks for room in a row."""
    place, draw = tmp_path / "disk", Random(52)
    slab_bytes = 16 * MIB  # four segments
    with SimStore(
        52,
        256 * PAGE,
        disk_path=str(place),
        slab_bytes=slab_bytes,
        bounds=Bounds.for_capacity(256 * PAGE, write_after_s=0.0),
    ) as sim:
        sizes, stored, grown = (3, 7, 13), 0, []
        spaces = [sim.namespace(name) for name in "abc"]
        for _ in range(6):
            for _ in range(30):
                space, pages = draw.choice(spaces), draw.choice(sizes)
                sim.put(space, [key_of(stored + n) for n in range(8)], pages * PAGE - 100)
                stored += 8
            assert sim.drain()
            grown.append((place / "index" / "data.mdb").stat().st_size)
        disk = sim.store.disk
        assert disk is not None
        assert disk.down is None
        assert disk.evicted > stored / 2
        assert grown[-1] <= 1.25 * grown[2]
        assert disk.space.used_bytes > slab_bytes / 2


def test_p60_what_is_said_to_be_used_is_what_a_recount_finds_after_a_smaller_limit(
    tmp_path: Path,
) -> None:
    """And leftovers of the writer that was killed are gone."""
    place = tmp_path / "disk"
    with DiskRig(place, 32 * MIB, LENGTH) as rig:
        for first in range(0, 2000, 100):
            assert rig.put(range(first, first + 100)) == [None] * 100
        assert rig.flush()
    (place / "FORMAT.new").write_bytes(b"x" * PAGE)
    (place / "index.new").mkdir()
    (place / "index.new" / "data.mdb").write_bytes(b"x" * PAGE)
    with DiskRig(place, CAPACITY_BYTES, LENGTH) as rig:
        space, held = rig.disk.tier.space, rig.held
        assert 500 < len(held) < 2000
        strides = sum(3 * PAGE for key in held if rig.disk.tier.find(EPOCH, key))
        assert space.used_bytes == strides <= space.capacity_bytes
        assert sorted(path.name for path in place.iterdir()) == ["FORMAT", "LOCK", "index", "slab"]
    report = check_directory(str(place))
    assert report.is_sound
    assert report.records == len(held)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 0),
        ("length", 2**32 - 1),
        ("length", LENGTH + 1),
        ("offset", 1),
        ("offset", 1 << 40),
        ("offset", 2**64 - 1),
    ],
)
def test_p81_a_length_or_a_place_that_cannot_be_never_reaches_a_copy(
    field: str, value: int, tmp_path: Path
) -> None:
    """Whoever can write the index names no bytes but those that were stored under the key."""
    place, keys = tmp_path / "disk", [key_of(n) for n in range(4)]
    how: dict[str, Any] = {"disk_path": str(place), "slab_bytes": 64 * PAGE}
    with StoreOnFiles(1, 64 * PAGE, **how) as sim:
        sim.put(sim.namespace(), keys, LENGTH)
        assert sim.drain()
    with changed_index(place / "index") as rows:
        (at,) = [number for number, row in enumerate(rows) if key_in(row) == keys[1]]
        rows[field][at] = value
    with StoreOnFiles(1, 64 * PAGE, **how) as sim:
        space = sim.namespace()
        found = sim.get(space, keys)
        right = [sim.content(space, key, LENGTH) for key in keys]
        assert isinstance(found[1], Miss)
        assert [found[n] for n in (0, 2, 3)] == [right[n] for n in (0, 2, 3)]
        assert sim.store.disk is not None
        assert sim.store.disk.down is None
