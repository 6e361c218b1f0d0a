"""Loads that wait for a memory slot: first in first out within an engine, the engines in turn."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide.tiers.load import Load


class SlotQueue:
    """Whose turn it is. Control thread only; O(1) but for `remove`, O(waiting of one engine)."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Load]] = {}  # by engine; the first one has the turn
        self._engine_of: dict[Load, bytes] = {}

    def __len__(self) -> int:
        return len(self._engine_of)

    @property
    def engines(self) -> int:
        """How many have a load that waits."""
        return len(self._waiting)

    @property
    def head(self) -> Load | None:
        """The load whose turn it is."""
        for loads in self._waiting.values():
            return loads[0]
        return None

    def add(self, engine: bytes, load: Load) -> None:
        """It waits, behind its engine's others."""
        self._waiting.setdefault(engine, deque()).append(load)
        self._engine_of[load] = engine

    def remove(self, load: Load) -> None:
        """It has its slot, or wants none any more. If it had the turn, the next engine has it."""
        had_turn = self.head is load
        engine = self._engine_of.pop(load)
        self._waiting[engine].remove(load)
        if not self._waiting[engine]:
            del self._waiting[engine]
        elif had_turn:
            self.pass_turn()

    def pass_turn(self) -> None:
        """The engine at the head goes behind the others."""
        engine = next(iter(self._waiting))
        self._waiting[engine] = self._waiting.pop(engine)
