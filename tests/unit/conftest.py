"""Simulated stores that several files of unit tests start from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import SimStore
from ebbtide.tiers.bounds import Bounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096


@pytest.fixture
def sim() -> Iterator[SimStore]:
    """16 slots of memory and no disk."""
    with SimStore(7, 16 * PAGE) as store:
        yield store


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[SimStore]:
    """16 slots of memory over 64 of disk; nothing is written by itself."""
    bounds = Bounds.for_capacity(16 * PAGE, write_after_s=3600.0)
    bounds = replace(bounds, dirty_max_bytes=16 * PAGE)
    with SimStore(
        7, 16 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=64 * PAGE, bounds=bounds
    ) as store:
        yield store
