"""The verbs of the store: what each changes, what it must not, and who may do what."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.errors import ConfigError
from ebbtide.testing import RecordingSink, SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.ghosts import Ghosts
from ebbtide.tiers.reasons import Miss, Place, label
from ebbtide.tiers.runtime import COMMIT, DIGEST, WRITE

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
ONE, TWO = b"engine-1", b"engine-2"


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def state_of(sim: SimStore) -> Any:
    """Everything of the store that could change, as comparable values."""
    store = sim.store
    memory = store.memory
    return (
        [(r.key, r.state, r.pins, r.dirty, memory.space.stamp(r.offset)) for r in store_order(sim)],
        memory.space.clock.now,
        (memory.records, memory.dirty_bytes, memory.reserved_bytes, memory.pinned_bytes),
        dict(store.ledger.counts),
        store.ledger.event_sequence,
        list(store.ledger.ghosts._reasons.items()),
        list(store.disk.space.coldest_first()) if store.disk else None,
        store.disk.space.clock.now if store.disk else None,
        sim.runtime.idle,
    )


def store_order(sim: SimStore) -> Any:
    return sim.store.memory.space.coldest_first()


# -- lookup, touch --------------------------------------------------------------------------------


def test_a_lookup_changes_nothing_however_often(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(*range(12)), PAGE)
    assert tiered.drain()
    tiered.put(space, keys_of(*range(12, 20)), PAGE)
    reserved, _ = tiered.store.reserve(ONE, space, keys_of(30), PAGE)
    asked = keys_of(0, 11, 12, 19, 30, 99)
    first = tiered.store.lookup(space, asked)
    before = state_of(tiered)
    for _ in range(100):
        assert tiered.store.lookup(space, asked) == first
    assert state_of(tiered) == before
    assert [label(code) for code in first] == [
        "disk",
        "memory",
        "memory",
        "memory",
        "pending",
        "never_seen",
    ]
    tiered.store.abort(ONE, [reserved[0].sequence])


def test_a_touch_counts_in_every_tier_and_a_chain_loses_its_tail_first(tiered: SimStore) -> None:
    space, chain = tiered.namespace(), keys_of(0, 1, 2)
    tiered.put(space, [*chain, *keys_of(10, 11)], PAGE)
    assert tiered.drain()
    tiered.store.touch(space, [*chain, key_of(77)])
    assert tiered.store.disk is not None
    coldest = [*keys_of(10, 11), *chain[::-1]]
    assert [r.key for r in tiered.store.memory.space.coldest_first()] == coldest
    table = tiered.store.disk.index.table
    assert [table.key(row) for row in tiered.store.disk.space.coldest_first()] == coldest


def test_a_miss_says_why(tiered: SimStore) -> None:
    space, other = tiered.namespace(), tiered.namespace("other")
    tiered.put(other, keys_of(5), PAGE)
    for number in range(100):
        tiered.put(space, keys_of(number), PAGE)
    tiered.drain()
    reasons = tiered.store.lookup(space, keys_of(0, 99, 555))
    assert [label(code) for code in reasons] == ["evicted", "memory", "never_seen"]
    assert tiered.store.lookup(tiered.namespace("third"), keys_of(99)) == bytes(
        [Miss.OTHER_NAMESPACE]
    )


def test_ghosts_are_bounded_and_forgotten_when_the_key_is_back() -> None:
    ghosts = Ghosts(3)
    for number in range(5):
        ghosts.remember(1, key_of(number), Miss.EVICTED)
    assert len(ghosts) == 3
    assert [ghosts.reason(1, key_of(n)) for n in range(5)] == [Miss.NEVER_SEEN] * 2 + [
        Miss.EVICTED
    ] * 3
    ghosts.forget(1, key_of(4))
    ghosts.forget(1, key_of(4))
    assert ghosts.reason(1, key_of(4)) is Miss.NEVER_SEEN
    assert ghosts.reason(2, key_of(3)) is Miss.NEVER_SEEN
    none = Ghosts(0)
    none.remember(1, key_of(1), Miss.EVICTED)
    assert len(none) == 0


# -- reserve, commit, abort -----------------------------------------------------------------------


def test_p46_a_reserve_that_gets_less_gets_a_prefix_and_says_why(sim: SimStore) -> None:
    space = sim.namespace()
    grants, reason = sim.store.reserve(ONE, space, keys_of(*range(30)), PAGE)
    assert (len(grants), reason) == (15, Miss.BUSY)  # one slot is the loads'
    again, reason = sim.store.reserve(TWO, space, keys_of(0, 1, 40, 2), PAGE)
    assert ([g.sequence for g in again], reason) == ([0, 0], Miss.BUSY)
    assert sim.store.ledger.counts["reserve_busy"] == 2
    assert sim.store.abort(ONE, [g.sequence for g in grants]) == bytes(15)
    assert sim.store.memory.space.used_bytes == 0


def test_p68_keys_that_are_held_or_being_put_do_not_stop_the_rest(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(4), PAGE)
    sim.store.reserve(TWO, space, keys_of(7), PAGE)
    grants, reason = sim.store.reserve(ONE, space, keys_of(*range(10)), PAGE)
    assert reason is None
    assert [number for number, grant in enumerate(grants) if not grant.sequence] == [4, 7]
    assert sim.fill(space, keys_of(*range(10)), grants, PAGE, ONE) == bytes(10)


def test_p68_each_key_of_a_batch_has_an_outcome_of_its_own_and_may_come_again(
    tiered: SimStore,
) -> None:
    space, batch = tiered.namespace(), keys_of(*range(9))
    tiered.put(space, keys_of(4), PAGE)
    in_flight, _ = tiered.store.reserve(TWO, space, keys_of(7), PAGE)
    with pytest.raises(ConfigError, match="does not fit"):  # the ninth, of another size
        tiered.store.reserve(ONE, space, keys_of(9), 17 * PAGE)
    grants, _ = tiered.store.reserve(ONE, space, batch, PAGE)
    assert tiered.fill(space, batch, grants, PAGE, ONE) == bytes(9)
    states = tiered.store.lookup(space, keys_of(*range(10)))
    expected = [Place.MEMORY] * 7 + [Place.PENDING, Place.MEMORY, Miss.NEVER_SEEN]
    assert list(states) == expected
    assert tiered.drain()
    assert tiered.store.disk is not None
    assert set(tiered.store.disk.keys(space.epoch)) == set(batch) - set(keys_of(7))
    # Whoever had it gives it up, and what was too large comes in a size that fits.
    tiered.store.abort(TWO, [grant.sequence for grant in in_flight])
    assert tiered.put(space, keys_of(7, 9), PAGE) == bytes(2)
    assert tiered.drain()
    assert set(tiered.store.disk.keys(space.epoch)) == set(keys_of(*range(10)))


def test_a_key_named_twice_in_one_reserve_is_granted_once(sim: SimStore) -> None:
    grants, reason = sim.store.reserve(ONE, sim.namespace(), keys_of(1, 1, 2, 1), PAGE)
    assert reason is None
    assert [bool(grant.sequence) for grant in grants] == [True, False, True, False]
    for key, grant in zip(keys_of(1, 2), grants[::2], strict=True):
        record = sim.store.memory.find(sim.namespace().epoch, key)
        assert record is not None
        assert (record.offset, record.sequence) == grant


def test_a_reserve_of_many_evicts_as_many_as_it_needs(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(*range(12)), PAGE)
    coldest = [record.key for record in sim.store.memory.space.coldest_first()][:2]
    grants, reason = sim.store.reserve(ONE, space, keys_of(*range(20, 26)), PAGE)
    assert (len(grants), reason) == (6, None)
    assert sim.store.ledger.counts["memory_evicted"] == 2
    left = [k for k in keys_of(*range(12)) if sim.store.memory.find(space.epoch, k) is None]
    assert sorted(left) == sorted(coldest)


def test_a_memory_that_loads_hold_is_busy_whatever_window_an_engine_has() -> None:
    bounds = Bounds.for_capacity(16 * PAGE, store_window_bytes=2 * PAGE)
    bounds = replace(bounds, load_window_bytes=16 * PAGE)
    with SimStore(7, 16 * PAGE, bounds=bounds) as sim:
        space, keys = sim.namespace(), keys_of(*range(16))
        for at in range(0, 16, 2):
            sim.put(space, keys[at : at + 2], PAGE)
        sink = RecordingSink(16)
        load = sim.store.load(TWO, space, keys, sink, to_verify=True)
        assert len(sink.granted) == 16
        assert sim.store.reserve(ONE, space, keys_of(20), PAGE) == ([], Miss.BUSY)
        for batch in list(sink.open_batches):
            sink.acked(batch)
            load.ack(batch)
        grants, reason = sim.store.reserve(ONE, space, keys_of(20, 21, 22), PAGE)
        assert (len(grants), reason) == (2, Miss.STORE_SHED)


def test_p42_a_record_is_not_readable_until_its_digest_is_taken(sim: SimStore) -> None:
    space = sim.namespace()
    grants, _ = sim.store.reserve(ONE, space, keys_of(1), PAGE)
    replies: list[bytes] = []
    sim.runtime.hold(DIGEST)
    sim.store.commit(ONE, [grants[0].sequence], replies.append)
    sim.runtime.settle()
    assert sim.store.lookup(space, keys_of(1)) == bytes([Place.PENDING])
    sink = RecordingSink(1)
    sim.store.load(TWO, space, keys_of(1), sink)
    assert sink.failures == {0: Miss.BUSY}
    sim.runtime.let_go(DIGEST)
    sim.runtime.settle()
    assert replies == [bytes(1)]
    assert sim.store.lookup(space, keys_of(1)) == bytes([Place.MEMORY])


def test_a_slot_is_padded_with_zeros_before_its_digest_is_taken(sim: SimStore) -> None:
    space, old = sim.namespace(), keys_of(*range(16))
    sim.put(space, old, PAGE)  # every slot full of other bytes
    sim.put(space, keys_of(50), 100)
    record = sim.store.memory.find(space.epoch, key_of(50))
    assert record is not None
    view = sim.store.view(record, PAGE)
    assert view[100:] == bytes(PAGE - 100)
    assert view[:100] == sim.content(space, key_of(50), 100)


def test_sequences_of_nobody_or_of_another_engine_are_unknown(sim: SimStore) -> None:
    space = sim.namespace()
    grants, _ = sim.store.reserve(ONE, space, keys_of(1), PAGE)
    sequence = grants[0].sequence
    assert sim.store.abort(TWO, [sequence, 999]) == bytes([Miss.UNKNOWN] * 2)
    replies: list[bytes] = []
    sim.store.commit(TWO, [sequence], replies.append)
    sim.store.commit(ONE, [999, sequence, sequence], replies.append)
    sim.store.commit(ONE, [], replies.append)
    sim.runtime.run_until(lambda: len(replies) == 3)
    assert sorted(replies) == sorted(
        [bytes([Miss.UNKNOWN]), bytes([Miss.UNKNOWN, 0, Miss.UNKNOWN]), b""]
    )
    assert sim.store.abort(ONE, [sequence]) == bytes([Miss.UNKNOWN])
    assert sim.store.lookup(space, keys_of(1)) == bytes([Place.MEMORY])


def test_a_record_whose_digest_its_engine_took_is_readable_at_once(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(*range(16)), PAGE)  # every slot full of other bytes
    keys = keys_of(50, 51)
    grants, _ = sim.store.reserve(ONE, space, keys, 100)
    rows = []
    for key, (offset, sequence) in zip(keys, grants, strict=True):
        payload = sim.content(space, key, 100)
        sim.store.arena.view(offset, 100)[:] = payload
        rows.append((sequence, record_digest(payload, record_seed(space.digest, key))))
    rows[1] = (rows[1][0], bytes(16))
    assert sim.store.commit_digests(TWO, rows) == bytes([Miss.UNKNOWN] * 2)
    assert sim.store.commit_digests(ONE, [*rows, rows[0]]) == bytes([0, 0, Miss.UNKNOWN])
    assert sim.runtime.waiting(DIGEST) == 0
    assert sim.store.lookup(space, keys) == bytes([Place.MEMORY] * 2)
    assert sim.store.arena.view(grants[0].offset, PAGE)[100:] == bytes(PAGE - 100)
    assert sim.get(space, keys) == [sim.content(space, keys[0], 100), Miss.CORRUPT]


def test_a_commit_of_digests_after_a_reset_is_told_so_and_publishes_nothing(sim: SimStore) -> None:
    space = sim.namespace()
    grants, _ = sim.store.reserve(ONE, space, keys_of(1), PAGE)
    sim.store.reset(space, lambda ok: None)
    rows = [(grants[0].sequence, bytes(16))]
    assert sim.store.commit_digests(ONE, rows) == bytes([Miss.RESET])
    assert sim.store.memory.records == 0
    assert sim.store.memory.pinned_bytes == 0


def test_a_held_key_that_made_room_for_one_before_it_gets_a_slot_of_its_own(sim: SimStore) -> None:
    space = sim.namespace()
    slots = sim.store.memory.space.slots_for(PAGE)
    sim.put(space, keys_of(*range(slots)), PAGE)
    coldest = next(sim.store.memory.space.coldest_first()).key
    grants, reason = sim.store.reserve(ONE, space, [*keys_of(100), coldest], PAGE)
    assert reason is None
    assert all(sequence for _, sequence in grants), "what is said to be held is held"
    assert len({offset for offset, _ in grants}) == 2


def test_an_engine_that_is_gone_loses_its_slots_and_no_others(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(1), PAGE)
    sim.store.reserve(ONE, space, keys_of(2, 3), PAGE)
    kept, _ = sim.store.reserve(TWO, space, keys_of(4), PAGE)
    ours, theirs = RecordingSink(1), RecordingSink(1)
    sim.store.load(ONE, space, keys_of(1), ours)
    load = sim.store.load(TWO, space, keys_of(1), theirs)
    sim.runtime.settle()
    ours.open_batches.clear()
    sim.store.engine_gone(ONE)
    sim.store.engine_gone(ONE)
    sim.store.engine_gone(b"never heard of")
    assert ours.is_over
    assert not theirs.is_over
    assert sim.store.ledger.counts["reclaimed_slots"] == 2
    assert sim.store.memory.reserved_bytes == PAGE
    assert sim.store.memory.pinned_bytes == 2 * PAGE
    assert sim.store.lookup(space, keys_of(1, 2, 3, 4)) == bytes(
        [Place.MEMORY, Miss.NEVER_SEEN, Miss.NEVER_SEEN, Place.PENDING]
    )
    assert sim.fill(space, keys_of(4), kept, PAGE, TWO) == bytes(1)
    theirs.acked(0)
    assert load.ack(0)
    assert sim.store.memory.pinned_bytes == 0
    sim.store.check_integrity()


def test_p42_a_slot_is_not_reused_before_its_write_has_ended(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(*range(16)), PAGE)
    tiered.runtime.hold(WRITE)
    assert tiered.store.mover is not None
    tiered.store.mover.drain()
    tiered.runtime.settle()
    moving = tiered.store.memory.pinned_bytes
    assert moving
    grants, reason = tiered.store.reserve(ONE, space, keys_of(*range(50, 80)), PAGE)
    assert (grants, reason) == ([], Miss.BUSY)
    tiered.runtime.let_go(WRITE)
    tiered.runtime.pass_time(1.0)
    assert len(tiered.store.reserve(ONE, space, keys_of(*range(50, 80)), PAGE)[0]) == 15
    found = tiered.get(space, keys_of(*range(16)))
    assert found == [tiered.content(space, key, PAGE) for key in keys_of(*range(16))]


def test_p95_a_put_writes_only_what_no_tier_has(tiered: SimStore) -> None:
    """Any mix of tiers below gives a whole prefix back."""
    space, chain = tiered.namespace(), keys_of(*range(10))
    tiered.put(space, chain[:4], PAGE)
    assert tiered.restart()  # 0-3 on disk alone
    space = tiered.namespace()
    tiered.put(space, chain[4:8], PAGE)  # 4-7 in memory alone
    grants, reason = tiered.store.reserve(ONE, space, chain, PAGE)
    assert reason is None
    assert [bool(grant.sequence) for grant in grants] == [False] * 8 + [True] * 2
    tiered.fill(space, chain, grants, PAGE, ONE)
    assert tiered.get(space, chain) == [tiered.content(space, key, PAGE) for key in chain]


# -- looking at it, ending it ---------------------------------------------------------------------


def test_p84_counters_add_up_and_bytes_are_records_times_their_size(tiered: SimStore) -> None:
    space = tiered.namespace()
    for number in range(40):
        tiered.put(space, keys_of(number), PAGE)
    assert tiered.drain()
    counts, memory = tiered.store.ledger.counts, tiered.store.memory
    assert counts["stored"] == 40
    assert counts["stored"] - counts["memory_evicted"] == memory.records
    tiered.get(space, keys_of(*range(40)))
    assert counts["stored"] + counts["promoted"] - counts["memory_evicted"] == memory.records
    report: Any = tiered.store.stats()
    assert report["disk"]["write_bytes"] == report["disk"]["demoted_bytes"] == 40 * PAGE
    assert counts["stored_bytes"] == counts["granted_bytes"] == 40 * PAGE
    assert 0 < report["disk"]["read_bytes"] == counts["promoted_bytes"] == counts["promoted"] * PAGE
    assert report["memory"]["used_bytes"] == memory.records * PAGE
    assert report["loads"] == 0


def test_events_tell_what_became_true_in_order(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, keys_of(1), PAGE)
    epoch = space.epoch
    sim.store.reset(space, lambda ok: None)
    events = sim.store.ledger.events_since(0)
    assert [(e.kind, e.epoch, e.key) for e in events] == [
        ("stored", epoch, key_of(1)),
        ("reset", epoch, b""),
    ]
    assert sim.store.ledger.events_since(events[0].sequence) == events[1:]
    assert [e.sequence for e in events] == [1, 2]


def test_what_a_namespace_holds_is_counted_once_over_the_tiers(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(*range(5)), 100)
    assert tiered.drain()
    assert tiered.store.held(space) == (5, 500)
    tiered.restart()
    assert tiered.store.held(tiered.namespace()) == (5, 500)


@pytest.mark.parametrize("pool", [WRITE, COMMIT])
def test_a_drain_that_cannot_end_is_answered_by_its_deadline(tiered: SimStore, pool: str) -> None:
    tiered.put(tiered.namespace(), keys_of(1), PAGE)
    tiered.runtime.hold(pool)
    answers: list[bool] = []
    tiered.store.drain(5.0, answers.append)
    tiered.runtime.pass_time(4.0)
    assert answers == []
    tiered.runtime.pass_time(2.0)
    assert answers == [False]
    tiered.runtime.let_go(pool)
    tiered.runtime.pass_time(10.0)
    assert answers == [False]  # once


def test_a_drain_includes_what_comes_meanwhile(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(1), PAGE)
    tiered.runtime.hold(COMMIT)
    answers: list[bool] = []
    tiered.store.drain(60.0, answers.append)
    tiered.runtime.pass_time(1.0)
    tiered.runtime.hold(WRITE)
    tiered.put(space, keys_of(2), PAGE)
    tiered.runtime.let_go(COMMIT)
    tiered.runtime.pass_time(1.0)
    assert answers == []
    tiered.runtime.let_go(WRITE)
    tiered.runtime.run_until(lambda: bool(answers))
    assert answers == [True]
    tiered.lose_power()
    assert tiered.store.lookup(tiered.namespace(), keys_of(1, 2)) == bytes([Place.DISK] * 2)


def test_a_memory_made_smaller_than_a_record_on_disk_misses_it_once(tmp_path: Path) -> None:
    with SimStore(1, 64 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=64 * PAGE) as sim:
        sim.put(sim.namespace(), keys_of(1), 9 * PAGE)
        assert sim.restart(memory_bytes=8 * PAGE)
        space = sim.namespace()
        assert sim.store.lookup(space, keys_of(1)) == bytes([Place.DISK])
        assert sim.get(space, keys_of(1, 2)) == [Miss.NOT_ADMITTED, Miss.NEVER_SEEN]
        assert sim.store.lookup(space, keys_of(1)) == bytes([Miss.NOT_ADMITTED])
