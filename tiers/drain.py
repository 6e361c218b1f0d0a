"""A drain: what only memory holds is written to disk, until a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.memory import MemoryTier
    from ebbtide.tiers.mover import Mover
    from ebbtide.tiers.runtime import Runtime

LOOK_AGAIN_S = 0.005


class Drain:
    """One drain, under way from the moment when it is made. Control thread only.

    `done(everything is durable)` is called once, by the deadline.
    """

    def __init__(
        self,
        runtime: Runtime,
        memory: MemoryTier,
        disk: DiskTier,
        mover: Mover,
        deadline_s: float,
        done: Callable[[bool], None],
    ) -> None:
        self._runtime = runtime
        self._memory = memory
        self._disk = disk
        self._mover = mover
        self._done: Callable[[bool], None] | None = done
        self._deadline = runtime.call_later(deadline_s, lambda: self._answer(False))
        self._look()

    def _look(self) -> None:
        if self._done is None:
            return
        if self._disk.down:
            self._answer(False)
        elif self._is_written:
            self._disk.flush(self._flushed)
        else:
            self._mover.drain()
            self._runtime.call_later(LOOK_AGAIN_S, self._look)

    @property
    def _is_written(self) -> bool:
        return not self._memory.dirty and self._mover.idle

    def _flushed(self, ok: bool) -> None:
        if ok and not self._is_written:  # more came meanwhile
            self._look()
        else:
            self._disk.save_recency(lambda saved: self._answer(ok and saved))

    def _answer(self, ok: bool) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            self._deadline.cancel()
            done(ok)
