"""`ebbtide serve` on a disk that hangs: the drain never ends and an I/O thread never returns."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from ebbtide.cli import main
from ebbtide.tiers.runtime import WRITE
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable


def _write(item: int) -> None:
    threading.Event().wait()


def _drain(self: Store, deadline_s: float, done: Callable[[bool], None]) -> None:
    print("draining", flush=True)  # noqa: T201
    self.runtime.start(WRITE, _write, [0], lambda outcomes: None)


if __name__ == "__main__":
    Store.drain = _drain  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
