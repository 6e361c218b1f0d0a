"""Clock, timers and I/O threads under the store's one control thread.

All state of the store changes on one thread, between calls: no lock guards it. Blocking work
(reads, writes, digests, commits) is started in a named pool; its completion is a call on the
control thread. The same store runs under `ThreadRuntime` (polled, for an in-process client),
`AsyncioRuntime` (in `connectors/server.py`) and the seeded simulation's runtime
(`ebbtide.testing`).
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide.tiers.supervisor import outcome_of, supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READ, WRITE, VERIFY, COMMIT, POPULATE = "read", "write", "verify", "commit", "populate"
DIGEST, REOPEN = "digest", "reopen"
POOL_THREADS = {READ: 8, WRITE: 8, VERIFY: 2, COMMIT: 1, POPULATE: 2, REOPEN: 1}
# A pool that has the threads of another, which leave it after every item when that one has work.
GIVES_WAY = {DIGEST: VERIFY}  # what is stored, to what is loaded


class Timer:
    """A pending call. `cancel` may be called any number of times, also after it fired."""

    __slots__ = ("call", "due_s")

    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Runtime(Protocol):
    """What the store needs from the world around it. Control thread only."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 by the machine's clock, which may jump: to tell ages, never order."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Run `call` on the control thread after `delay_s`."""
        ...

    def start(
        self,
        pool: str,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        """Run `work(item)` for each item in a pool's threads, then `done(outcomes)` on the control
        thread.

        `outcomes[i]` is what `work(items[i])` raised, or None. With no items `done` is still
        called, later.
        """
        ...


class _Batch:
    __slots__ = ("done", "items", "lock", "next", "outcomes", "running", "work")

    def __init__(
        self,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        self.work = work
        self.items = items
        self.done = done
        self.outcomes: list[BaseException | None] = [None] * len(items)
        self.next = itertools.count()
        self.running = 0
        self.lock = threading.Lock()


class _Pool:
    """What the threads of a pool have before them."""

    def __init__(self) -> None:
        self.tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a thread wakes; False: ends
        self.urgent: deque[_Batch] = deque()
        self.patient: deque[_Batch] = deque()  # of a pool that gives way

    def put(self, batch: _Batch, *, gives_way: bool) -> None:
        """Wake one thread for a share of the batch."""
        (self.patient if gives_way else self.urgent).append(batch)
        self.tokens.put(True)

    def next_urgent(self) -> _Batch | None:
        """A share of a batch that nothing comes before."""
        return _popped(self.urgent)

    def next_patient(self) -> _Batch | None:
        """A share of a batch that gives way."""
        return _popped(self.patient)


def _popped(batches: deque[_Batch]) -> _Batch | None:
    try:
        return batches.popleft()
    except IndexError:  # another thread was here first
        return None


class ThreadRuntime:
    """Real threads, real time, polled by its owner: `run_ready()` runs what is due, `wait()`
    sleeps.

    Threads of a pool start with its first batch and end with `close()`. One batch is shared by all
    threads of its pool; the last one to finish reports, so that a batch costs one wake-up however
    many items it has. Batches of a pool in `GIVES_WAY` are done between those of another one.
    """

    def __init__(self, pool_threads: dict[str, int] | None = None) -> None:
        self._threads_of = {**POOL_THREADS, **(pool_threads or {})}
        self._pools: dict[str, _Pool] = {}
        self._threads: list[threading.Thread] = []
        self._finished: deque[_Batch] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._awake = threading.Event()
        self.faults = (
            0  # control-thread callbacks that raised: each is a bug, logged with its trace
        )

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self.now() + delay_s, call)
        heapq.heappush(self._timers, (timer.due_s, next(self._order), timer))
        return timer

    def start(
        self,
        pool: str,
        work: Callable[[Any], None],
        items: Sequence[Any],
        done: Callable[[list[BaseException | None]], None],
    ) -> None:
        batch = _Batch(work, items, done)
        # An empty batch has no last thread to report it: without this it would never end.
        if not items:
            self._finished.append(batch)
            self._wake()
            return
        threads = GIVES_WAY.get(pool, pool)
        shares = min(self._threads_of[threads], len(items))
        batch.running = shares
        for _ in range(shares):
            self._pool(threads).put(batch, gives_way=threads != pool)

    def run_ready(self) -> int:
        """Run finished batches' `done` and due timers. Returns how many calls were made."""
        calls = 0
        self._awake.clear()
        while self._finished:
            batch = self._finished.popleft()
            calls += 1
            self.faults += not supervised(batch.done, batch.outcomes)
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            call, timer.call = timer.call, None
            if call is not None:
                calls += 1
                self.faults += not supervised(call)
        return calls

    def wait(self, timeout_s: float) -> None:
        """Sleep until a batch has finished, a timer is due, or `timeout_s` have passed."""
        if self._timers:
            timeout_s = min(timeout_s, max(0.0, self._timers[0][0] - self.now()))
        self._awake.wait(timeout_s)

    def close(self) -> None:
        """End the threads after what they are doing now. Idempotent."""
        for name, pool in self._pools.items():
            for _ in range(self._threads_of[name]):
                pool.tokens.put(False)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._pools.clear()

    def _wake(self) -> None:
        self._awake.set()

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = _Pool()
            for number in range(self._threads_of[name]):
                thread = threading.Thread(
                    target=self._run, args=(pool,), name=f"ebbtide-{name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        return pool

    def _run(self, pool: _Pool) -> None:
        while pool.tokens.get():
            urgent = pool.next_urgent()
            if urgent is not None:
                self._share(urgent)
                continue
            patient = pool.next_patient()
            if patient is not None:  # else a thread has done it that gave way
                self._share(patient, gives_way_in=pool)

    def _share(self, batch: _Batch, gives_way_in: _Pool | None = None) -> None:
        """Do items of a batch until none is left."""
        count = len(batch.items)
        while (index := next(batch.next)) < count:
            batch.outcomes[index] = outcome_of(batch.work, batch.items[index])
            while gives_way_in and (urgent := gives_way_in.next_urgent()):
                self._share(urgent)
        with batch.lock:
            batch.running -= 1
            last = batch.running == 0
        if last:
            self._finished.append(batch)
            self._wake()
