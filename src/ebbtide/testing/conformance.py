"""What every set of tiers owes its users, as test methods.

Inherit `TierConformance` in a test class of your own and give it a pytest fixture `sim` that
yields a `SimStore` with room in memory for about `SLOTS` records of `LENGTH` bytes. The kit itself
imports no test framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.testing.sinks import RecordingSink
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.reasons import Miss, Place

if TYPE_CHECKING:
    from ebbtide.testing.store import SimStore

LENGTH = 10_496  # not a multiple of the alignment: padding must never show
SLOTS = 16


def key_of(number: int) -> bytes:
    """A key of the usual width: block hash and KV group."""
    return number.to_bytes(32, "little") + bytes(4)


class TierConformance:
    """Put, get, verify, evict, reset, integrity: the same for every set of tiers."""

    def test_what_was_put_is_got(self, sim: SimStore) -> None:
        space, keys = sim.namespace(), [key_of(n) for n in range(5)]
        assert sim.put(space, keys, LENGTH) == bytes(5)
        assert sim.get(space, keys) == [sim.content(space, key, LENGTH) for key in keys]

    def test_a_key_that_was_never_put_is_never_seen(self, sim: SimStore) -> None:
        space = sim.namespace()
        assert sim.store.lookup(space, [key_of(0)]) == bytes([Miss.NEVER_SEEN])
        assert sim.get(space, [key_of(0)]) == [Miss.NEVER_SEEN]

    def test_namespaces_do_not_see_each_other(self, sim: SimStore) -> None:
        ours, theirs = sim.namespace("ours"), sim.namespace("theirs")
        sim.put(ours, [key_of(1)], LENGTH)
        assert sim.store.lookup(theirs, [key_of(1)]) == bytes([Miss.OTHER_NAMESPACE])
        assert sim.get(theirs, [key_of(1)]) == [Miss.OTHER_NAMESPACE]

    def test_a_second_put_of_a_key_is_nothing_to_do(self, sim: SimStore) -> None:
        space = sim.namespace()
        sim.put(space, [key_of(1)], LENGTH)
        stored = sim.store.ledger.counts["stored"]
        assert sim.put(space, [key_of(1)], LENGTH) == bytes(1)
        assert sim.store.ledger.counts["stored"] == stored

    def test_a_reserved_key_is_pending_and_readable_only_after_commit(self, sim: SimStore) -> None:
        space, keys = sim.namespace(), [key_of(1)]
        grants, _ = sim.store.reserve(b"e", space, keys, LENGTH)
        assert sim.store.lookup(space, keys) == bytes([Place.PENDING])
        assert sim.get(space, keys) == [Miss.BUSY]
        assert sim.fill(space, keys, grants, LENGTH, b"e") == bytes(1)
        assert sim.get(space, keys) == [sim.content(space, keys[0], LENGTH)]

    def test_an_aborted_key_was_never_there(self, sim: SimStore) -> None:
        space, keys = sim.namespace(), [key_of(1)]
        grants, _ = sim.store.reserve(b"e", space, keys, LENGTH)
        assert sim.store.abort(b"e", [grants[0].sequence]) == bytes(1)
        assert sim.store.lookup(space, keys) == bytes([Miss.NEVER_SEEN])
        assert sim.store.memory.space.used_bytes == 0

    def test_more_than_fits_evicts_and_the_rest_is_right(self, sim: SimStore) -> None:
        space, keys = sim.namespace(), [key_of(n) for n in range(20 * SLOTS)]
        for key in keys:
            sim.put(space, [key], LENGTH)
        memory = sim.store.memory.space
        assert memory.used_bytes <= memory.capacity_bytes
        assert sim.store.ledger.counts["memory_evicted"] > 0
        found = sim.get(space, keys)
        whole = [sim.content(space, key, LENGTH) for key in keys]
        assert all(f in (Miss.EVICTED, w) for f, w in zip(found, whole, strict=True))
        assert found[-1] == whole[-1]
        assert found[0] is Miss.EVICTED
        sim.store.check_integrity()

    def test_a_reset_namespace_is_empty_and_the_others_are_not(self, sim: SimStore) -> None:
        gone, kept, answers = sim.namespace("gone"), sim.namespace("kept"), list[bool]()
        sim.put(gone, [key_of(1)], LENGTH)
        sim.put(kept, [key_of(2)], LENGTH)
        sim.store.reset(gone, answers.append)
        sim.runtime.run_until(lambda: bool(answers))
        assert answers == [True]
        assert sim.get(gone, [key_of(1)]) == [Miss.RESET]
        assert sim.get(kept, [key_of(2)]) == [sim.content(kept, key_of(2), LENGTH)]

    def test_bytes_that_changed_in_memory_are_not_served(self, sim: SimStore) -> None:
        space, keys = sim.namespace(), [key_of(1)]
        sim.put(space, keys, LENGTH)
        record = sim.store.memory.find(space.epoch, keys[0])
        assert record is not None
        sim.store.view(record, LENGTH)[17] ^= 1
        assert sim.get(space, keys) == [Miss.CORRUPT]
        assert sim.store.lookup(space, keys) == bytes([Miss.CORRUPT])
        assert sim.put(space, keys, LENGTH) == bytes(1)
        assert sim.get(space, keys) == [sim.content(space, keys[0], LENGTH)]

    def test_a_holder_that_verifies_sees_what_changed_and_its_word_is_checked(
        self, sim: SimStore
    ) -> None:
        space, keys = sim.namespace(), [key_of(1), key_of(2)]
        sim.put(space, keys, LENGTH)
        sink = RecordingSink(2)
        load = sim.store.load(b"e", space, keys, sink, to_verify=True)
        sim.runtime.run_until(lambda: sink.is_done)
        sim.store.arena.view(sink.granted[0].offset, LENGTH)[17] ^= 1
        wrong = []
        for batch in list(sink.open_batches):
            rows = []
            for row, granted in enumerate(sink.acked(batch)):
                key = keys[granted.position]
                copy = bytes(sim.store.arena.view(granted.offset, LENGTH))
                if record_digest(copy, record_seed(space.digest, key)) != granted.digest:
                    rows.append(row)
                    wrong.append(key)
            load.dispute(batch, rows)
        assert wrong == keys[:1]
        sim.runtime.settle()
        assert sim.get(space, keys)[1] == sim.content(space, keys[1], LENGTH)
        assert sim.store.ledger.counts["memory_corrupt"] == 1

    def test_empty_batches_are_answered(self, sim: SimStore) -> None:
        space = sim.namespace()
        assert sim.put(space, [], LENGTH) == b""
        assert sim.get(space, []) == []
        assert sim.store.lookup(space, []) == b""
        assert sim.store.reserve(b"e", space, [], LENGTH) == ([], None)

    def test_nothing_is_held_when_all_is_over(self, sim: SimStore) -> None:
        space, keys = sim.namespace(), [key_of(n) for n in range(SLOTS)]
        sim.put(space, keys, LENGTH)
        sim.get(space, keys)
        sim.drain()
        memory = sim.store.memory
        assert (memory.reserved_bytes, memory.pinned_bytes) == (0, 0)
        assert sim.store.stats()["loads"] == 0
        sim.store.check_integrity()
