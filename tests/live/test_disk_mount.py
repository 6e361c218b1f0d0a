"""Real small file systems that run full, turn read-only or freeze under a store.

They are mounted for each test: that needs root, and is skipped loudly where it is not permitted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.disk_rig import DiskRig, StoreOnFiles

from ebbtide.errors import ConfigError
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import disk_health
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.disk_health import LOOK_S, RETRY_MAX_S, DiskHealth, Reopened
from ebbtide.tiers.reasons import Miss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ebbtide.testing import SimStore

MIB = 1 << 20
PAGE = 4096
LENGTH = 100
SIZE = "48M"
SLAB_BYTES = 12 * MIB
AT_ONCE = 8
KEPT = 600
ROUNDS = 200  # commits: more than the index has room for without growing
BACK_S = RETRY_MAX_S + 2 * LOOK_S
FREEZE_S = 1.5


class Mount:
    """A file system of 48 MiB."""

    def __init__(self, kind: str, tmp_path: Path) -> None:
        self.path = tmp_path / "mount"
        self.path.mkdir()
        self._image = tmp_path / "image"
        if os.geteuid() != 0:
            pytest.skip("NO MOUNT: only root may mount")
        self._frozen = False
        for program in ("mount", "umount", "mkfs.ext4", "fsfreeze"):
            if shutil.which(program) is None:
                pytest.skip(f"NO MOUNT: {program} is not installed")
        if kind == "ext4":
            run("truncate", "-s", SIZE, str(self._image))
            run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
            self._how = ["-o", "loop", str(self._image)]
        elif kind == "overlay":
            parts = {name: tmp_path / name for name in ("lowerdir", "upperdir", "workdir")}
            for part in parts.values():
                part.mkdir()
            said = ",".join(f"{name}={part}" for name, part in parts.items())
            self._how = ["-t", "overlay", "-o", said, "overlay"]
        else:
            self._how = ["-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs"]
        try:
            self.mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NO MOUNT of {kind} here: {error.stderr.splitlines()[0]}")

    @property
    def disk_path(self) -> Path:
        return self.path / "disk"

    @property
    def free_bytes(self) -> int:
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def mount(self, *how: str) -> None:
        run("mount", *self._how, *how, str(self.path))

    def remount(self, how: str) -> None:
        run("mount", "-o", f"remount,{how}", str(self.path))

    def unmount(self) -> None:
        run("umount", str(self.path))

    def freeze(self) -> None:
        run("fsfreeze", "--freeze", str(self.path))
        self._frozen = True

    def thaw(self) -> None:
        run("fsfreeze", "--unfreeze", str(self.path))
        self._frozen = False

    def fill(self, but_bytes: int = 0) -> Path:
        """As another user's file does. Returns the file."""
        path = self.path / "filler"
        with path.open("wb", buffering=0) as file:
            for block in (64 << 10, PAGE):
                try:
                    while self.free_bytes > but_bytes:
                        file.write(bytes(block))
                except OSError as error:
                    assert "No space" in str(error)  # noqa: PT017
            os.fsync(file.fileno())
        return path

    def end(self) -> None:
        if self._frozen:
            self.thaw()
        subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)


def run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Any]:
    made: list[Mount] = []

    def make(kind: str) -> Mount:
        made.append(Mount(kind, tmp_path))
        return made[-1]

    yield make
    for mount in made:
        mount.end()


@pytest.fixture(params=["ext4", "tmpfs"])
def any_mount(request: pytest.FixtureRequest, mounts: Any) -> Any:
    return mounts(request.param)


@pytest.fixture
def ext4(mounts: Any) -> Any:
    return mounts("ext4")


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay"])
def test_p75_a_disk_tier_tries_its_drive_and_works_wherever_it_lies(mounts: Any, kind: str) -> None:
    """With direct I/O or without, as the first try told."""
    place = mounts(kind).disk_path
    for life in range(2):
        with DiskRig(place, 24 * MIB, LENGTH) as rig:
            rig.disk.check_drive()
            assert rig.disk.tier.down is None
            assert rig.held == {key_of(n) for n in range(8 * life)}
            assert rig.put(range(8 * life, 8 * life + 8)) == [None] * 8
            assert rig.flush()


