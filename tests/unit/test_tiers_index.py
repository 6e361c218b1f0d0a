"""The durable index: golden bytes of its format, and that it does what the documentation says."""

from __future__ import annotations

import struct
from contextlib import closing
from typing import TYPE_CHECKING, Any

import cbor2
import lmdb
import numpy as np
import pytest
import xxhash

from ebbtide.testing import keyed_bytes
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.index import (
    CLOCK_START_S,
    MINUTE_MAX,
    RECENCY_CHUNK,
    DurableIndex,
    IndexBatch,
    StoredNamespace,
    minute_of,
)
from ebbtide.tiers.index_page import (
    Entry,
    are_formed,
    are_records,
    codecs_of,
    columns_of,
    entries_of,
    positions_of,
    rows_of,
    rows_of_entries,
    sequences_of,
)
from ebbtide.tiers.index_probe import index_is_sound
from ebbtide.tiers.record_table import keys_of

if TYPE_CHECKING:
    from pathlib import Path

MAP_BYTES = 4 << 20
STRIDE = 12_288  # of `ENTRY`
KEY = bytes(range(32)) + (7).to_bytes(4, "big")  # block hash + KV group
ENTRY = Entry(
    epoch=0x01020304,
    key=KEY,
    codec=0,
    length=10_496,
    offset=0x1_0010_2000,
    sequence=0x0A0B,
    digest=bytes(range(0xF0, 0x100)),
    minute=0x2F_1E0D,
)
# As `docs/disk-format.md` has it: nothing here is computed by the code under test.
SEGMENT_BYTES = 4 << 20
GOLDEN_PAGE = "0000000004000001"  # segment 1024; of its slots the 52nd to the 102nd
GOLDEN_NUMBER = 35  # slot 86
GOLDEN_ROW = (
    bytes(range(32)).hex()  # block hash
    + "00000007"  # KV group
    "00"  # codec
    "0d1e2f"  # minute
    "04030201"  # epoch
    "00290000"  # length
    "0020100001000000"  # offset
    "0b0a0000000000"  # sequence
    "24"  # bytes of the key
    "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"  # digest
)


