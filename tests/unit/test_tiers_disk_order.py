"""The one safe order of the disk tier's writes, and that a watcher sees it broken.

The rules are those of `docs/disk-format.md`; each has a fault planted here by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.commit import Committer
from ebbtide.tiers.disk import DiskTier
from ebbtide.tiers.index import DurableIndex, IndexBatch
from ebbtide.tiers.index_page import are_records
from ebbtide.tiers.runtime import COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ebbtide.testing.faults import Operation
    from ebbtide.tiers.index_page import Rows

PAGE = 4096
LENGTH = PAGE - 100  # padding, so that lengths and strides cannot be mixed up


class OrderCheck:
    """Watches slab and index: raises AssertionError when the write order is broken.

    A write may touch no bytes that a committed entry names. A commit may name only bytes that were
    written, and synced after that.
    """

    def __init__(self) -> None:
        self.committed: set[int] = set()  # offsets that entries name
        self.written: set[int] = set()  # offsets written since the last sync
        self.synced: set[int] = set()
        self.commits = 0
        self.reused = 0

    def on_operation(self, operation: Operation) -> None:
        if operation.name == "write":
            for offset in range(operation.offset, operation.offset + operation.length, PAGE):
                assert offset not in self.committed, f"{offset} belongs to an entry"
                self.reused += offset in self.synced
                self.written.add(offset)
        elif operation.name == "sync":
            self.synced |= self.written
            self.written.clear()

    def on_commit(self, batch: IndexBatch) -> None:
        self.commits += 1
        for rows in batch.changes:
            for offset, is_record in zip(rows["offset"].tolist(), are_records(rows), strict=True):
                if not is_record:
                    self.committed.discard(offset)
                    continue
                assert offset in self.synced, f"{offset} is named before it was synced"
                assert offset not in self.written, f"{offset} was written after its sync"
                assert offset not in self.committed, "two entries, one slot"
                self.committed.add(offset)


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[SimStore]:
    """Memory of 8 slots over a disk of 24; everything is written soon."""
    with SimStore(
        5,
        8 * PAGE,
        disk_path=str(tmp_path / "d"),
        slab_bytes=24 * PAGE,
        commit_batch_bytes=4 * PAGE,
        bounds=Bounds.for_capacity(8 * PAGE, write_after_s=0.0),
    ) as store:
        yield store


def watch(sim: SimStore, monkeypatch: pytest.MonkeyPatch) -> OrderCheck:
    check, commit = OrderCheck(), DurableIndex.commit

    def recorded(index: DurableIndex, batch: IndexBatch) -> None:
        check.on_commit(batch)
        commit(index, batch)

    assert sim.slab is not None
    monkeypatch.setattr(sim.slab, "_on_operation", check.on_operation)
    monkeypatch.setattr(DurableIndex, "commit", recorded)
    return check


def churn(sim: SimStore) -> None:
    """Many more keys than fit, again and again, so that slots are evicted and keys come back."""
    space = sim.namespace()
    for _ in range(4):
        for n in range(40):
            sim.put(space, [key_of(n)], LENGTH)
    sim.drain()


def disk_of(sim: SimStore) -> DiskTier:
    assert sim.store.disk is not None
    return sim.store.disk


def held(sim: SimStore) -> set[bytes]:
    return set(disk_of(sim).keys(sim.namespace().epoch))


# -- the write order, and that the watcher sees when it is broken ---------------------------------


def test_payload_then_sync_then_commit_then_reuse(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = watch(sim, monkeypatch)
    churn(sim)
    assert check.commits > 10
    assert check.reused > 50
    assert disk_of(sim).down is None


def broken_by(sim: SimStore) -> str:
    """Why the tier went down: an assertion in the committer's thread fails the commit."""
    return disk_of(sim).down or ""


def test_planted_committing_before_the_sync_is_seen(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_first(self: Committer, batch: Any) -> None:
        self._index.commit(batch.index)
        self._slab.sync()

    watch(sim, monkeypatch)
    monkeypatch.setattr(Committer, "_commit", commit_first)
    churn(sim)
    assert "before it was synced" in broken_by(sim)


def test_planted_leaving_out_the_sync_is_seen(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(sim, monkeypatch)
    monkeypatch.setattr(Committer, "_commit", lambda self, batch: self._index.commit(batch.index))
    churn(sim)
    assert "before it was synced" in broken_by(sim)


def test_planted_reusing_a_slot_before_the_commit_is_seen(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(sim, monkeypatch)
    monkeypatch.setattr(DiskTier, "_free_after_commit", lambda self, rows: self.index.free(rows))
    churn(sim)
    assert "belongs to an entry" in broken_by(sim)


def test_planted_additions_last_in_a_batch_are_seen(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is put and evicted in one batch must end as removed."""
    joined = IndexBatch._joined

    def additions_last(batch: IndexBatch) -> Rows:
        rows = joined(batch)
        return rows[np.argsort(are_records(rows), kind="stable")]

    monkeypatch.setattr(IndexBatch, "_joined", additions_last)
    with pytest.raises(AssertionError):
        put_and_evict_in_one_batch(sim)


def test_a_key_evicted_and_put_again_in_one_batch_ends_as_put(sim: SimStore) -> None:
    space, key = sim.namespace(), key_of(1)
    sim.put(space, [key], LENGTH)
    assert sim.drain()
    disk = disk_of(sim)
    record = disk.find(space.epoch, key)
    assert record is not None
    sim.runtime.hold(COMMIT)
    disk.discard(record)
    resident = sim.store.memory.find(space.epoch, key)
    assert resident is not None
    sim.store.memory.soil(resident, 0.0)
    assert sim.store.mover is not None
    sim.store.mover.run()
    sim.runtime.settle()
    sim.runtime.let_go(COMMIT)
    assert sim.drain()
    sim.restart()
    assert held(sim) == {key}


def test_a_key_put_and_evicted_in_one_batch_ends_as_removed(sim: SimStore) -> None:
    put_and_evict_in_one_batch(sim)


def put_and_evict_in_one_batch(sim: SimStore) -> None:
    space, key = sim.namespace(), key_of(1)
    sim.runtime.hold(COMMIT)
    sim.put(space, [key], LENGTH)
    sim.runtime.settle()
    disk = disk_of(sim)
    record = disk.find(space.epoch, key)
    assert record is not None
    disk.discard(record)
    sim.runtime.let_go(COMMIT)
    assert sim.flush()
    sim.lose_power()
    assert held(sim) == set()
