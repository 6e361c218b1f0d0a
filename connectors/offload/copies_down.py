"""Copies into granted slots: under way on the ranks, then committed, or given back.

A slot is touched by every rank that writes a shard. Only when the last of them has reported is it
committed, or given back if one of them could not copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.seam import StoreJob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.connectors.client import Client, Completion
    from ebbtide.connectors.offload.device_pool import DevicePool
    from ebbtide.connectors.offload.groups import KVGroups
    from ebbtide.connectors.offload.namespace_link import NamespaceLink
    from ebbtide.connectors.seam import WorkerReport
    from ebbtide.tiers.planner import Candidate


class Owner(Protocol):
    """Who is told how each copy ended, exactly once."""

    def stored(self, candidate: Candidate) -> None:
        """The record is committed."""
        ...

    def failed(self, candidate: Candidate) -> None:
        """It is not, and perhaps never will be."""
        ...

    def ended(self, candidate: Candidate) -> None:
        """It is not, by no fault of the block: its store has gone. May be told more than once."""
        ...


class Slot(NamedTuple):
    """A granted slot, and what shall be in it."""

    sequence: int
    candidate: Candidate


@dataclass(slots=True)
class _Copy:
    """The ranks are copying."""

    candidate: Candidate
    waiting: int  # ranks that have not reported
    whole: bool = True
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class _Commit:
    slots: Sequence[Slot]
    deadline_s: float


class CopiesDown:
    """Scheduler thread only; never waits."""

    def __init__(
        self,
        client: Client,
        pool: DevicePool,
        link: NamespaceLink,
        groups: KVGroups,
        owner: Owner,
        *,
        writers: Mapping[int, int],
        commit_timeout_s: float,
        now: Callable[[], float],
    ) -> None:
        """`writers`: per group how many ranks copy a shard of each block; one if not given."""
        self._client = client
        self._pool = pool
        self._link = link
        self._groups = groups
        self._owner = owner
        self._writers = writers
        self._commit_timeout_s = commit_timeout_s
        self._now = now
        self._copies: dict[int, _Copy] = {}  # by sequence
        self._stale: dict[int, _Copy] = {}  # the same, of a store that has gone
        self._commits: dict[int, _Commit] = {}  # by ticket
        self._unused: list[int] = []  # slots to give back to a store that is away

    @property
    def stale(self) -> bool:
        """Ranks still copy into slots of a store that has gone: its sequences must not mix."""
        return bool(self._stale)

    def begin(self, slot: Slot, offset: int) -> StoreJob:
        """The job for the ranks. The block holds what the slot is for."""
        sequence, candidate = slot
        group = self._groups.of_key(candidate.key).number
        self._copies[sequence] = _Copy(candidate, self._writers.get(group, 1))
        return StoreJob(candidate.block_id, offset, sequence, group)

    def take_fence(self) -> bool:
        """Whether a block was handed out that is perhaps still being copied. Once per block."""
        fence = False
        for copy in (*self._copies.values(), *self._stale.values()):
            if (
                not copy.fenced
                and self._pool.content(copy.candidate.block_id) != copy.candidate.key
            ):
                copy.fenced = fence = True
        return fence

    def settle(self, report: WorkerReport) -> None:
        """What one rank finished. A slot that every rank has filled is committed."""
        filled, unused = self._land(report)
        for slot in unused:
            self._owner.failed(slot.candidate)
        asked = False
        try:
            self.give_back([slot.sequence for slot in unused])
            if filled:
                ticket = self._client.submit(wire.Commit(tuple(slot.sequence for slot in filled)))
                self._commits[ticket] = _Commit(filled, self._now() + self._commit_timeout_s)
            asked = True
        finally:
            if not asked:  # a fault: nobody will hear of these again
                for slot in filled:
                    self._owner.ended(slot.candidate)

    def let_go(self, report: WorkerReport) -> None:
        """Only forget what ended. Its slots stay reserved until the store or the engine ends."""
        for landed in self._land(report):
            for slot in landed:
                self._owner.ended(slot.candidate)

    def take(self, completion: Completion) -> bool:
        """Whether the completion was ours."""
        commit = self._commits.pop(completion.ticket, None)
        if commit is None:
            return False
        message = completion.message
        codes = message.codes if isinstance(message, wire.Settled) else b""
        try:
            self._committed(commit, codes, lost=message == LOST)
        finally:  # whatever a fault left out
            for slot in commit.slots:
                self._owner.ended(slot.candidate)
        return True

    def expire(self) -> None:
        """Commits that the store does not answer have failed."""
        now = self._now()
        for ticket, commit in list(self._commits.items()):
            if now > commit.deadline_s:
                del self._commits[ticket]
                self._committed(commit, b"", lost=False)

    def give_back(self, sequences: Sequence[int] = ()) -> None:
        """Give slots back; while the store cannot be reached, as soon as it can."""
        self._unused.extend(sequences)
        if self._unused and self._link.handle is not None:
            unused, self._unused = self._unused, []
            self._client.submit(wire.Abort(tuple(unused)))

    def new_store(self) -> None:
        """Another store answers: old slots mean nothing, but ranks may still write to them."""
        self._unused.clear()
        for copy in self._copies.values():
            self._owner.ended(copy.candidate)
        self._stale.update(self._copies)
        self._copies.clear()

    def close(self) -> None:
        """Forget everything."""
        self._copies.clear()
        self._stale.clear()

    def _committed(self, commit: _Commit, codes: bytes, *, lost: bool) -> None:
        unused = []
        for number, (sequence, candidate) in enumerate(commit.slots):
            if number < len(codes) and codes[number] == 0:
                self._owner.stored(candidate)
                continue
            unused.append(sequence)
            if lost:
                self._owner.ended(candidate)
            else:
                self._owner.failed(candidate)
        self.give_back(unused)  # perhaps the store never heard of the commit

    def _land(self, report: WorkerReport) -> tuple[list[Slot], list[Slot]]:
        """Slots that no rank touches any more: filled by all, and not."""
        filled: list[Slot] = []
        unused: list[Slot] = []
        for whole, sequences in ((True, report.copied), (False, report.dropped)):
            while sequences:  # taken out: a fault later on must not count a rank twice
                sequence = sequences.pop()
                stale = sequence in self._stale
                home = self._stale if stale else self._copies
                copy = home.get(sequence)
                if copy is None:
                    continue
                copy.waiting -= 1
                copy.whole = copy.whole and whole
                if copy.waiting <= 0:
                    del home[sequence]
                    if not stale:
                        (filled if copy.whole else unused).append(Slot(sequence, copy.candidate))
        return filled[::-1], unused[::-1]
