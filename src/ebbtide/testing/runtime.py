"""The store's runtime without threads: a seed decides what happens next, and when.

The same seed and the same calls give the same run. Everything that the protocol
`tiers.runtime.Runtime` leaves open is drawn: the order of a pool's items, over all batches and
pools; how long a finished batch waits for its `done`; the order of due timers; whether time passes
while I/O is under way. What it does not model: two pieces of work at the very same time. Every
item runs whole, at one moment.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any

from ebbtide.tiers.runtime import Timer
from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEP_S_MAX = 0.001  # how much time a step may take
HURRY_ODDS = 16  # one step in so many lets the next timer come due before waiting I/O
TRACE_STEPS = 40
WALL_START_S = 1_750_000_000.0  # some day in 2025


class StuckError(AssertionError):
    """A condition did not come true: nothing is left to run, or it took too many steps."""


class _Job:
    __slots__ = ("done", "items", "outcomes", "pending", "pool", "work")

    def __init__(
        self,
        pool: str,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        self.pool = pool
        self.work = work
        self.items = items
        self.done = done
        self.outcomes: list[BaseException | None] = [None] * len(items)
        self.pending = list(range(len(items)))


class SimRuntime:
    """Implements `tiers.runtime.Runtime`. One thread: whoever calls `step` is the control thread.

    An exception from a callback is raised out of `step`: under test a bug must not be survived. An
    exception from a pool's work is the item's outcome, as in every runtime.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=TRACE_STEPS)  # the latest steps, for a failing test
        self._now = 0.0
        self._jobs: list[_Job] = []
        self._timers: list[Timer] = []
        self._held: set[str] = set()
        self._delays: dict[str, float] = {}  # by pool
        self._late: list[_Job] = []  # started in a slow pool, and not yet with the others

    # -- the protocol ---------------------------------------------------------------------------

    def now(self) -> float:
        """Simulated seconds since the start. Only `step` and its relatives move them."""
        return self._now

    def wall(self) -> float:
        """As if the start had been at `WALL_START_S`."""
        return WALL_START_S + self._now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Run `call` in some step at or after `now() + delay_s`."""
        timer = Timer(self._now + delay_s, call)
        self._timers.append(timer)
        return timer

    def start(
        self,
        pool: str,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        """Run `work` on each item in steps of their own, then `done` in another."""
        job = _Job(pool, work, items, done)
        if pool not in self._delays:
            self._jobs.append(job)
            return
        self._late.append(job)

        def arrive() -> None:
            self._late.remove(job)
            self._jobs.append(job)

        self.call_later(self._delays[pool], arrive)

    # -- running it -----------------------------------------------------------------------------

    def step(self, *, jump: bool = True) -> bool:
        """Do one thing: an item's work, a batch's `done`, or a timer. False: nothing is left.

        When only later timers are left, time jumps to the next one, unless `jump` is False.
        """
        return self._step(until_s=None if jump else self._now + STEP_S_MAX)

    def run_until(self, condition: Callable[[], bool], steps_max: int = 10_000) -> None:
        """Step until `condition()`. Raises StuckError when it cannot or does not come true."""
        for _ in range(steps_max):
            if condition():
                return
            if not self.step():
                break
        if not condition():
            raise StuckError(f"not reached after {self.steps} steps; latest: {list(self.trace)}")

    def settle(self, steps_max: int = 100_000) -> None:
        """Step until all that is started has ended and no timer is due. Time does not jump.

        What waits in a held or a slow pool is left alone. Raises StuckError when it does not end.
        """
        for _ in range(steps_max):
            if not self._step(until_s=self._now):
                return
        raise StuckError(f"still busy after {self.steps} steps; latest: {list(self.trace)}")

    def pass_time(self, seconds: float, steps_max: int = 100_000) -> None:
        """Do everything that falls due within `seconds`, and be that much later.

        Raises StuckError when it does not come to rest, as when a timer sets itself again at once.
        """
        until_s = self._now + seconds
        for _ in range(steps_max):
            if not self._step(until_s):
                self._now = max(self._now, until_s)
                return
        raise StuckError(f"still busy after {self.steps} steps; latest: {list(self.trace)}")

    def stand_still(self, seconds: float) -> None:
        """Be that much later without having done anything, as a process that was stopped."""
        self._now += seconds

    @property
    def idle(self) -> bool:
        """Nothing is started that has not ended, in no pool, and no timer is due."""
        return not (self._jobs or self._late) and not any(
            t.call and t.due_s <= self._now for t in self._timers
        )

    def close(self) -> None:
        """The process ends: nothing that was started or set runs any more."""
        self._jobs.clear()
        self._late.clear()
        self._timers.clear()

    # -- slow and hanging devices ---------------------------------------------------------------

    def hold(self, pool: str) -> None:
        """From now on no item of the pool runs: a device that hangs. Idempotent."""
        self._held.add(pool)

    def let_go(self, pool: str) -> None:
        """The pool's items may run again."""
        self._held.discard(pool)

    def slow(self, pool: str, seconds: float) -> None:
        """Whatever is started in the pool from now on ends so much later. 0: no later than ever."""
        if seconds:
            self._delays[pool] = seconds
        else:
            self._delays.pop(pool, None)

    def waiting(self, pool: str) -> int:
        """How many items of the pool have not run yet."""
        jobs = (*self._jobs, *self._late)
        return sum(len(job.pending) for job in jobs if job.pool == pool)

    # -- inside ---------------------------------------------------------------------------------

    def _step(self, until_s: float | None) -> bool:
        """As `step`, but never later than `until_s` and never past it to a timer."""
        self._timers = [timer for timer in self._timers if timer.call is not None]
        runnable = [j for j in self._jobs if not j.pending or j.pool not in self._held]
        due = [timer for timer in self._timers if timer.due_s <= self._now]
        hurry = not due and self.random.randrange(HURRY_ODDS) == 0
        if not due and (hurry or not runnable):
            due = self._next_timer(until_s)
        if not (runnable or due):
            return False
        self.steps += 1
        if due and (hurry or not runnable or self.random.randrange(len(runnable) + 1) == 0):
            self._fire(self.random.choice(due))
        else:
            self._work(self.random.choice(runnable))
        limit_s = self._now + STEP_S_MAX if until_s is None else until_s
        self._now += min(self.random.random() * STEP_S_MAX, max(0.0, limit_s - self._now))
        return True

    def _next_timer(self, until_s: float | None) -> list[Timer]:
        """Let time pass to the next timer; empty when that is later than `until_s`."""
        soonest = min((timer.due_s for timer in self._timers), default=None)
        if soonest is None or (until_s is not None and soonest > until_s):
            return []
        self._now = max(self._now, soonest)
        return [timer for timer in self._timers if timer.due_s <= self._now]

    def _fire(self, timer: Timer) -> None:
        call, timer.call = timer.call, None
        if call is not None:
            self.trace.append(f"timer {getattr(call, '__qualname__', call)}")
            call()

    def _work(self, job: _Job) -> None:
        if job.pending:
            index = job.pending.pop(self.random.randrange(len(job.pending)))
            self.trace.append(f"{job.pool} {index + 1}/{len(job.items)}")
            job.outcomes[index] = outcome_of(job.work, job.items[index])
        else:
            self._jobs.remove(job)
            self.trace.append(f"{job.pool} done {len(job.items)}")
            job.done(job.outcomes)