def raw(path: Path, database: bytes) -> dict[bytes, bytes]:
    """What any LMDB reader finds."""
    with closing(lmdb.open(str(path), max_dbs=4, readonly=True, lock=False)) as env:
        found = env.open_db(database, create=False)
        with env.begin(db=found) as txn:
            return {bytes(name): bytes(value) for name, value in txn.cursor()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


def batch_of(*entries: Entry) -> IndexBatch:
    batch = IndexBatch()
    batch.add(rows_of_entries(entries))
    return batch


def remove(batch: IndexBatch, *entries: Entry) -> None:
    offsets = np.array([entry.offset for entry in entries])
    batch.remove(offsets, np.array([entry.length for entry in entries]))


def neighbour(distance: int) -> Entry:
    """What could lie so many slots behind `ENTRY`."""
    return ENTRY._replace(
        key=bytes([distance % 256]) * 20,
        offset=ENTRY.offset + distance * STRIDE,
        sequence=ENTRY.sequence + distance,
    )


def test_p52_a_row_of_the_index_is_these_80_bytes(path: Path) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        index.commit(batch_of(ENTRY))
        assert index.entries() == [ENTRY]
    page = bytes(80 * GOLDEN_NUMBER) + bytes.fromhex(GOLDEN_ROW)
    assert raw(path, b"records") == {bytes.fromhex(GOLDEN_PAGE): page}


def test_a_page_has_51_slots_and_ends_with_its_last_record(path: Path) -> None:
    first = -GOLDEN_NUMBER  # of the page
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        index.commit(batch_of(*(neighbour(n) for n in range(first - 1, first + 52))))
        assert len(index.entries()) == 53
    name = int(GOLDEN_PAGE, 16)
    found = raw(path, b"records")
    assert {int.from_bytes(page, "big"): len(value) // 80 for page, value in found.items()} == {
        name - 1: 51,  # one record, in the last row
        name: 51,
        name + 1: 1,
    }
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        batch = IndexBatch()
        remove(batch, *(neighbour(n) for n in range(first - 1, first + 52) if n != first))
        index.commit(batch)
        assert index.entries() == [neighbour(first)]
    assert [len(value) for value in raw(path, b"records").values()] == [80]


def test_a_slot_without_a_record_is_a_row_of_zeros(path: Path) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        index.commit(batch_of(*(neighbour(n) for n in range(3))))
        batch = IndexBatch()
        remove(batch, neighbour(1))
        index.commit(batch)
    (page,) = raw(path, b"records").values()
    empty = (GOLDEN_NUMBER + 1) * 80
    assert page[empty : empty + 80] == bytes(80)
    assert page[empty - 80 : empty].strip(b"\0")
    assert page[empty + 80 :].strip(b"\0")


def test_a_page_fills_one_of_lmdbs(path: Path) -> None:
    """With 16 bytes of LMDB's own: one more row would double what a change costs."""
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        first = -GOLDEN_NUMBER
        index.commit(batch_of(*(neighbour(n) for n in range(first, first + 51))))
        with index._env.begin() as txn:
            assert txn.stat(index._records)["overflow_pages"] == 1


@pytest.mark.parametrize("codec", [0, 1, 255])
@pytest.mark.parametrize("width", [1, 20, 36])
def test_rows_say_what_was_said_to_them(codec: int, width: int) -> None:
    entry = ENTRY._replace(key=KEY[:width], codec=codec, sequence=2**56 - 1, minute=MINUTE_MAX)
    rows = rows_of_entries([entry, ENTRY])
    assert entries_of(rows) == [entry, ENTRY]
    assert codecs_of(rows).tolist() == [codec, 0]
    assert are_records(rows).all()
    assert are_formed(rows).all()
    raw_only = rows_of_entries([entry._replace(codec=0), ENTRY])
    assert rows_of(columns_of(raw_only)).tobytes() == raw_only.tobytes()


def test_a_slot_that_cannot_be_has_no_position() -> None:
    impossible = [
        ENTRY._replace(offset=ENTRY.offset + 4096),
        ENTRY._replace(length=0),
        ENTRY._replace(offset=2**64 - 4096),
    ]
    positions = positions_of(rows_of_entries([ENTRY, *impossible]), SEGMENT_BYTES)
    assert positions.tolist() == [int(GOLDEN_PAGE, 16) * 64 + GOLDEN_NUMBER, -1, -1, -1]


def test_an_age_is_minutes_and_a_clock_that_is_not_set_tells_none() -> None:
    assert [minute_of(CLOCK_START_S + s) for s in (59, 60, 119, 600)] == [0, 1, 1, 10]
    assert minute_of(0.0) == 0
    assert minute_of(CLOCK_START_S + 60 * 2**25) == MINUTE_MAX


def test_a_namespace_is_a_cbor_map(path: Path) -> None:
    stored = StoredNamespace(bytes(32), 9, [["format", 1], ["layers", ["0", "1"]]])
    batch = IndexBatch()
    batch.put_namespace(stored)
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        index.commit(batch)
        assert index.namespaces() == [stored]
    (value,) = raw(path, b"namespaces").values()
    assert value == cbor2.dumps({"epoch": 9, "descriptor": stored.descriptor})
    assert value.hex().startswith("a26565706f636809")  # {"epoch": 9,


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b"\x01", cbor2.dumps({"epoch": "x", "descriptor": []}), b"\xa0"]
)
def test_a_namespace_that_cannot_be_read_is_left_out(path: Path, value: bytes) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        with index._env.begin(write=True, db=index._namespaces) as txn:
            txn.put(bytes(32), value)
        assert index.namespaces() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (bytes(7), bytes(80)),
        (bytes(8), bytes(79)),
        (bytes(8), bytes(80 * 52)),
        (b"\1" + bytes(7), bytes(80)),
        (b"k", b""),
    ],
)
def test_what_is_no_page_is_told_apart(path: Path, name: bytes, value: bytes) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        with index._env.begin(write=True, db=index._records) as txn:
            txn.put(name, value)
        assert index.read().unreadable == [name]
        assert index.entries() == []
        index.remove([], [name, b"never there"])
        assert index.read().unreadable == []


def test_a_page_that_is_none_is_written_anew(path: Path) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        with index._env.begin(write=True, db=index._records) as txn:
            txn.put(bytes.fromhex(GOLDEN_PAGE), b"x")
        index.commit(batch_of(ENTRY))
        assert index.entries() == [ENTRY]


def test_records_are_removed_where_they_were_read(path: Path) -> None:
    """Not where they say that they lie: what they say may be why they are removed."""
    entries = [neighbour(n) for n in range(-40, 60)]
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        index.commit(batch_of(*entries))
        with index._env.begin(write=True, db=index._records) as txn:
            found = [(bytes(name), bytes(value)) for name, value in txn.cursor()]
            for (_, value), (name, _) in zip(found, reversed(found), strict=True):
                txn.put(name, value)  # the pages change places
        positions, rows, _ = index.read()
        kept = sequences_of(rows) % 3 == 0
        index.remove(positions[~kept])
        assert index.entries() == entries_of(rows[kept])


