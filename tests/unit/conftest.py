"""What several files of unit tests start from: simulated stores, compiled modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from ebbtide.allocator import native
from ebbtide.compiled import PURE_VARIABLE
from ebbtide.kernels import host_copy
from ebbtide.testing import SimStore
from ebbtide.tiers import slab_io
from ebbtide.tiers.bounds import Bounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

PAGE = 4096
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled modules of this source, built by setup.py; installed ones may be older."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None or not header.is_file():
        pytest.skip(f"no {compiler} or no {header}: compiled modules are not tested here")
    built = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(built), "--build-temp", str(built / "objects")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=100)
    return built


def _loaded(name: str, built: Path) -> ModuleType:
    (library,) = built.rglob(f"{name.rpartition('.')[2]}*.so")
    spec = spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def compiled_hasher(compiled: Path) -> native.Hasher:
    """`block_hash.c` as it is now."""
    return cast("native.Hasher", _loaded(native.MODULE, compiled))


@pytest.fixture(scope="session")
def compiled_copier(compiled: Path) -> host_copy.Copier:
    """`host_copy.c` as it is now."""
    return cast("host_copy.Copier", _loaded(host_copy.MODULE, compiled))


@pytest.fixture(scope="session")
def compiled_slab_io(compiled: Path) -> slab_io.SlabIO:
    """`slab_io.c` as it is now."""
    return cast("slab_io.SlabIO", _loaded(slab_io.MODULE, compiled))


@pytest.fixture
def compiled_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was looked for yet, as in a new process, without the variable."""
    calls = (native.hasher, host_copy.copier, slab_io.slab_io)
    monkeypatch.delenv(PURE_VARIABLE, raising=False)
    for call in calls:
        call.cache_clear()
    yield
    for call in calls:
        call.cache_clear()


@pytest.fixture(scope="module", params=["torch", "compiled", "streamed"])
def all_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a module copies by torch, and again compiled: through caches and past them."""
    copier = None if request.param == "torch" else request.getfixturevalue("compiled_copier")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "copier", lambda: copier)
        if request.param == "streamed":
            for bound in ("STREAM_BYTES_MIN", "STREAM_FRAGMENT_MIN"):
                patch.setattr(host_copy, bound, 0)
        yield


@pytest.fixture(scope="module", params=["pure", "compiled"])
def both_paths(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a module runs without the compiled hasher, and again with it."""
    compiled = request.param == "compiled"
    hasher = request.getfixturevalue("compiled_hasher") if compiled else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "hasher", lambda: hasher)
        yield


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
