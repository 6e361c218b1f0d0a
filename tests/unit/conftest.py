"""What several files of unit tests start from: simulated stores, the compiled hasher."""

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
from ebbtide.testing import SimStore
from ebbtide.tiers.bounds import Bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def compiled_hasher(tmp_path_factory: pytest.TempPathFactory) -> native.Hasher:
    """`block_hash.c` as it is now, built by setup.py; an installed one may be older."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None or not header.is_file():
        pytest.skip(f"no {compiler} or no {header}: the compiled hasher is not tested here")
    built = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(built), "--build-temp", str(built / "objects")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=100)
    (library,) = built.rglob("_block_hash*.so")
    spec = spec_from_file_location(native.MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("native.Hasher", module)


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
