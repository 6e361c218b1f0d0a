"""The runtimes: batches end once, timers fire once, a bug in a callback stops nobody."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import SimRuntime, StuckError
from ebbtide.tiers.runtime import COMMIT, DIGEST, POOL_THREADS, READ, VERIFY, WRITE, ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=["threads", "simulated"])
def runtime(request: pytest.FixtureRequest) -> Iterator[ThreadRuntime | SimRuntime]:
    if request.param == "simulated":
        yield SimRuntime(3)
        return
    with closing(ThreadRuntime()) as made:
        yield made


def finish(runtime: ThreadRuntime | SimRuntime, condition: Callable[[], bool]) -> None:
    if isinstance(runtime, SimRuntime):
        runtime.run_until(condition)
        return
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        runtime.wait(0.1)
        runtime.run_ready()
    assert condition()


def test_a_batch_works_on_every_item_and_ends_once(runtime: ThreadRuntime | SimRuntime) -> None:
    worked: list[int] = []
    ended: list[list[BaseException | None]] = []
    runtime.start(READ, worked.append, range(100), ended.append)
    finish(runtime, lambda: bool(ended))
    assert sorted(worked) == list(range(100))
    assert ended == [[None] * 100]


def test_p95_an_empty_batch_ends_too(runtime: ThreadRuntime | SimRuntime) -> None:
    ended: list[list[BaseException | None]] = []
    runtime.start(WRITE, print, [], ended.append)
    assert ended == []  # later, not within the call
    finish(runtime, lambda: bool(ended))
    assert ended == [[]]


def test_what_an_item_raises_is_its_own_outcome(runtime: ThreadRuntime | SimRuntime) -> None:
    def work(number: int) -> None:
        if number % 2:
            raise (KeyboardInterrupt if number == 3 else ValueError)(number)

    ended: list[list[BaseException | None]] = []
    runtime.start(VERIFY, work, range(5), ended.append)
    finish(runtime, lambda: bool(ended))
    kinds = [type(error) for error in ended[0]]
    assert kinds == [type(None), ValueError, type(None), KeyboardInterrupt, type(None)]


def test_a_timer_fires_once_and_not_before_its_time(runtime: ThreadRuntime | SimRuntime) -> None:
    fired: list[float] = []
    due = runtime.now() + 0.02
    runtime.call_later(0.02, lambda: fired.append(runtime.now()))
    cancelled = runtime.call_later(0.01, lambda: fired.append(-1.0))
    cancelled.cancel()
    cancelled.cancel()
    finish(runtime, lambda: bool(fired))
    assert len(fired) == 1
    assert fired[0] >= due


def test_a_bug_in_a_completion_is_counted_and_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(ThreadRuntime()) as runtime:
        ended: list[object] = []
        runtime.start(READ, str, [1], lambda outcomes: 1 / 0)  # type: ignore[arg-type]
        runtime.start(COMMIT, str, [1], ended.append)  # type: ignore[arg-type]
        finish(runtime, lambda: bool(ended) and runtime.faults == 1)
    assert "ZeroDivisionError" in caplog.text


def test_the_pool_of_one_thread_keeps_the_order() -> None:
    with closing(ThreadRuntime()) as runtime:
        order: list[int] = []
        for number in range(50):
            runtime.start(COMMIT, order.append, [number], lambda outcomes: None)
        finish(runtime, lambda: len(order) == 50)
        assert order == list(range(50))


def test_reads_do_not_wait_for_writes_that_hang() -> None:
    gate = threading.Event()
    with closing(ThreadRuntime()) as runtime:
        ended: list[object] = []
        runtime.start(WRITE, lambda item: gate.wait(30) and None, range(16), ended.append)  # type: ignore[arg-type]
        runtime.start(READ, str, [1], ended.append)  # type: ignore[arg-type]
        finish(runtime, lambda: len(ended) == 1)
        gate.set()
        finish(runtime, lambda: len(ended) == 2)


def test_what_is_loaded_goes_before_what_is_stored() -> None:
    """Both threads are busy with a batch of stores: they leave it after the item in hand."""
    gate, order = threading.Event(), list[str]()
    with closing(ThreadRuntime()) as runtime:

        def store(number: int) -> None:
            order.append("store")
            gate.wait(30)

        ended: list[object] = []
        runtime.start(DIGEST, store, range(40), ended.append)
        runtime.start(DIGEST, store, range(40), ended.append)
        finish(runtime, lambda: len(order) == POOL_THREADS[VERIFY])
        runtime.start(VERIFY, lambda number: order.append("load"), range(10), ended.append)
        gate.set()
        finish(runtime, lambda: len(ended) == 3)
        assert order.count("store") == 80
        # One that had just been taken may come between.
        assert "load" not in order[16:]


def test_closing_twice_is_no_error_and_leaves_no_thread() -> None:
    runtime = ThreadRuntime()
    runtime.start(READ, str, [1], lambda outcomes: None)  # type: ignore[arg-type]
    runtime.close()
    runtime.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ebbtide")]


# -- the simulated one ----------------------------------------------------------------------------


def run_of(seed: int) -> list[object]:
    runtime, seen = SimRuntime(seed), list[object]()
    for pool in (READ, WRITE, VERIFY):
        runtime.start(pool, seen.append, range(5), lambda outcomes: seen.append("done"))
    runtime.call_later(0.001, lambda: seen.append("timer"))
    runtime.settle()
    runtime.pass_time(1.0)
    return seen


def test_a_seed_reproduces_its_run_and_others_differ() -> None:
    assert all(run_of(seed) == run_of(seed) for seed in range(20))
    assert len({tuple(run_of(seed)) for seed in range(20)}) == 20


def test_a_held_pool_hangs_and_nothing_else_does() -> None:
    runtime, seen = SimRuntime(1), list[str]()
    runtime.hold(WRITE)
    runtime.start(WRITE, lambda item: seen.append("write"), [1, 2], lambda o: seen.append("done"))
    runtime.start(READ, lambda item: seen.append("read"), [1], lambda outcomes: None)
    runtime.settle()
    assert seen == ["read"]
    assert runtime.waiting(WRITE) == 2
    assert not runtime.idle
    with pytest.raises(StuckError):
        runtime.run_until(lambda: "done" in seen)
    runtime.let_go(WRITE)
    runtime.settle()
    assert seen == ["read", "write", "write", "done"]
    assert runtime.idle


def test_a_slow_pool_ends_later_on_the_simulated_clock_and_others_do_not() -> None:
    runtime, ended = SimRuntime(1), list[tuple[str, float]]()

    def start(pool: str) -> None:
        runtime.start(pool, lambda _: None, [1, 2], lambda _: ended.append((pool, runtime.now())))

    runtime.slow(WRITE, 15.0)
    start(WRITE)
    runtime.slow(WRITE, 0.0)
    start(READ)
    runtime.settle()
    assert [pool for pool, _ in ended] == [READ]
    assert (runtime.waiting(WRITE), runtime.idle) == (2, False)
    runtime.pass_time(14.0)
    assert len(ended) == 1
    runtime.pass_time(2.0)
    assert ended[1][0] == WRITE
    assert 15.0 <= ended[1][1] < 15.1
    start(WRITE)
    runtime.settle()
    assert len(ended) == 3
    assert (runtime.waiting(WRITE), runtime.idle) == (0, True)


def test_time_passes_only_where_it_may() -> None:
    runtime, seen = SimRuntime(1), list[str]()
    runtime.call_later(10.0, lambda: seen.append("ten"))
    runtime.call_later(20.0, lambda: seen.append("twenty"))
    runtime.settle()
    assert (seen, runtime.now()) == ([], 0.0)
    assert not runtime.step(jump=False)
    runtime.pass_time(15.0)
    assert (seen, runtime.now()) == (["ten"], 15.0)
    assert runtime.step()
    assert seen == ["ten", "twenty"]
    assert not runtime.step()


def test_a_timer_that_sets_itself_again_at_once_is_found() -> None:
    runtime = SimRuntime(1)

    def again() -> None:
        runtime.call_later(0.0, again)

    again()
    with pytest.raises(StuckError, match="again"):
        runtime.pass_time(1.0)
    with pytest.raises(StuckError, match="still busy"):
        runtime.settle(1000)


def test_a_bug_in_a_simulated_completion_is_raised() -> None:
    runtime = SimRuntime(1)
    runtime.start(READ, str, [1], lambda outcomes: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        runtime.settle()
