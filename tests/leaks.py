"""What a test must not leave behind: descriptors, threads, child processes, shared memory, tasks.

A snapshot is taken before a test and compared after it. What looks like a leak gets a second of
grace, because threads and processes that were told to end need a moment to do so.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

GRACE_S = 1.0
OUR_PREFIX = "ebbtide"

# Opened once per process by libraries and kept until exit.
_LASTING_TARGETS = ("/dev/urandom", "/dev/random", "/dev/null", "/dev/nvidia")
# The standard library's own process for named shared memory and semaphores; it also holds a pipe.
_LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def open_descriptors() -> dict[str, str]:
    """Return what is open in this process: descriptor -> target, as /proc shows it."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if not target.startswith(_LASTING_TARGETS):
            found[number] = target
    return found


def _tracker_descriptors() -> set[str]:
    from multiprocessing import resource_tracker

    number = getattr(resource_tracker._resource_tracker, "_fd", None)
    return {str(number)}


def child_processes() -> dict[str, str]:
    """Return the children of this process: process id -> command line; zombies are children."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue  # the thread has ended
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                command = ""
            if not any(lasting in command for lasting in _LASTING_PROCESSES):
                found[pid] = command.strip() or "(ended, but nobody waited for it)"
    return found


def live_threads() -> dict[str, str]:
    """Return the threads that count: all that keep the process alive, and ours in any case."""
    return {
        str(thread.ident): thread.name
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith(OUR_PREFIX)
    }


def shared_memory() -> dict[str, str]:
    """Return the entries of /dev/shm that are ours by name or that this process holds open.

    The directory belongs to the whole machine: other entries come and go without us.
    """
    held = set(open_descriptors().values())
    mapped = Path("/proc/self/maps").read_text()
    found = {}
    for entry in Path("/dev/shm").iterdir():
        if entry.name.startswith(OUR_PREFIX) or str(entry) in held or str(entry) in mapped:
            found[entry.name] = str(entry)
    return found


class Snapshot(NamedTuple):
    """All kinds of leftovers at one moment, each as id -> name."""

    descriptors: dict[str, str]
    threads: dict[str, str]
    children: dict[str, str]
    shared_memory: dict[str, str]


def take_snapshot() -> Snapshot:
    """Return what exists now."""
    return Snapshot(open_descriptors(), live_threads(), child_processes(), shared_memory())


def _new_since(before: Snapshot) -> list[str]:
    found = []
    for kind, old, new in zip(Snapshot._fields, before, take_snapshot(), strict=True):
        lasting = _tracker_descriptors() if kind == "descriptors" else set()
        found += [
            f"{kind}: {name} ({identity})"
            for identity, name in sorted(new.items())
            if old.get(identity) != name and identity not in lasting
        ]
    return found


def leaks_since(before: Snapshot, *, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """Return a line per thing that exists now, did not in `before`, and outlives the grace."""
    deadline = time.monotonic() + GRACE_S
    leaks = _new_since(before)
    if leaks:
        gc.collect()
        leaks = _new_since(before)
    while leaks and time.monotonic() < deadline:
        sleep(0.02)
        leaks = _new_since(before)
    return leaks


async def leaked_tasks(before: set[asyncio.Task[object]]) -> list[str]:
    """Return a line per task of this loop that was not in `before` and does not end by itself."""
    deadline = time.monotonic() + GRACE_S
    while True:
        tasks = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not tasks or time.monotonic() > deadline:
            return [f"task: {task.get_name()} {task.get_coro()!r}" for task in tasks]
        await asyncio.sleep(0.01)
