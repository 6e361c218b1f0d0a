"""A load's holder that trusts nothing: it checks what `tiers.load.Sink` promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.tiers.load import Granted
    from ebbtide.tiers.reasons import Miss


class RecordingSink:
    """Records what a load of `keys` keys reports; raises AssertionError when it breaks its word.

    Checked: every position is named exactly once and exists; batch numbers are new; `done` comes
    once and behind the last key; `over` comes once, behind `done`, with no batch unacknowledged
    (the holder calls `acked` before `Load.ack`).
    """

    def __init__(
        self,
        keys: int,
        *,
        on_batch: Callable[[int, list[Granted]], None] = lambda batch, granted: None,
        on_failed: Callable[[list[tuple[int, Miss]]], None] = lambda failures: None,
    ) -> None:
        self.keys = keys
        self.granted: dict[int, Granted] = {}  # by position
        self.failures: dict[int, Miss] = {}  # by position
        self.open_batches: dict[int, list[Granted]] = {}  # not acknowledged yet
        self.batches = 0
        self.is_done = False
        self.is_over = False
        self._on_batch = on_batch
        self._on_failed = on_failed

    def batch(self, batch: int, granted: list[Granted]) -> None:
        assert granted, "an empty batch"
        assert batch == self.batches, f"batch {batch} came as number {self.batches}"
        self.batches += 1
        for record in granted:
            self._name(record.position)
            self.granted[record.position] = record
        self.open_batches[batch] = granted
        self._on_batch(batch, granted)

    def failed(self, failures: list[tuple[int, Miss]]) -> None:
        assert failures, "an empty list of failures"
        for position, reason in failures:
            self._name(position)
            self.failures[position] = reason
        self._on_failed(failures)

    def done(self) -> None:
        assert not self.is_done, "done twice"
        named = len(self.granted) + len(self.failures)
        assert named == self.keys, f"done after {named} of {self.keys} keys"
        self.is_done = True

    def over(self) -> None:
        assert self.is_done, "over before done"
        assert not self.is_over, "over twice"
        assert not self.open_batches, f"over with {len(self.open_batches)} batches unacknowledged"
        self.is_over = True

    def acked(self, batch: int) -> list[Granted]:
        """The holder is about to acknowledge the batch. Returns what it held."""
        return self.open_batches.pop(batch)

    def _name(self, position: int) -> None:
        assert not self.is_done, f"position {position} named after done"
        assert 0 <= position < self.keys, f"position {position} does not exist"
        named = position in self.granted or position in self.failures
        assert not named, f"position {position} named twice"
