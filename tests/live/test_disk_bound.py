"""The bound of a disk tier, as the file system counts: all that its directory holds, at any time.

`EBBTIDE_TEST_BOUND_MIB=1024` sets the bound; ten times as much is put.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.disk_rig import DiskRig

from ebbtide.errors import ConfigError
from ebbtide.tiers import slab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
BOUND_BYTES = int(os.environ.get("EBBTIDE_TEST_BOUND_MIB", "64")) * MIB
TIMES = 10
LENGTHS = (64 << 10, (1 << 20) - 5000)
BATCH_BYTES = 16 * MIB
LOOKS_PER_S = 20
BLOCK_BYTES = 512  # of st_blocks


def used_bytes(place: Path) -> int:
    """What the file system has given to the directory and to all below it."""
    paths = [place, *place.rglob("*")]
    found = 0
    for path in paths:
        try:
            found += path.lstat().st_blocks * BLOCK_BYTES
        except FileNotFoundError:  # gone between the two calls
            continue
    return found


class Watch:
    """Looks at a directory all the time."""

    def __init__(self, place: Path) -> None:
        self.most = self.looks = 0
        self._place = place
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(1 / LOOKS_PER_S):
            self.most = max(self.most, used_bytes(self._place))
            self.looks += 1


@pytest.mark.timeout(3600)  # of the long form
@pytest.mark.parametrize("direct", [True, False])
def test_p61_ten_times_its_capacity_never_takes_more_than_the_bound(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes of records, two restarts, leftovers of a crash."""
    if not direct:
        monkeypatch.setattr(slab, "_direct_works", lambda fd, size: False)
    place, draw, number, put_bytes = tmp_path / "disk", Random(61), 0, 0
    place.mkdir(0o700)
    watch = Watch(place)
    with watch.watching():
        for life in range(3):
            (place / "FORMAT.new").write_bytes(b"x" * 4096)
            (place / "index.new").mkdir(exist_ok=True)
            (place / "index.new" / "data.mdb").write_bytes(b"x" * 4096)
            with DiskRig(place, BOUND_BYTES, LENGTHS[0]) as rig:
                assert rig.disk.direct is direct
                while put_bytes < (life + 1) * TIMES * BOUND_BYTES / 3:
                    rig.length = draw.choice(LENGTHS)
                    count = max(1, BATCH_BYTES // rig.length)
                    assert rig.put(range(number, number + count)) == [None] * count
                    number, put_bytes = number + count, put_bytes + count * rig.length
                assert rig.flush()
                assert len(rig.held) > 1
    assert watch.looks > LOOKS_PER_S / 4
    assert BOUND_BYTES / 2 < watch.most <= BOUND_BYTES
    print(f"{put_bytes} bytes put, at most {watch.most} of {BOUND_BYTES} used, {watch.looks} looks")  # noqa: T201  # shown with -s


@pytest.mark.parametrize("names", [["notes.txt"], ["a", "b", "c", "d"]])
def test_p61_a_directory_with_something_else_in_it_is_refused_and_left_alone(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"not ebbtide's.*notes.txt|a, b, c"):
        DiskRig(tmp_path, BOUND_BYTES, LENGTHS[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_root_of_a_file_system_can_be_a_disk_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    DiskRig(tmp_path, BOUND_BYTES, LENGTHS[0]).close()
