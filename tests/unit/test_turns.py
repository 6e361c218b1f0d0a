"""Stores of several connections: whose turn it is, what may overtake them, what an end undoes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.turns import Lane, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.connectors.turns import Pieces

RESERVE, COMMIT = wire.Reserve(0, 4096, ()), wire.Commit(())


class Loop:
    """What a loop does with calls, and what became of messages."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.turns = Turns(self.calls.append)
        self.told: list[str] = []
        self.undone: list[str] = []

    def lane(self, name: str, pieces: int = 3, *, fails: bool = False) -> Lane:
        def begin(ticket: int, message: wire.Message) -> Pieces:
            try:
                for number in range(pieces):
                    self.told.append(f"{name}{ticket}.{number}")
                    if fails:
                        raise ZeroDivisionError
                    if number + 1 < pieces:
                        yield
            except GeneratorExit:
                self.undone.append(f"{name}{ticket}")
                raise

        return self.turns.lane(begin, lambda ticket, message: self.told.append(f"failed {ticket}"))

    def run(self, calls: int = 100) -> None:
        for _ in range(calls):
            if self.calls:
                self.calls.popleft()()


def test_lanes_take_turns_piece_by_piece_and_call_by_call() -> None:
    loop = Loop()
    many, few = loop.lane("m"), loop.lane("f", 1)
    for ticket in (1, 2):
        many.put(ticket, RESERVE)
    few.put(7, RESERVE)
    few.put(8, RESERVE)
    for told in range(5):
        assert (len(loop.told), len(loop.calls)) == (told, 1)
        loop.run(1)
    assert loop.told == ["m1.0", "f7.0", "m1.1", "f8.0", "m1.2"]
    loop.run()
    assert loop.told[5:] == ["m2.0", "m2.1", "m2.2"]
    assert not loop.calls


def test_only_what_loads_need_overtakes_a_store() -> None:
    lane = Loop().lane("a")
    reset, load = wire.Reset(0), wire.LoadKeys(0, ())
    assert not lane.takes(reset)
    assert lane.takes(RESERVE)
    assert lane.takes(COMMIT)
    assert lane.takes(wire.CommitDigests(()))
    lane.put(1, RESERVE)
    assert lane.takes(reset)
    assert not lane.takes(load)
    assert not lane.takes(wire.Ack(1, 0))
    assert not lane.takes(wire.LoadToVerify(0, ()))
    assert not lane.takes(wire.Dispute(1, 0, ()))


def test_a_reset_waits_also_for_a_store_that_is_half_done() -> None:
    loop = Loop()
    lane = loop.lane("a")
    lane.put(1, RESERVE)
    loop.run(1)
    assert lane.takes(wire.Reset(0))
    loop.run()
    assert not lane.takes(wire.Reset(0))


@pytest.mark.parametrize("commit", [COMMIT, wire.CommitDigests(())])
def test_the_end_of_a_connection_undoes_reservations_and_keeps_commits(
    commit: wire.Message,
) -> None:
    loop = Loop()
    first, second = loop.lane("a"), loop.lane("b")
    first.put(1, RESERVE)
    first.put(2, RESERVE)
    first.put(3, commit)
    second.put(1, commit)
    loop.run(2)
    first.close()
    second.close()
    loop.run()
    assert loop.undone == ["a1"]
    assert loop.told == ["a1.0", "b1.0", "a3.0", "b1.1", "a3.1", "b1.2", "a3.2"]


def test_a_piece_that_ends_its_own_connection_is_the_last_one() -> None:
    """As one whose answer is too much for a client that does not read."""
    loop = Loop()

    def begin(ticket: int, message: wire.Message) -> Pieces:
        try:
            lane.close()
            yield
            loop.told.append("more")
        except GeneratorExit:
            loop.undone.append("half")
            raise

    lane = loop.turns.lane(begin, lambda ticket, message: None)
    lane.put(1, RESERVE)
    loop.run(1)
    assert (loop.told, loop.undone, len(loop.calls)) == ([], ["half"], 0)


def test_a_bug_in_a_piece_is_told_and_the_next_message_is_dealt_with() -> None:
    loop = Loop()
    broken, whole = loop.lane("x", fails=True), loop.lane("w", 1)
    broken.put(1, RESERVE)
    broken.put(2, RESERVE)
    whole.put(3, RESERVE)
    loop.run()
    assert loop.told == ["x1.0", "failed 1", "w3.0", "x2.0", "failed 2"]
