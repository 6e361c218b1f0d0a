"""Which device blocks ebb in this step. One pure function; everything it needs is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Set


class Candidate(NamedTuple):
    """A device block with a full, computed content."""

    block_id: int
    key: bytes


class Plan(NamedTuple):
    """`demote` in the order in which slots should be reserved; `deferred` waits a step."""

    demote: list[Candidate]
    deferred: list[Candidate]


def plan_demotions(
    newly_full: Iterable[Candidate],
    free_head: Iterable[Candidate],
    budget_bytes: int,
    *,
    record_bytes: int,
    settled: Set[bytes],
) -> Plan:
    """Choose what to copy out of the device pool, nearest to eviction first.

    `free_head`: blocks at the head of the pool's free queue, in the order in which the pool will
    hand them out: they are lost first, so they ebb first. `newly_full`: blocks that filled since
    the last step, and those deferred before, oldest first; a chain's blocks in chain order, so that
    what has ebbed is always a usable prefix. `settled`: keys that are held below or being put,
    which are never copied again.

    Guarantee: with a budget of at least the bytes that the pool hands out per step, a block is
    planned before the pool evicts it. O(candidates looked at).
    """
    room = budget_bytes // record_bytes if record_bytes else 0
    demote: list[Candidate] = []
    deferred: list[Candidate] = []
    chosen: set[bytes] = set()
    for candidate in free_head:
        if len(demote) >= room:
            break
        if candidate.key not in settled and candidate.key not in chosen:
            chosen.add(candidate.key)
            demote.append(candidate)
    for candidate in newly_full:
        if candidate.key in settled or candidate.key in chosen:
            continue
        chosen.add(candidate.key)
        (demote if len(demote) < room else deferred).append(candidate)
    return Plan(demote, deferred)
