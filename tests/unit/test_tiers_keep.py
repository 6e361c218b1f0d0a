"""Records that a command keeps: in pieces, all or nothing, beside the pins of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.errors import EbbtideError, MisuseError, NoSpaceError
from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.keep import PIECE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.namespace import Namespace

PAGE = 4096
ONE = b"engine-1"
LENGTH = PAGE - 500
MANY = 2 * PIECE + 10


class Asked:
    """What was answered."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | EbbtideError] = []

    def __call__(self, answer: dict[str, Any] | EbbtideError) -> None:
        self.answers.append(answer)

    @property
    def report(self) -> dict[str, Any]:
        (answer,) = self.answers
        assert isinstance(answer, dict)
        return answer


def keep(sim: SimStore, space: Namespace, keys: Sequence[bytes] = ()) -> Asked:
    asked = Asked()
    sim.store.care.keeps.keep(space.digest, keys, asked)
    sim.runtime.pass_time(1.0)
    return asked


def let_go(sim: SimStore, space: Namespace, keys: Sequence[bytes] = ()) -> Asked:
    asked = Asked()
    sim.store.care.keeps.let_go(space.digest, keys, asked)
    sim.runtime.pass_time(1.0)
    return asked


def test_many_records_are_kept_and_let_go_in_pieces() -> None:
    with SimStore(7, 2 * MANY * PAGE) as sim:
        space = sim.namespace()
        sim.put(space, [key_of(number) for number in range(MANY)], LENGTH)
        asked = Asked()
        sim.store.care.keeps.keep(space.digest, (), asked)
        assert asked.answers == []
        assert sim.store.pins.kept_bytes == PIECE * PAGE
        sim.runtime.pass_time(1.0)
        assert asked.report["pinned"] == MANY
        assert asked.report["kept_bytes"] == sim.store.memory.pinned_bytes == MANY * PAGE
        asked = Asked()
        sim.store.care.keeps.let_go(space.digest, (), asked)
        assert asked.answers == []
        sim.runtime.pass_time(1.0)
        assert asked.report["unpinned"] == MANY
        assert sim.store.memory.pinned_bytes == 0
        sim.store.check_integrity()


def test_what_goes_beyond_the_bound_only_by_its_padding_is_undone_and_refused(
    sim: SimStore,
) -> None:
    space, keys = sim.namespace(), [key_of(number) for number in range(9)]
    sim.put(space, keys, LENGTH)  # the payload fits into 8 slots, 9 slots do not
    assert len(keys) * LENGTH < sim.store.bounds.pinned_max_bytes
    (answer,) = keep(sim, space).answers
    assert isinstance(answer, NoSpaceError)
    assert answer.context["wanted_bytes"] == 9 * PAGE
    assert answer.context["kept_bytes"] == sim.store.memory.pinned_bytes == 0
    assert keep(sim, space, keys[:8]).report["pinned"] == 8
    (answer,) = keep(sim, space, keys).answers
    assert isinstance(answer, NoSpaceError)
    assert answer.context["kept_bytes"] == 8 * PAGE  # what was kept before stays
    sim.put(space, [key_of(number) for number in range(9, 12)], LENGTH)
    with pytest.raises(NoSpaceError):  # plain at once: nothing is begun
        keep(sim, space)


def test_keeping_twice_is_keeping_once_and_engines_pins_are_their_own(sim: SimStore) -> None:
    space, keys = sim.namespace(), [key_of(number) for number in range(3)]
    sim.put(space, keys, LENGTH)
    assert sim.store.pin(ONE, space, keys[:1]) == 1
    assert keep(sim, space, [*keys[:2], keys[0]]).report["pinned"] == 2
    assert keep(sim, space, keys[:2]).report["pinned"] == 0
    assert sim.store.unpin(ONE, space, keys) == 1
    assert sim.store.unpin(ONE, space, keys) == 0  # what a command keeps no engine lets go
    assert sim.store.pins.kept_bytes == 2 * PAGE
    assert let_go(sim, space, keys).report["unpinned"] == 2
    assert sim.store.pins.kept_bytes == sim.store.memory.pinned_bytes == 0


def test_a_reset_between_two_pieces_leaves_nothing_kept() -> None:
    with SimStore(7, 2 * MANY * PAGE) as sim:
        space = sim.namespace()
        sim.put(space, [key_of(number) for number in range(MANY)], LENGTH)
        asked = Asked()
        sim.store.care.keeps.keep(space.digest, (), asked)
        epoch = space.epoch
        sim.store.reset(space, lambda ok: None)
        sim.runtime.pass_time(1.0)
        assert asked.report["pinned"] == PIECE
        assert epoch not in sim.store.memory._index  # nor was the old life asked for
        assert sim.store.pins.kept_bytes == sim.store.memory.pinned_bytes == 0
        assert sim.store.memory.space.used_bytes == 0
        sim.store.check_integrity()


def test_a_record_that_is_lost_between_two_pieces_is_passed_over() -> None:
    with SimStore(7, 2 * MANY * PAGE) as sim:
        space = sim.namespace()
        sim.put(space, [key_of(number) for number in range(MANY)], LENGTH)
        asked = Asked()
        sim.store.care.keeps.keep(space.digest, (), asked)
        last = sim.store.memory.find(space.epoch, key_of(MANY - 1))
        assert last is not None
        sim.store.memory.discard(last)
        sim.runtime.pass_time(1.0)
        assert asked.report["pinned"] == MANY - 1
        sim.store.check_integrity()


def test_a_kept_record_that_turns_out_corrupt_does_not_keep_its_slot(sim: SimStore) -> None:
    space = sim.namespace()
    sim.put(space, [key_of(1)], PAGE)
    keep(sim, space)
    record = sim.store.memory.find(space.epoch, key_of(1))
    assert record is not None
    sim.store.view(record, PAGE)[0] ^= 1
    sim.get(space, [key_of(1)])
    assert sim.store.pins.kept_bytes == sim.store.memory.pinned_bytes == 0
    sim.put(space, [key_of(1)], PAGE)
    assert keep(sim, space).report["pinned"] == 1
    assert let_go(sim, space).report["unpinned"] == 1


def test_an_unknown_namespace_is_misuse(sim: SimStore) -> None:
    keeps = sim.store.care.keeps
    for ask in (keeps.keep, keeps.let_go):
        with pytest.raises(MisuseError, match="unknown to this store"):
            ask(bytes(32), (), Asked())
