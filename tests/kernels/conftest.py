"""What tests of kernels need: Triton's interpreter where there is no GPU, and a stand-in driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ebbtide.kernels.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when a kernel is defined: before the first import of a module that has one.
    os.environ["TRITON_INTERPRET"] = "1"

SOURCE = Path(__file__).with_name("stand_in_cuda.c")
EVERYTHING = 1 << 62


class StandIn:
    """A driver whose device memory is host memory and whose streams run when waited for."""

    def __init__(self, library: Path) -> None:
        self.so_path = str(library)
        self._loaded = ctypes.CDLL(self.so_path)

    def driver(
        self,
        *,
        batches: bool = True,
        supported: bool = True,
        lockable_bytes: int = EVERYTHING,
        failing_copy: int = 0,
    ) -> Driver:
        """A new driver with everything forgotten, in use in this thread."""
        arguments = [not batches, not supported, lockable_bytes, failing_copy]
        self._loaded.stand_in_reset(*(ctypes.c_size_t(int(value)) for value in arguments))
        driver = Driver(self.so_path)
        driver.use(0)
        return driver

    def __getattr__(self, name: str) -> int:
        """A counter by its name."""
        names = "batches copies bytes singles registered no_batch unsupported lockable fail_copy"
        out = (ctypes.c_size_t * 10)()
        self._loaded.stand_in_state(out)
        return int(out[[*names.split(), "last_order"].index(name)])

    def attributes(self) -> tuple[int, ...]:
        """Size of `CUmemcpyAttributes` and where three of its fields lie, as C has it."""
        out = (ctypes.c_size_t * 4)()
        self._loaded.stand_in_attributes(out)
        return tuple(out)


def cuda_headers() -> Path | None:
    """A directory with cuda.h: CUDA_HOME's, that of a toolkit, or the one in Triton's wheel."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if (found := find_spec("triton")) is not None and found.origin is not None:
        places.append(Path(found.origin).parent / "backends" / "nvidia" / "include")
    return next((place for place in places if (place / "cuda.h").is_file()), None)


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers, compiler = cuda_headers(), shutil.which("gcc")
    if headers is None or compiler is None:
        pytest.skip(
            "NO STAND-IN DRIVER: it needs gcc and cuda.h (in Triton's wheel: pip install triton)"
        )
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([compiler, *flags, "-I", headers, "-o", library, SOURCE], check=True)
    return library


@pytest.fixture
def stand_in(stand_in_library: Path) -> Iterator[StandIn]:
    stand_in = StandIn(stand_in_library)
    yield stand_in
    stand_in.driver()  # frees what a test left


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: on a GPU, or interpreted on host memory."""
    return "cuda" if HAS_GPU else "cpu"
