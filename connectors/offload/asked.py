"""One request as the scheduler half sees it: what its prompt asks for, and what the store said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbtide.connectors.offload.load import TIERS
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ebbtide.connectors.offload.groups import KVGroups
    from ebbtide.connectors.offload.load_or_compute import Choice
    from ebbtide.connectors.offload.tally import RequestTally

FIRST_REASON = min(Miss)  # codes below it are places
LOADABLE = frozenset({Place.MEMORY, Place.DISK, Place.REMOTE})


@dataclass(slots=True)
class Offer:
    """What was offered to the engine for one admission, in tokens from the prompt's start."""

    start: int
    hit_end: int  # what the tiers hold in one piece
    end: int  # what is worth loading of it
    choice: Choice | None


@dataclass(slots=True)
class Asked:
    """Units are the smallest prefix step of all groups; see `KVGroups.alignment`."""

    groups: KVGroups
    block_hashes: Sequence[bytes]
    prompt_tokens: int
    tally: RequestTally
    asked_at_s: float
    keys: list[list[bytes]] = field(default_factory=list)  # per group, of the lookup
    limit_tokens: int = 0  # what the lookup covers, and a load may bring
    ticket: int = 0  # of the lookup under way
    states: list[bytes] | None = None  # per group
    offer: Offer | None = None
    lost: bool = False  # the lookup failed: not asked again before the next admission
    load_failed: bool = False  # once is enough: the rest is computed
    counted: bool = False  # admitted once: what was not loaded then is in the tally
    complete: bool = False  # what was loaded then, too, and all of it in the totals

    def loadable_tokens(self, local_tokens: int) -> int:
        """The end, in tokens, of what a load may bring when the device has the first ones.

        The last token is always computed: its logits are needed. An engine therefore reuses no
        block of its own that ends with the prompt. A load that brings other blocks brings that one
        too: behind it the engine computes one token instead of a whole block (vLLM 0.32,
        `Scheduler._update_waiting_for_remote_kv`). Not with windows: the last token's own begins
        one token before that of the token behind it, for which the blocks were chosen.
        """
        unit = self.groups.alignment
        end = (self.prompt_tokens - 1) // unit * unit
        hashed = len(self.block_hashes) * self.groups.hash_block_size
        whole = self.prompt_tokens == end + unit <= hashed and not self.groups.windowed
        return end + unit if whole and local_tokens < end else end

    def lengthen(self, num_tokens: int) -> None:
        """A preempted request comes back with the tokens that it had generated."""
        hashed = len(self.block_hashes) * self.groups.hash_block_size
        self.prompt_tokens = min(num_tokens, hashed + 1)

    def lookup_keys(self) -> tuple[bytes, ...]:
        """The keys to ask for now."""
        self.limit_tokens = self.groups.askable_tokens(self.loadable_tokens(0))
        self.keys = self.groups.all_keys(self.block_hashes, self.limit_tokens)
        return tuple(key for group in self.keys for key in group)

    def answered(self, codes: bytes) -> None:
        """The store's answer to those keys, one code each."""
        self.states = []
        for keys in self.keys:
            self.states.append(codes[: len(keys)])
            codes = codes[len(keys) :]

    def missing_keys(self) -> Iterator[bytes]:
        """The keys that no tier holds, as the store has said."""
        for keys, codes in zip(self.keys, self.states or (), strict=False):
            yield from (key for key, code in zip(keys, codes, strict=True) if code >= FIRST_REASON)

    def forget_answer(self) -> None:
        """It is stale when the request comes back."""
        self.states, self.offer, self.ticket, self.lost = None, None, 0, False

    def hit_end(self, local_tokens: int, limit_tokens: int | None = None) -> int:
        """The end, in tokens, of the longest usable prefix behind the device's own."""
        assert self.states is not None
        held = [_holds(codes) for codes in self.states]
        limit = self.limit_tokens if limit_tokens is None else limit_tokens
        return self.groups.longest_hit(held, local_tokens, limit)

    def stop_code(self, end: int) -> int:
        """What stands where the hit ends: a place if nothing stops it there."""
        assert self.states is not None
        if end >= self.limit_tokens:
            return Place.MEMORY
        next_end = end + self.groups.alignment
        for group, codes in zip(self.groups.all, self.states, strict=True):
            first = max(end // group.block_size, group.first_needed(next_end))
            for block in range(first, next_end // group.block_size):
                if codes[block] not in LOADABLE:
                    return codes[block]
        return Place.MEMORY

    def sources(self, start: int, end: int) -> list[str]:
        """Per unit between the two the slowest tier that holds a part of it."""
        assert self.states is not None
        unit, found = self.groups.alignment, []
        for position in range(start, end, unit):
            slowest = int(Place.MEMORY)
            for group, codes in zip(self.groups.all, self.states, strict=True):
                first = max(position // group.block_size, group.first_needed(end))
                needed = codes[first : (position + unit) // group.block_size]
                slowest = max(slowest, *needed) if needed else slowest
            found.append(label(slowest))
        return found

    def expected_tokens(self, start: int, end: int) -> dict[str, int]:
        """Tokens between the two by the tier that should bring them."""
        if self.states is None:
            return {}
        sources, unit = self.sources(start, end), self.groups.alignment
        return {tier: sources.count(tier) * unit for tier in TIERS if tier in sources}


def _holds(codes: bytes) -> Callable[[int], bool]:
    return lambda block: codes[block] in LOADABLE
