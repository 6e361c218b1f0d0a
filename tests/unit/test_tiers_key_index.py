"""The hash index over the record table: a dictionary, whatever comes and goes, while it grows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbtide.errors import MisuseError
from ebbtide.tiers import key_index
from ebbtide.tiers.key_index import NO_ROW, KeyIndex
from ebbtide.tiers.record_table import KEY_BYTES_MAX, RecordTable, names_of

DIGEST = bytes(range(16))


def fill(table: RecordTable, epoch: int, *keys: bytes, digest: bytes = DIGEST) -> list[int]:
    rows = table.take(len(keys))
    table.fill(
        rows,
        epoch,
        keys,
        length=100,
        offsets=range(len(keys)),
        sequences=range(1, len(keys) + 1),
        digests=[digest] * len(keys),
        minute=0,
        state=2,
    )
    return rows


def add(index: KeyIndex, table: RecordTable, epoch: int, key: bytes) -> int:
    (row,) = rows = fill(table, epoch, key)
    index.add(rows)
    return row


def drop(index: KeyIndex, table: RecordTable, row: int) -> None:
    index.remove([row])
    table.free(row)


def weak_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys have one of four places, and the same tag."""
    monkeypatch.setattr(key_index, "_hash_one", lambda epoch, key: key[0] & 3)
    monkeypatch.setattr(key_index, "hashes_of", lambda names: names[:, 0] & np.uint64(3))


@pytest.mark.parametrize("width", [1, 20, 36, KEY_BYTES_MAX])
def test_one_key_and_many_hash_alike(width: int) -> None:
    draw = Random(width)
    for epoch in (0, 1, 2**32 - 1):
        keys = [draw.randbytes(width) for _ in range(50)]
        many = key_index.hashes_of(names_of(epoch, b"".join(keys), width))
        assert many.tolist() == [key_index._hash_one(epoch, key) for key in keys]


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_it_answers_as_a_dictionary_while_it_grows_and_shrinks(
    seed: int, weak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weak:
        weak_hash(monkeypatch)
    draw, table = Random(seed), RecordTable(30_000)
    index, model = KeyIndex(table), dict[tuple[int, bytes], int]()
    keys = [draw.randbytes(36) for _ in range(300 if weak else 8_000)]
    names = [(epoch, key) for epoch in (1, 2) for key in keys[: len(keys) // 2]]
    draw.shuffle(names)

    def check() -> None:
        for epoch in (1, 2, 3):
            asked = draw.sample(keys, 200)
            expected = [model.get((epoch, key), NO_ROW) for key in asked]
            assert index.find_many(epoch, asked).tolist() == expected
            assert [index.find(epoch, key) for key in asked[:20]] == expected[:20]
        assert index.count == len(model)

    for number, name in enumerate(names):
        model[name] = add(index, table, *name)
        if draw.random() < 0.3:
            gone = draw.choice(list(model)[:50])
            drop(index, table, model.pop(gone))
        if number % (len(names) // 12) == 0:
            check()
    for name in list(model)[: len(model) * 9 // 10]:
        drop(index, table, model.pop(name))
    check()
    for name in names:
        if name not in model:
            model[name] = add(index, table, *name)
    check()


def test_reusing_one_place_for_ever_keeps_the_index_small() -> None:
    table = RecordTable(10)
    index = KeyIndex(table)
    for number in range(20_000):
        row = add(index, table, 1, b"%020d" % number)
        assert index.find(1, b"%020d" % number) == row
        drop(index, table, row)
    assert len(index._entries) <= 2 * key_index.ENTRIES_MIN
    assert index.count == 0


def test_keys_of_different_widths_and_epochs_are_different() -> None:
    table = RecordTable(100)
    index = KeyIndex(table)
    short, padded = b"k" * 20, b"k" * 20 + bytes(16)
    rows = [add(index, table, 1, short), add(index, table, 1, padded), add(index, table, 2, short)]
    assert index.find_many(1, [short, padded] * 20).tolist() == rows[:2] * 20
    assert index.find_many(2, [padded, short] * 20).tolist() == [NO_ROW, rows[2]] * 20
    assert index.find_many(1, [short] * 50).tolist() == [rows[0]] * 50
    assert index.find_many(1, [padded] * 50).tolist() == [rows[1]] * 50
    assert index.find(1, b"k" * 41) == NO_ROW
    assert index.find_many(1, [b"k" * 41] * 50).tolist() == [NO_ROW] * 50
    assert index.find_many(1, []).tolist() == []


def test_many_at_once_are_as_many_one_by_one() -> None:
    draw, table = Random(1), RecordTable(5000)
    index, keys = KeyIndex(table), [draw.randbytes(36) for _ in range(5000)]
    rows = fill(table, 7, *keys)
    index.add_many(np.array(rows[::2]))
    assert index.find_many(7, keys).tolist() == [r if r % 2 == 0 else NO_ROW for r in rows]
    index.add(rows[1::2])
    assert index.find_many(7, keys).tolist() == rows
    assert index.count == 5000


def test_a_table_gives_its_rows_out_once() -> None:
    table = RecordTable(3)
    rows = fill(table, 1, b"key", b"yek", b"eyk")
    assert sorted(rows) == [0, 1, 2]
    assert table.left == 0
    with pytest.raises(MisuseError, match="no row left"):
        table.take(1)
    table.free(1)
    with pytest.raises(MisuseError, match="freed twice"):
        table.free(1)
    assert fill(table, 9, b"another key", digest=DIGEST[::-1]) == [1]
    assert (table.key(1), table.digest_of(1), table.epoch_of(1)) == (
        b"another key",
        DIGEST[::-1],
        9,
    )
    assert (table.key(0), table.digest_of(0), table.epoch_of(0)) == (b"key", DIGEST, 1)


class Index(RuleBasedStateMachine):
    """Against a dictionary, in small sizes, so that growing happens in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = key_index.ENTRIES_MIN, key_index.MOVE_EVERY, key_index.MOVE_ENTRIES
        key_index.ENTRIES_MIN, key_index.MOVE_EVERY, key_index.MOVE_ENTRIES = 4, 1, 8
        self.table = RecordTable(64)
        self.index = KeyIndex(self.table)
        self.model: dict[tuple[int, bytes], int] = {}

    names = st.tuples(st.integers(1, 2), st.sampled_from([b"%020d" % n for n in range(30)]))

    @rule(name=names)
    def add(self, name: tuple[int, bytes]) -> None:
        if name not in self.model and self.table.left:
            self.model[name] = add(self.index, self.table, *name)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        drop(self.index, self.table, self.model.pop(name))

    @invariant()
    def agrees(self) -> None:
        for epoch in (1, 2):
            keys = [b"%020d" % n for n in range(30)]
            expected = [self.model.get((epoch, key), NO_ROW) for key in keys]
            assert self.index.find_many(epoch, keys).tolist() == expected
            assert [self.index.find(epoch, key) for key in keys] == expected
        assert self.index.count == len(self.model)

    def teardown(self) -> None:
        key_index.ENTRIES_MIN, key_index.MOVE_EVERY, key_index.MOVE_ENTRIES = self.sizes


Index.TestCase.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
TestIndex = Index.TestCase
