"""`ebbtide serve` on a slow disk: each write takes a fifth of a second longer."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ebbtide.cli import main
from ebbtide.tiers.slab import OneByOne, SlabFile

if TYPE_CHECKING:
    from collections.abc import Sequence

_write = SlabFile.write


def _write_slowly(self: SlabFile, offset: int, views: Sequence[memoryview]) -> None:
    time.sleep(0.2)
    _write(self, offset, views)


if __name__ == "__main__":
    SlabFile.write = _write_slowly  # type: ignore[method-assign]
    SlabFile.write_runs = OneByOne.write_runs  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
