"""Which device blocks ebb in this step. One pure function; everything it needs is an argument."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Candidate(NamedTuple):
    """A device block with a full, computed content."""

    block_id: int
    key: bytes


def plan_demotions(
    offered: Iterable[Candidate],
    free_head: Iterable[Candidate],
    budget_bytes: int,
    *,
    record_bytes: Callable[[bytes], int],
    settled: Callable[[bytes], bool],
) -> list[Candidate]:
    """Choose what to copy out of the device pool, nearest to eviction first.

    `free_head`: blocks at the head of the pool's free queue, in the order in which the pool will
    hand them out: they are lost first, so they ebb first. `offered`: blocks that filled, oldest
    first; a chain's blocks in chain order, so that what has ebbed is always a usable prefix. It is
    only consumed as far as the budget reaches: what is left there waits for the next step.
    `settled(key)`: held below or on its way, never copied again. `record_bytes(key)`: its cost.

    Guarantee: with a budget of at least the bytes that the pool hands out per step, a block is
    planned before the pool evicts it. The budget is exceeded by less than one record. O(looked at).
    """
    demote: list[Candidate] = []
    chosen: set[bytes] = set()
    room = budget_bytes
    if room <= 0:
        return demote
    for candidate in itertools.chain(free_head, offered):
        if candidate.key in chosen or settled(candidate.key):
            continue
        chosen.add(candidate.key)
        demote.append(candidate)
        room -= record_bytes(candidate.key)
        if room <= 0:
            break
    return demote
