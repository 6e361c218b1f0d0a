"""A thousand damages to what lies on disk: each one a counted miss, never a wrong byte, and never
the miss of a record that was left alone.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.disk_rig import StoreOnFiles
from tests.index_rows import changed_index

from ebbtide.testing import SimStore
from ebbtide.tiers import slab
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ebbtide.tiers.index_page import Rows

PAGE = 4096
MISSES = (Miss.CORRUPT, Miss.NEVER_SEEN, Miss.OTHER_NAMESPACE)
LENGTH = PAGE - 100
SLOTS = 2048
HASHES = 40
GROUPS = 2
SPACES = ("seed:0", "seed:1")
ROUNDS = 8
DAMAGED = 12  # records, in a round
DAMAGES_WANTED = 1000  # over all kinds
MIB = 1 << 20

Name = tuple[str, bytes]  # of a record: namespace and key


def keys() -> list[bytes]:
    """The same hashes in both groups."""
    return [
        number.to_bytes(32, "big") + group.to_bytes(4, "big")
        for number in range(HASHES)
        for group in range(GROUPS)
    ]


def names() -> list[Name]:
    return [(space, key) for space in SPACES for key in keys()]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="ebbtide")


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimStore]:
    """Every key in two namespaces, all on disk, and the store closed in order."""
    with SimStore(
        11,
        256 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=SLOTS * PAGE,
        bounds=Bounds.for_capacity(256 * PAGE, write_after_s=0.0),
    ) as store:
        fill(store)
        yield store


def fill(sim: SimStore) -> None:
    for space in SPACES:
        sim.put(sim.namespace(space), keys(), LENGTH)
    assert sim.drain()


class Closed:
    """The directory and the device of a closed store, to be damaged."""

    def __init__(self, sim: SimStore, draw: Random) -> None:
        self.draw = draw
        self._device = sim.device
        self.places = dict(self._find(sim))
        self.index_path = Path(str(sim.disk_path)) / "index"

    def _find(self, sim: SimStore) -> Iterator[tuple[Name, tuple[int, int]]]:
        disk = sim.store.disk
        assert disk is not None
        for space in SPACES:
            epoch = sim.namespace(space).epoch
            for record in disk.index.records_of(epoch):
                yield (space, record.key), (epoch, record.offset)

    def some(self, count: int) -> list[Name]:
        return self.draw.sample(sorted(self.places), count)

    def payload(self, name: Name) -> bytes:
        offset = self.places[name][1]
        return bytes(self._device.image[offset : offset + LENGTH])

    def write(self, name: Name, payload: bytes, at: int = 0) -> None:
        offset = self.places[name][1] + at
        for part in (self._device.image, self._device._stable):
            part[offset : offset + len(payload)] = payload

    def swap(self, one: Name, two: Name) -> None:
        first, second = self.payload(one), self.payload(two)
        self.write(one, second)
        self.write(two, first)

    def cut(self, offset: int) -> None:
        size = len(self._device.image)
        self._device.resize(offset)
        self._device.resize(size)

    @contextmanager
    def rows(self) -> Iterator[tuple[Rows, dict[Name, int]]]:
        """The index, to be changed, and where in it each record is."""
        at = {place: name for name, place in self.places.items()}
        with changed_index(self.index_path) as rows:
            places = zip(rows["epoch"].tolist(), rows["offset"].tolist(), strict=True)
            yield rows, {at[place]: number for number, place in enumerate(places)}


def flip_bits(closed: Closed) -> set[Name]:
    found = closed.some(DAMAGED)
    for name in found:
        at = closed.draw.randrange(LENGTH)
        byte = closed.payload(name)[at] ^ (1 << closed.draw.randrange(8))
        closed.write(name, bytes([byte]), at)
    return set(found)


def swap_slots(closed: Closed) -> set[Name]:
    found = closed.some(DAMAGED)
    for one, two in zip(found[::2], found[1::2], strict=True):
        closed.swap(one, two)
    return set(found)


def swap_groups(closed: Closed) -> set[Name]:
    """The same hash in the other KV group."""
    found: set[Name] = set()
    for space, key in closed.some(DAMAGED):
        other = (space, key[:32] + (1 - int.from_bytes(key[32:], "big")).to_bytes(4, "big"))
        if not found & {(space, key), other}:
            closed.swap((space, key), other)
            found |= {(space, key), other}
    return found


def swap_namespaces(closed: Closed) -> set[Name]:
    """The same key of another model."""
    found: set[Name] = set()
    for _, key in closed.some(DAMAGED):
        one, two = ((each, key) for each in SPACES)
        if one not in found:
            closed.swap(one, two)
            found |= {one, two}
    return found


def exchange_keys(closed: Closed) -> set[Name]:
    """Offset, length and digest of another key: an index that mixes two records up."""
    found = closed.some(DAMAGED)
    with closed.rows() as (rows, at):
        ones, twos = [at[name] for name in found[::2]], [at[name] for name in found[1::2]]
        for field in ("epoch", "key"):
            rows[field][ones + twos] = rows[field][twos + ones]
    return set(found)


def exchange_rows(closed: Closed) -> set[Name]:
    """Rows in each other's place: an index whose pages were mixed up."""
    found = closed.some(DAMAGED)
    with closed.rows() as (rows, at):
        ones, twos = [at[name] for name in found[::2]], [at[name] for name in found[1::2]]
        rows[ones + twos] = rows[twos + ones]
    return set(found)


def copy_keys(closed: Closed) -> set[Name]:
    """Two rows that claim one key: the one stored last is asked for it."""
    found = closed.some(DAMAGED)
    with closed.rows() as (rows, at):
        for one, two in zip(found[::2], found[1::2], strict=True):
            for field in ("epoch", "key"):
                rows[field][at[one]] = rows[field][at[two]]
            rows["tail"][at[one]] = rows["tail"].max() + 1  # the sequence
    return set(found)


