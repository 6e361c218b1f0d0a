"""What the payload file leaves in the page cache, as the kernel counts it."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import pytest
from tests.disk_rig import EPOCH, DiskRig

from ebbtide.testing.conformance import key_of
from ebbtide.tiers import slab
from ebbtide.tiers.disk_record import Get

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
LENGTH = 256 << 10
RECORDS = 160
BATCH = 32
CAPACITY_BYTES = 64 * MIB


def resident_bytes(path: Path) -> int:
    """Of the file, what lies in the page cache (`mincore`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, page = path.stat().st_size, mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-size // page)))()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Writable and private: only such a map gives its address away.
        with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE) as view:
            first = ctypes.c_char.from_buffer(view)
            address = ctypes.c_void_p(ctypes.addressof(first))
            if libc.mincore(address, ctypes.c_size_t(size), pages):
                raise OSError(ctypes.get_errno(), "mincore")
            del first
    finally:
        os.close(descriptor)
    return sum(each & 1 for each in pages) * page


def read_all(rig: DiskRig) -> int:
    """Bring every record that is held; how many were right."""
    right = 0
    held = sorted(rig.held)
    with mmap.mmap(-1, BATCH * LENGTH) as pages, memoryview(pages) as view:
        slots = [view[n * LENGTH : (n + 1) * LENGTH] for n in range(BATCH)]
        for start in range(0, len(held), BATCH):
            gets, results = [], list[object]()
            for key, slot in zip(held[start : start + BATCH], slots, strict=False):
                record = rig.disk.tier.find(EPOCH, key)
                assert record is not None
                rig.disk.tier.pin(record)
                gets.append(Get(record, slot))
            rig.disk.tier.get(gets, results.extend)
            rig.until(lambda: results)  # noqa: B023  # it is run before the next round
            right += results.count(None)
        gets = []
        for slot in slots:
            slot.release()
    return right


@pytest.mark.parametrize("direct", [True, False])
def test_p63_the_payload_stays_out_of_the_page_cache(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct I/O passes it; buffered I/O drops what it has written and read."""
    if not direct:
        monkeypatch.setattr(slab, "_direct_works", lambda fd, size: False)
    with DiskRig(tmp_path / "disk", CAPACITY_BYTES, LENGTH) as rig:
        if direct and not rig.disk.direct:
            pytest.skip("NO O_DIRECT on the file system of tmp_path")
        assert rig.disk.direct is direct
        path = tmp_path / "disk" / "slab"
        for start in range(0, RECORDS, BATCH):
            assert rig.put(range(start, start + BATCH)) == [None] * BATCH
        assert rig.flush()
        assert key_of(0) in rig.held
        moved = RECORDS * LENGTH
        assert resident_bytes(path) < moved / 10
        assert read_all(rig) == RECORDS
        assert resident_bytes(path) < moved / 10
