"""Fixtures of all tests: nothing may leak, and recorded traces are found or skipped loudly."""

from __future__ import annotations

import asyncio
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.leaks import leaked_tasks, leaks_since, take_snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.controls import Reference

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a descriptor, thread, process, /dev/shm entry or task behind.

    Set up before every other fixture of the test and therefore torn down after all of them.
    """
    before = take_snapshot()
    yield
    leaks = leaks_since(before)
    if leaks:
        pytest.fail("the test leaked " + "; ".join(leaks), pytrace=False)


@pytest_asyncio.fixture
async def no_task_leaks() -> AsyncIterator[None]:
    """Fail an asynchronous test that leaves a task running when its fixtures are torn down."""
    before = asyncio.all_tasks()
    yield
    leaks = await leaked_tasks(before)
    if leaks:
        pytest.fail("the test leaked " + "; ".join(leaks), pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every asynchronous test the task check, right behind the check of everything else."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            place = item.fixturenames.index("nothing_leaks") + 1
            item.fixturenames.insert(place, "no_task_leaks")


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Return the directory of recorded traces: `EBBTIDE_TRACES`, or the one beside the checkout."""
    named = os.environ.get("EBBTIDE_TRACES")
    place = Path(named) if named else REPOSITORY.parent / "shared" / "traces"
    if not place.is_dir():
        pytest.skip(f"NO TRACES: {place} is no directory; set EBBTIDE_TRACES to one with traces")
    return place


# Tests of an engine start from these. The rest of the tests need no tensors, hence the late import.


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """Every test of a module computes its products in one thread."""
    from tests.controls import one_thread

    with one_thread():
        yield


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The right answers of the smallest model, each computed once in a module."""
    from tests.controls import Reference

    return Reference()