def test_the_last_operation_on_a_slot_wins(path: Path) -> None:
    later = ENTRY._replace(key=KEY[::-1], sequence=99)
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        batch = batch_of(ENTRY)
        remove(batch, ENTRY)
        batch.add(rows_of_entries([later]))
        assert keys_of(batch.added()) == [(later.epoch, later.key)]
        index.commit(batch)
        assert index.entries() == [later]
        batch = batch_of(ENTRY)
        remove(batch, ENTRY)
        assert keys_of(batch.added()) == []
        index.commit(batch)
        assert index.entries() == []


@pytest.mark.parametrize("count", [0, 1, RECENCY_CHUNK, RECENCY_CHUNK + 1])
def test_recency_is_packed_sequences_in_chunks_coldest_first(path: Path, count: int) -> None:
    sequences = list(range(count, 0, -1))
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        index.save_recency(np.arange(3 * RECENCY_CHUNK))
        index.save_recency(np.array(sequences))
        assert index.recency().tolist() == sequences
    found = raw(path, b"meta")
    assert list(found) == [b"recency/%08d" % n for n in range(-(-count // 510))]
    if count:
        assert found[b"recency/00000000"][:8] == struct.pack("<Q", count)


def test_the_clean_mark_is_a_one(path: Path) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        assert not index.was_clean()
        index.mark_clean(True)
        assert index.was_clean()
        index.mark_clean(False)
        assert not index.was_clean()
        index.mark_clean(True)
    assert raw(path, b"meta") == {b"clean": b"1"}


def test_a_batch_is_committed_whole_or_not_at_all(path: Path) -> None:
    batch = batch_of(ENTRY._replace(offset=-1 % 2**64))  # after the namespace: no page has it
    batch.put_namespace(StoredNamespace(bytes(32), 9, []))
    with closing(DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES)) as index:
        with pytest.raises(OverflowError):
            index.commit(batch)
        assert index.namespaces() == []


def test_p57_every_commit_syncs_data_and_meta_page(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}
    real = lmdb.open

    def recorded(place: str, **options: Any) -> object:
        settings.update(options)
        return real(place, **options)

    monkeypatch.setattr(lmdb, "open", recorded)
    DurableIndex(str(path), MAP_BYTES, SEGMENT_BYTES).close()
    assert settings["sync"] is True
    assert settings["metasync"] is True
    assert "writemap" not in settings
    assert "map_async" not in settings


# -- the digest -----------------------------------------------------------------------------------


def test_the_digest_is_xxh3_seeded_with_namespace_and_key() -> None:
    namespace, payload = bytes(range(32)), keyed_bytes(b"x", 10_496)
    seed = record_seed(namespace, KEY)
    assert seed == xxhash.xxh3_64(namespace + KEY).intdigest()
    assert record_digest(payload, seed) == xxhash.xxh3_128(payload, seed=seed).digest()
    assert seed == 0x26B6C0EDE4F1BB5A
    assert record_digest(payload, seed).hex() == "3371a31af9455ff976feae88d62e571e"


def test_the_digest_tells_namespace_hash_and_group_apart() -> None:
    payload = bytes(1000)
    names = [
        (bytes(32), KEY),
        (bytes(31) + b"\1", KEY),
        (bytes(32), KEY[:-1] + b"\0"),
        (bytes(32), b"\1" + KEY[1:]),
    ]
    digests = {record_digest(payload, record_seed(*name)) for name in names}
    assert len(digests) == len(names)
    assert record_digest(payload[:-1], record_seed(*names[0])) not in digests


def test_the_digest_reads_views_in_place() -> None:
    payload = keyed_bytes(b"x", 5000)
    assert record_digest(memoryview(payload)[:4000], 1) == record_digest(payload[:4000], 1)


# -- the probe ------------------------------------------------------------------------------------


def test_an_index_without_a_free_page_is_sound(path: Path) -> None:
    """Larger than LMDB's map is by default: the trial of writing has to have room all the same."""
    records = 140_000
    rows = np.repeat(rows_of_entries([ENTRY._replace(length=4096)]), records)
    rows["offset"] = np.arange(records) * 4096
    batch = IndexBatch()
    batch.add(rows)
    with closing(DurableIndex(str(path), 64 << 20, SEGMENT_BYTES)) as index:
        index.commit(batch)
    assert (path / "data.mdb").stat().st_size > 10 << 20
    assert index_is_sound(str(path))
