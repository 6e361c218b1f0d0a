"""Progress on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Advance = Callable[[int, float], None]

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1


@contextmanager
def progress(requests: int | None) -> Iterator[Advance]:
    """Yield `advanced(requests_done, hit_rate)`, to be called after every request.

    It costs a look at the clock, unless something is due to be shown. `requests` None: the total
    is not known.
    """
    if sys.stderr.isatty():
        with _bar(requests) as advanced:
            yield advanced
    else:
        yield _lines(requests)


def _paced(every_s: float, show: Advance) -> Advance:
    due = time.monotonic() + every_s

    def advanced(done: int, hit_rate: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            show(done, hit_rate)
            due = time.monotonic() + every_s

    return advanced


def _lines(requests: int | None) -> Advance:
    of_all = "" if requests is None else f" of {requests}"

    def show(done: int, hit_rate: float) -> None:
        print(f"replayed {done}{of_all} requests, hit rate {hit_rate:.4f}", file=sys.stderr)

    return _paced(LINE_EVERY_S, show)


@contextmanager
def _bar(requests: int | None) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, hit rate {task.fields[hit_rate]:.4f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("replay", total=requests, hit_rate=0.0)
        last = (0, 0.0)

        def show(done: int, hit_rate: float) -> None:
            bar.update(task, completed=done, hit_rate=hit_rate)

        paced = _paced(BAR_EVERY_S, show)

        def advanced(done: int, hit_rate: float) -> None:
            nonlocal last
            last = (done, hit_rate)
            paced(done, hit_rate)

        yield advanced
        show(*last)
