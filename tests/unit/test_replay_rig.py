"""The rig: capacities by size and by exact count, contents that show every mix-up, a clean end."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ebbtide.bench.records import RecordContents, block_key
from ebbtide.bench.rig import Capacity, Rig, arena_bytes_for, disk_bytes_for, parse_capacity
from ebbtide.errors import ConfigError
from ebbtide.sizes import GIB, KIB, MIB
from ebbtide.tiers.directory import Geometry
from ebbtide.tiers.segments import SegmentSpace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("256MiB", Capacity(256 * MIB, None)),
        ("3655records", Capacity(None, 3655)),
        (" 12 records ", Capacity(None, 12)),
    ],
)
def test_a_capacity_is_a_size_or_a_count(text: str, capacity: Capacity) -> None:
    assert parse_capacity(text) == capacity


@pytest.mark.parametrize("text", ["0records", "1.5records", "-3records", "12record", "12", ""])
def test_what_is_no_capacity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_capacity(text)


@pytest.mark.parametrize("record_bytes", [1, 4 * KIB, 16 * KIB, 128 * KIB, 1 * MIB])
@pytest.mark.parametrize("records", [4, 100, 3655, 9139, 18279, 70_001])
def test_an_arena_holds_exactly_what_was_counted(records: int, record_bytes: int) -> None:
    space: SegmentSpace[Any] = SegmentSpace(arena_bytes_for(records, record_bytes))
    assert space.slots_for(record_bytes) == records


@pytest.mark.parametrize("record_bytes", [12 * KIB, 100_000, 3 * MIB, 48 * MIB])
def test_odd_record_sizes_get_exactly_the_count_or_an_error(record_bytes: int) -> None:
    found = 0
    for records in range(5, 2000, 37):
        try:
            size = arena_bytes_for(records, record_bytes)
        except ConfigError:
            continue
        found += 1
        assert SegmentSpace[Any](size).slots_for(record_bytes) == records
    assert found > 10


def test_a_record_that_no_small_arena_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="No arena holds exactly 3 records"):
        arena_bytes_for(3, 32 * MIB)


@pytest.mark.parametrize("record_bytes", [4 * KIB, 100_000, 2 * MIB, 64 * MIB])
@pytest.mark.parametrize("records", [1, 100, 20_000])
def test_a_disk_for_a_count_has_slots_and_index_to_spare(records: int, record_bytes: int) -> None:
    plan = Geometry.plan(disk_bytes_for(records, record_bytes))
    space: SegmentSpace[Any] = SegmentSpace(plan.slab_bytes, segment_bytes=plan.segment_bytes)
    assert plan.records_max > records
    assert space.slots_for(record_bytes) > records


def test_a_disk_record_larger_than_any_segment_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        disk_bytes_for(10, 65 * MIB)


@pytest.mark.parametrize("record_bytes", [1, 13, 4096, 10_000])
def test_every_mix_up_of_records_is_seen(record_bytes: int) -> None:
    arena = bytearray(4 * 16_384)
    contents = RecordContents(memoryview(arena), record_bytes)
    first, second = block_key(1), block_key(2)
    contents.write(first, 0)
    contents.write(second, 16_384)
    assert contents.wrong_bytes(first, 0) == 0
    assert contents.wrong_bytes(second, 16_384) == 0
    assert not any(arena[record_bytes:16_384])  # nothing behind the record was written
    if record_bytes < 100:
        return  # so few bytes may agree by chance
    for key, offset in [(first, 16_384), (second, 0), (first, 8), (first, 32_768)]:
        assert contents.wrong_bytes(key, offset) > 0.9 * record_bytes
    for place in (0, record_bytes // 2, record_bytes - 1):
        arena[place] ^= 1
        assert contents.wrong_bytes(first, 0) == 1
        arena[place] ^= 1


def test_keys_are_as_wide_as_an_engines_and_distinct() -> None:
    keys = {block_key(number) for number in range(5000)} | {block_key(2**63 + 65_536)}
    assert len(keys) == 5001
    assert {len(key) for key in keys} == {36}
    seeds = np.array([int.from_bytes(key[:8], "little") for key in keys], dtype=np.uint64)
    assert len(np.unique(seeds)) == 5001


def test_a_temporary_directory_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rig = Rig(Capacity(None, 100), Capacity(None, 50), 4 * KIB)
    assert rig.records_max() == {"memory": 100, "disk": 50}
    assert len(os.listdir(tmp_path)) == 1
    rig.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("memory", "record_bytes"),
    [(Capacity(1 << 50, None), 4 * KIB), (Capacity(8 * MIB, None), 5 * MIB)],
    ids=["more memory than there is", "a record larger than the memory's pieces"],
)
def test_what_cannot_work_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Capacity, record_bytes: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError):
        Rig(memory, Capacity(GIB // 16, None), record_bytes)
    assert not os.listdir(tmp_path)
