"""Memory alone, and memory over disk, owe the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ebbtide.testing import SimStore, TierConformance
from ebbtide.testing.conformance import LENGTH, SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STRIDE = -(-LENGTH // 4096) * 4096


class TestMemory(TierConformance):
    """The arena alone."""

    @pytest.fixture
    def sim(self) -> Iterator[SimStore]:
        store = SimStore(1, SLOTS * STRIDE)
        yield store
        store.close()


class TestMemoryAndDisk(TierConformance):
    """The arena over a small disk."""

    @pytest.fixture
    def sim(self, tmp_path: Path) -> Iterator[SimStore]:
        store = SimStore(
            1, SLOTS * STRIDE, disk_path=str(tmp_path / "disk"), slab_bytes=4 * SLOTS * STRIDE
        )
        yield store
        store.close()
