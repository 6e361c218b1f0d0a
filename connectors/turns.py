"""Whose stores are dealt with next: the connections in turn, a piece at a time, after all loads.

What a load needs (a lookup, a load, its acks) is dealt with when it arrives. What stores need takes
the control thread for as long as an engine likes to make it: it waits here, so that between two
pieces of it whatever has arrived for a load goes first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.connectors import protocol as wire
from ebbtide.tiers.supervisor import supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Pieces = Generator[None, None, None]

FOR_STORES = (wire.Reserve, wire.Commit, wire.CommitDigests, wire.Abort)
FOR_LOADS = (
    wire.Lookup, wire.Touch, wire.LoadKeys, wire.LoadToVerify, wire.Ack, wire.Dispute, wire.Release,
)  # fmt: skip
# Worth doing also when nobody hears the answer.
SETTLING = (wire.Commit, wire.CommitDigests, wire.Abort)
WAITING_MAX = 256  # messages of one connection; no more are read from it until some are done


class _Waiting(NamedTuple):
    ticket: int
    message: wire.Message


class Lane:
    """One connection's messages that wait, in order. Made by `Turns.lane`."""

    def __init__(
        self,
        turns: Turns,
        begin: Callable[[int, wire.Message], Pieces],
        failed: Callable[[int, wire.Message], None],
    ) -> None:
        self._turns = turns
        self._begin = begin
        self._failed = failed
        self._waiting: deque[_Waiting] = deque()
        self._now: _Waiting | None = None  # which one is under way
        self._pieces: Pieces | None = None
        self._closed = False

    @property
    def is_full(self) -> bool:
        """No more should be read."""
        return len(self._waiting) >= WAITING_MAX

    @property
    def has_work(self) -> bool:
        """Something waits or is half done."""
        return self._pieces is not None or bool(self._waiting)

    def takes(self, message: wire.Message) -> bool:
        """Whether the message has to wait: a store's, or any but a load's that comes behind one.

        A reset must not overtake a store that was asked for before it.
        """
        if isinstance(message, FOR_STORES):
            return True
        return self.has_work and not isinstance(message, FOR_LOADS)

    def put(self, ticket: int, message: wire.Message) -> None:
        """It waits for its turn."""
        self._waiting.append(_Waiting(ticket, message))
        self._turns.wake(self)

    def close(self) -> None:
        """The connection is gone. What is committed or aborted still is; the rest is undone."""
        self._closed = True
        self._waiting = deque(one for one in self._waiting if isinstance(one.message, SETTLING))
        if self._pieces is not None and not self._is_settling:
            self._pieces.close()
            self._pieces = None

    def step(self) -> None:
        """Do one piece. An exception is a bug: the message is answered as such."""
        if not supervised(self._step):
            assert self._now is not None
            self._failed(*self._now)

    def _step(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is None:
            self._now = self._waiting.popleft()
            pieces = self._begin(*self._now)
        try:
            next(pieces)
        except StopIteration:
            return
        if self._closed and not self._is_settling:  # by this very piece
            pieces.close()
        else:
            self._pieces = pieces

    @property
    def _is_settling(self) -> bool:
        return self._now is not None and isinstance(self._now.message, SETTLING)


class Turns:
    """Gives every lane with work one piece after the other. Control thread only."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """`call_soon`: of the loop, which looks at all sockets between two calls."""
        self._call_soon = call_soon
        self._lanes: dict[Lane, None] = {}  # with work, the next one first
        self._woken = False

    def lane(
        self,
        begin: Callable[[int, wire.Message], Pieces],
        failed: Callable[[int, wire.Message], None],
    ) -> Lane:
        """For a connection. `begin` deals with a message in pieces; `failed`: it met a bug."""
        return Lane(self, begin, failed)

    def wake(self, lane: Lane) -> None:
        """It has work."""
        self._lanes.setdefault(lane)
        self._soon()

    def _soon(self) -> None:
        if not self._woken:
            self._woken = True
            self._call_soon(self._turn)

    def _turn(self) -> None:
        self._woken = False
        lane = next(iter(self._lanes))
        del self._lanes[lane]
        if lane.has_work:  # else its connection has closed
            lane.step()
        if lane.has_work:
            self._lanes[lane] = None
        if self._lanes:
            self._soon()
