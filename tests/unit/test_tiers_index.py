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
    Entry,
    IndexBatch,
    StoredNamespace,
    minute_of,
    record_name,
)

if TYPE_CHECKING:
    from pathlib import Path

MAP_BYTES = 4 << 20
KEY = bytes(range(32)) + (7).to_bytes(4, "big")  # block hash + KV group
ENTRY = Entry(
    epoch=0x01020304,
    key=KEY,
    codec=0,
    length=10_496,
    offset=0x1_0000_3000,
    sequence=0x0A0B,
    digest=bytes(range(0xF0, 0x100)),
    minute=0x2F_1E0D,
)
# As `docs/disk-format.md` has it: nothing here is computed by the code under test.
GOLDEN_NAME = "01020304" + bytes(range(32)).hex() + "00000007"
GOLDEN_VALUE = (
    "00"  # codec
    "0d1e2f"  # minute
    "00290000"  # length
    "0030000001000000"  # offset
    "0b0a000000000000"  # sequence
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


def test_p52_a_value_of_the_index_is_these_40_bytes(path: Path) -> None:
    batch = IndexBatch()
    batch.add(ENTRY)
    assert {n.hex(): (v or b"").hex() for n, v in batch.records.items()} == {
        GOLDEN_NAME: GOLDEN_VALUE
    }
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        index.commit(batch)
        assert [entry for _, entry in index.entries()] == [ENTRY]
    assert raw(path, b"records") == {bytes.fromhex(GOLDEN_NAME): bytes.fromhex(GOLDEN_VALUE)}


def test_an_age_is_minutes_and_a_clock_that_is_not_set_tells_none() -> None:
    assert [minute_of(CLOCK_START_S + s) for s in (59, 60, 119, 600)] == [0, 1, 1, 10]
    assert minute_of(0.0) == 0
    assert minute_of(CLOCK_START_S + 60 * 2**25) == MINUTE_MAX


def test_epochs_sort_in_order(path: Path) -> None:
    names = [record_name(epoch, KEY) for epoch in (1, 2, 255, 256, 65_536, 2**32 - 1)]
    assert names == sorted(names)


def test_a_namespace_is_a_cbor_map(path: Path) -> None:
    stored = StoredNamespace(bytes(32), 9, [["format", 1], ["layers", ["0", "1"]]])
    batch = IndexBatch()
    batch.put_namespace(stored)
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        index.commit(batch)
        assert index.namespaces() == [stored]
    (value,) = raw(path, b"namespaces").values()
    assert value == cbor2.dumps({"epoch": 9, "descriptor": stored.descriptor})
    assert value.hex().startswith("a26565706f636809")  # {"epoch": 9,


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b"\x01", cbor2.dumps({"epoch": "x", "descriptor": []}), b"\xa0"]
)
def test_a_namespace_that_cannot_be_read_is_left_out(path: Path, value: bytes) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        with index._env.begin(write=True, db=index._namespaces) as txn:
            txn.put(bytes(32), value)
        assert index.namespaces() == []


@pytest.mark.parametrize(
    ("name", "value"), [(b"\0\0\0\1", bytes(40)), (b"\0\0\0\1k", bytes(39)), (b"k", b"")]
)
def test_an_entry_of_the_wrong_form_is_none(path: Path, name: bytes, value: bytes) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        with index._env.begin(write=True, db=index._records) as txn:
            txn.put(name, value)
        assert list(index.entries()) == [(name, None)]
        index.remove([name, b"never there"])
        assert list(index.entries()) == []


def test_the_last_operation_on_a_key_wins(path: Path) -> None:
    later = ENTRY._replace(offset=8192)
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        batch = IndexBatch()
        batch.add(ENTRY)
        batch.remove(ENTRY.epoch, KEY)
        batch.add(later)
        index.commit(batch)
        assert [entry for _, entry in index.entries()] == [later]
        batch = IndexBatch()
        batch.add(ENTRY)
        batch.remove(ENTRY.epoch, KEY)
        index.commit(batch)
        assert list(index.entries()) == []


@pytest.mark.parametrize("count", [0, 1, RECENCY_CHUNK, RECENCY_CHUNK + 1])
def test_recency_is_packed_sequences_in_chunks_coldest_first(path: Path, count: int) -> None:
    sequences = list(range(count, 0, -1))
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        index.save_recency(np.arange(3 * RECENCY_CHUNK))
        index.save_recency(np.array(sequences))
        assert index.recency().tolist() == sequences
    found = raw(path, b"meta")
    assert list(found) == [b"recency/%08d" % n for n in range(-(-count // 8192))]
    if count:
        assert found[b"recency/00000000"][:8] == struct.pack("<Q", count)


def test_the_clean_mark_is_a_one(path: Path) -> None:
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        assert not index.was_clean()
        index.mark_clean(True)
        assert index.was_clean()
        index.mark_clean(False)
        assert not index.was_clean()
        index.mark_clean(True)
    assert raw(path, b"meta") == {b"clean": b"1"}


def test_a_batch_is_committed_whole_or_not_at_all(path: Path) -> None:
    batch = IndexBatch()
    batch.add(ENTRY)
    batch.records[bytes(600)] = bytes(40)  # longer than an LMDB key may be
    with closing(DurableIndex(str(path), MAP_BYTES)) as index:
        with pytest.raises(lmdb.BadValsizeError):
            index.commit(batch)
        assert list(index.entries()) == []


def test_p57_every_commit_syncs_data_and_meta_page(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}
    real = lmdb.open

    def recorded(place: str, **options: Any) -> object:
        settings.update(options)
        return real(place, **options)

    monkeypatch.setattr(lmdb, "open", recorded)
    DurableIndex(str(path), MAP_BYTES).close()
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
