"""Opening a store: what is tried before it serves, and what a drive that does not do it costs."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.config import load_config
from ebbtide.connectors.announce import describe_store
from ebbtide.testing import Fault, FaultSlab
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import ThreadRuntime
from ebbtide.tiers.slab import SlabFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ebbtide.tiers.slab import Slab

PAGE = 4096
REFUSE_WRITES = {("write", Fault.EROFS): 1.0}
LIE = {("read", Fault.FLIP): 1.0}


@contextmanager
def opened(
    place: Path, wrap_slab: Callable[[Slab], Slab] = lambda slab: slab
) -> Iterator[tuple[OpenStore, str]]:
    """A store on a disk, and what it says of itself when it is ready."""
    settings: dict[str, Any] = {
        "memory": {"capacity": "1MiB"},
        "disk": {"path": str(place), "capacity": "32MiB"},
    }
    config = load_config(settings, {}).config
    with closing(ThreadRuntime()) as runtime:
        found = OpenStore(config, runtime, wrap_slab=wrap_slab)
        try:
            yield found, describe_store(config, found.open_disk)
        finally:
            found.close(clean=False)


def test_p75_p86_a_record_goes_to_the_drive_and_back_before_the_first_engine_comes(
    tmp_path: Path,
) -> None:
    slabs: list[FaultSlab] = []

    def watched(slab: Slab) -> Slab:
        slabs.append(FaultSlab(slab))
        return slabs[-1]

    with opened(tmp_path / "d", watched) as (store, words):
        assert [entry.name for entry in slabs[0].log] == ["write", "sync", "read"]
        written, _, read = slabs[0].log
        assert written[1:] == read[1:]
        assert store.store.disk is not None
        assert store.store.disk.down is None
        assert store.store.disk.space.used_bytes == 0
        assert "OUT OF SERVICE" not in words


@pytest.mark.parametrize(("rates", "why"), [(REFUSE_WRITES, "EROFS"), (LIE, "did not read back")])
def test_p75_a_drive_that_does_not_do_that_leaves_memory_to_work_and_is_named(
    rates: dict[tuple[str, Fault], float], why: str, tmp_path: Path
) -> None:
    with opened(tmp_path / "d", lambda slab: FaultSlab(slab, rates=rates)) as (store, words):
        assert "OUT OF SERVICE: it did not take and give back a first record" in words
        assert why in words
        report = store.store.stats()["disk"]
        assert isinstance(report, dict)
        assert why in report["down"]
        space = store.store.open_namespace([["model", "m"]])
        grants, reason = store.store.reserve(b"engine", space, [bytes(36)], PAGE)
        assert reason is None
        assert grants[0].sequence


@pytest.mark.parametrize("refused", ["pwritev", "preadv"])
def test_p63_p75_direct_io_that_the_file_system_lacks_is_known_at_start_and_said(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the flag and refuses the call: only a try tells."""
    real = getattr(os, refused)

    def refuse(fd: int, views: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(real(fd, views, offset))

    with opened(tmp_path / "a") as (store, words):
        assert store.open_disk is not None
        if not store.open_disk.direct:
            pytest.skip("NO O_DIRECT on the file system of tmp_path")
        assert ", direct I/O," in words
    monkeypatch.setattr(os, refused, refuse)
    with opened(tmp_path / "b") as (store, words):
        assert "no direct I/O there: buffered, cache dropped behind" in words
        assert store.store.stats()["disk"]["direct_io"] is False  # type: ignore[index]
        assert store.store.disk is not None
        assert store.store.disk.down is None
    assert sorted(os.listdir(tmp_path / "b")) == ["FORMAT", "LOCK", "index", "slab"]


def test_p75_looking_for_direct_io_leaves_what_the_slab_has(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    path.write_bytes(b"kept" * PAGE)
    with closing(SlabFile(str(path), 4 * PAGE)):
        assert path.read_bytes() == b"kept" * PAGE