class Rig:
    """A store on a mount in its lives, and the keys that it said were durable."""

    sim: SimStore

    def __init__(self, mount: Mount) -> None:
        self.durable: list[bytes] = []
        self._mount = mount
        self._number = 0

    @contextmanager
    def life(self) -> Iterator[None]:
        """From an opening to an end without a drain."""
        with StoreOnFiles(
            4,
            16 * PAGE,
            disk_path=str(self._mount.disk_path),
            slab_bytes=SLAB_BYTES,
            bounds=Bounds.for_capacity(16 * PAGE, write_after_s=0.0),
            reopens=True,
        ) as self.sim:
            yield

    @property
    def down(self) -> str | None:
        assert self.sim.store.disk is not None
        return self.sim.store.disk.down

    def put(self, rounds: int) -> None:
        """Commit so many times, or until the tier is down."""
        for _ in range(rounds):
            keys = [key_of(self._number + n) for n in range(AT_ONCE)]
            self._number += AT_ONCE
            assert self.sim.put(self.sim.namespace(), keys, LENGTH) == bytes(AT_ONCE)
            self.sim.runtime.pass_time(0.2)
            if self.down:
                return
            assert self.sim.flush()
            self.durable += keys

    def check_durable(self) -> None:
        """The latest: the index has room for some 1,300, and evicts ahead."""
        space, latest = self.sim.namespace(), self.durable[-KEPT:]
        wanted = [self.sim.content(space, key, LENGTH) for key in latest]
        assert self.sim.get(space, latest) == wanted

    def check_down(self, reason: str) -> None:
        """Visibly, and memory works on."""
        assert re.search(reason, self.down or "")
        assert re.search(reason, str(self.sim.store.stats()["disk"]))
        space, key = self.sim.namespace(), key_of(10**6)
        assert self.sim.get(space, self.durable[:1]) == [Miss.IO_ERROR]
        assert self.sim.put(space, [key], LENGTH) == bytes(1)
        assert self.sim.get(space, [key]) == [self.sim.content(space, key, LENGTH)]


def test_a_file_system_without_room_for_the_slab_is_refused_with_the_numbers(
    any_mount: Mount,
) -> None:
    """And is left as it was: nobody else loses the room that there was."""
    rig = Rig(any_mount)
    filler = any_mount.fill(but_bytes=8 * MIB)
    before = any_mount.free_bytes
    with pytest.raises(ConfigError, match=r"no room for the slab") as caught, rig.life():
        pass
    context = caught.value.context
    assert context["slab_bytes"] == context["missing_bytes"] == SLAB_BYTES
    assert 0 < before - int(str(context["free_bytes"])) < MIB
    assert caught.value.next_step.startswith("Free space")
    assert before - any_mount.free_bytes < MIB
    filler.unlink()
    with rig.life():
        rig.put(2)
        rig.check_durable()


def test_p59_a_file_system_that_others_fill_takes_the_tier_down_until_there_is_room(
    any_mount: Mount,
) -> None:
    """The slab has its room; the index grows as it is used."""
    rig = Rig(any_mount)
    with rig.life():
        rig.put(4)
        filler = any_mount.fill()
        rig.put(ROUNDS)
        # LMDB calls a write that had room for its first part only an input/output error.
        rig.check_down(r"a commit failed.*(No space left|Input/output error)")
        rig.sim.runtime.pass_time(BACK_S)
        filler.unlink()
        rig.sim.runtime.pass_time(BACK_S)
        assert rig.down is None
        rig.check_durable()
        rig.put(ROUNDS)
    with rig.life():
        rig.check_durable()


def test_a_start_on_a_full_file_system_keeps_what_was_committed(any_mount: Mount) -> None:
    rig = Rig(any_mount)
    with rig.life():
        rig.put(40)
    any_mount.fill()
    with rig.life():
        rig.check_durable()


def test_p75_a_file_system_that_turns_read_only_takes_the_tier_down_and_loses_nothing(
    ext4: Mount,
) -> None:
    """As the kernel does after an error. It does not take that back before it is mounted anew."""
    rig = Rig(ext4)
    with rig.life():
        rig.put(10)
        ext4.remount("abort")
        rig.put(10)
        rig.check_down("Read-only file system")
        rig.sim.runtime.pass_time(BACK_S)
        assert rig.down
    ext4.unmount()
    ext4.mount()
    ext4.remount("ro")
    with pytest.raises(ConfigError, match="mounted read-write"), rig.life():
        pass
    ext4.remount("rw")
    with rig.life():
        rig.check_durable()
        rig.put(10)
        rig.check_durable()


def test_p75_a_file_system_that_freezes_is_put_out_of_service_until_it_thaws(
    ext4: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real threads hang in real writes."""
    for name, seconds in (("LOOK_S", 0.05), ("STALL_S", 0.5), ("RETRY_FIRST_S", 0.2)):
        monkeypatch.setattr(disk_health, name, seconds)
    back: list[Reopened] = []
    with DiskRig(ext4.disk_path, 24 * MIB, LENGTH) as rig:
        assert rig.put(range(16)) == [None] * 16
        assert rig.flush()
        first = rig.disk.tier
        health = DiskHealth(rig.runtime, first, rig.disk.reopen, back.append)
        ext4.freeze()
        thaw = threading.Timer(FREEZE_S, ext4.thaw)
        thaw.start()
        assert rig.put(range(16, 24)) == [Miss.IO_ERROR] * 8  # answered when it thaws
        thaw.join()
        assert "not answered" in (first.down or "")
        rig.until(lambda: back)
        assert rig.disk.tier is not first
        assert rig.held == {key_of(n) for n in range(16)}
        assert rig.put(range(16, 24)) == [None] * 8
        assert rig.flush()
        health.close()