def break_rows(closed: Closed) -> set[Name]:
    """Keys of lengths that no key has, or with something behind their end."""
    found = closed.some(DAMAGED)
    with closed.rows() as (rows, at):
        for number, name in enumerate(found):
            width = 20 if number % 2 and any(name[1][20:]) else 200
            rows["tail"][at[name]] = int(rows["tail"][at[name]]) & (1 << 56) - 1 | width << 56
    return set(found)


def point_elsewhere(closed: Closed) -> set[Name]:
    """At slots that nobody has written, or no longer."""
    found = closed.some(DAMAGED)
    free = sorted(set(range(0, SLOTS * PAGE, PAGE)) - {at for _, at in closed.places.values()})

    with closed.rows() as (rows, at):
        rows["offset"][[at[name] for name in found]] = closed.draw.sample(free, DAMAGED)
    return set(found)


def keep_old_payload(closed: Closed) -> set[Name]:
    """A write that never reached the medium: the slot still has what was there before."""
    found = closed.some(DAMAGED)
    for name in found:
        kept = closed.draw.randrange(1, LENGTH)
        closed.write(name, bytes(LENGTH - kept), kept)
    return set(found)


def truncate(closed: Closed) -> set[Name]:
    offsets = sorted(offset for _, offset in closed.places.values())
    border = offsets[-DAMAGED] + closed.draw.randrange(LENGTH - 8)
    closed.cut(border)
    return {name for name, (_, offset) in closed.places.items() if offset + LENGTH > border}


KINDS = [
    flip_bits,
    swap_slots,
    swap_groups,
    swap_namespaces,
    exchange_keys,
    exchange_rows,
    copy_keys,
    break_rows,
    point_elsewhere,
    keep_old_payload,
    truncate,
]


@pytest.mark.parametrize("damage", KINDS)
def test_p64_each_damage_is_a_counted_miss_and_costs_nothing_else(
    sim: SimStore, damage: Callable[[Closed], set[Name]]
) -> None:
    made = 0
    for round_number in range(ROUNDS):
        closed = Closed(sim, Random(f"{damage.__name__} {round_number}"))
        sim.close(clean=True)
        damaged = damage(closed)
        assert len(damaged) >= DAMAGED // 2
        made += len(damaged)
        sim._open()
        disk = sim.store.disk
        assert disk is not None
        for space in SPACES:
            namespace = sim.namespace(space)
            for key in keys():
                (found,) = sim.get(namespace, [key])
                if (space, key) in damaged:
                    assert found in MISSES, found
                else:
                    assert found == sim.content(namespace, key, LENGTH)
        assert disk.down is None
        assert disk.corrupt + sim.open_disk.dropped == len(damaged)  # type: ignore[union-attr]
        fill(sim)  # what was missed is stored again
        sim.restart()
    assert made >= DAMAGES_WANTED // len(KINDS)


def test_the_index_of_another_directory_brings_no_wrong_byte(sim: SimStore, tmp_path: Path) -> None:
    """The same keys, other namespaces behind the same epochs, other slots."""
    with SimStore(
        12,
        256 * PAGE,
        disk_path=str(tmp_path / "other"),
        slab_bytes=SLOTS * PAGE,
        bounds=Bounds.for_capacity(256 * PAGE, write_after_s=0.0),
    ) as other:
        for space in reversed(SPACES):
            other.put(other.namespace(space), keys()[::-1], LENGTH)
        assert other.drain()
    sim.close(clean=True)
    shutil.rmtree(f"{sim.disk_path}/index")
    shutil.copytree(tmp_path / "other" / "index", f"{sim.disk_path}/index")
    sim._open()
    wrong = 0
    for space in SPACES:
        namespace = sim.namespace(space)
        for key in keys():
            (found,) = sim.get(namespace, [key])
            if isinstance(found, bytes):
                assert found == sim.content(namespace, key, LENGTH)
            else:
                wrong += 1
    assert wrong > 0


@pytest.mark.parametrize("direct", [True, False])
def test_p40_a_slab_that_is_cut_while_it_is_open_costs_its_records_and_no_more(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is a miss, what is stored afterwards is right, also after a restart."""
    if not direct:
        monkeypatch.setattr(slab, "_direct_works", lambda fd, size: False)
    with StoreOnFiles(
        13,
        16 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=SLOTS * PAGE,
        bounds=Bounds.for_capacity(16 * PAGE, write_after_s=0.0),
    ) as sim:
        fill(sim)
        space, disk = sim.namespace(SPACES[0]), sim.store.disk
        assert disk is not None
        assert disk.slab.direct is direct
        records = disk.index.records_of(space.epoch)
        border = sorted(record.offset for record in records)[len(records) // 2]
        gone = {record.key for record in records if record.offset >= border}
        in_memory = {key for key in keys() if sim.store.memory.find(space.epoch, key)}
        os.truncate(tmp_path / "d" / "slab", border)
        for key in keys():
            (found,) = sim.get(space, [key])
            if key in gone - in_memory:
                assert found == Miss.IO_ERROR
            else:
                assert found == sim.content(space, key, LENGTH)
        assert len(gone - in_memory) > len(records) // 4
        assert (disk.down, disk.corrupt) == (None, 0)
        fill(sim)
        assert sim.restart()
        for name in SPACES:
            space = sim.namespace(name)
            for key in keys():
                (found,) = sim.get(space, [key])
                assert found in (sim.content(space, key, LENGTH), Miss.CORRUPT)
                assert name == SPACES[1] or isinstance(found, bytes)
