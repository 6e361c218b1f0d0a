"""Runs of neighbouring slots, and how many of them make one call."""

from __future__ import annotations

import errno
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.testing import MemorySlab, SimRuntime
from ebbtide.tiers.runs import RUN_BYTES_MAX, Run, shared
from ebbtide.tiers.runtime import READ
from ebbtide.tiers.slab_calls import SlabCalls

if TYPE_CHECKING:
    from ebbtide.tiers.runs import Outcomes

PAGE = 4096


def runs_of(sizes: list[int]) -> list[Run]:
    return [Run(number, [memoryview(bytes(size))]) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9), st.integers(1, 100))
def test_shares_have_every_run_once_and_no_more_than_they_may(
    sizes: list[int], at_once: int, bytes_max: int
) -> None:
    runs = runs_of(sizes)
    shares = [runs[share] for share in shared(runs, at_once, bytes_max)]
    assert [run for share in shares for run in share] == runs
    for share in shares:
        assert 1 <= len(share) <= at_once
        assert len(share) == 1 or sum(run.size_bytes for run in share) <= bytes_max
    for share, following in pairwise(shares):
        more = sum(run.size_bytes for run in [*share, following[0]])
        assert len(share) == at_once or more > bytes_max


def test_what_a_call_raises_is_what_became_of_all_its_runs() -> None:
    runtime, slab, found = SimRuntime(seed=0), MemorySlab(PAGE), list[object]()
    slab.runs_at_once = 3
    calls, failure = SlabCalls(runtime, slab), OSError(errno.EIO, "one run")
    asked = list[slice]()

    def work(share: slice) -> Outcomes:
        asked.append(share)
        if share.start == 3:
            raise MemoryError
        said: Outcomes = [None, failure, None]
        return said[: share.stop - share.start]

    calls.start_runs(READ, work, runs_of([1] * 7), found.extend, bytes_max=RUN_BYTES_MAX)
    assert calls.since == runtime.now()
    runtime.settle()
    assert calls.since is None
    assert sorted(share.start for share in asked) == [0, 3, 6]
    assert found[:3] == [None, failure, None]
    assert [type(each) for each in found[3:6]] == [MemoryError] * 3
    assert found[6:] == [None]
