"""A tier's calls to its slab: in the runtime's pools, and known to be under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ebbtide.tiers.runs import RUN_BYTES_MAX, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.runs import Outcomes, Run
    from ebbtide.tiers.runtime import Runtime
    from ebbtide.tiers.slab import Slab


class SlabCalls:
    """Control thread only."""

    def __init__(self, runtime: Runtime, slab: Slab) -> None:
        self._runtime = runtime
        self._slab = slab
        self._started: dict[int, float] = {}  # those under way, since when
        self._starts = 0

    @property
    def since(self) -> float | None:
        """Since when (runtime seconds) the oldest is under way; None: none is."""
        return next(iter(self._started.values()), None)

    def start(
        self,
        pool: str,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[Outcomes], None],
    ) -> None:
        """See `Runtime.start`."""
        self._starts += 1
        number = self._starts
        self._started[number] = self._runtime.now()

        def ended(outcomes: Outcomes) -> None:
            del self._started[number]
            done(outcomes)

        self._runtime.start(pool, work, items, ended)

    def start_runs(
        self,
        pool: str,
        work: Callable[[slice], Outcomes],
        runs: Sequence[Run],
        done: Callable[[Outcomes], None],
        *,
        bytes_max: int = RUN_BYTES_MAX,
    ) -> None:
        """`work(share)` for shares of the runs, of so many bytes, each as many as the slab has
        under way at a time; then `done`, with what became of each run.
        """
        shares = shared(runs, self._slab.runs_at_once, bytes_max)
        found: Outcomes = [None] * len(runs)

        def work_on(share: slice) -> None:
            found[share] = work(share)

        def ended(raised: Outcomes) -> None:
            for share, error in zip(shares, raised, strict=True):
                if error is not None:  # the call as a whole: none of its runs is known to be right
                    found[share] = [error] * (share.stop - share.start)
            done(found)

        self.start(pool, work_on, shares, ended)
