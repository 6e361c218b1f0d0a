"""What the stages of `ebbtide bench device` share: a device, a clock, and a place for findings.

With `dry` everything is host memory: copies are made at once, kernels are interpreted. What is
found then says whether the code works, and nothing about a device: each JSON line bears the word.
"""

from __future__ import annotations

import ctypes
import json
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.errors import EbbtideError, TierUnavailableError
from ebbtide.kernels.choice import METHODS
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layout import PagedLayout
from ebbtide.kernels.methods import make_method

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from ebbtide.bench.paged_forms import Pages
    from ebbtide.kernels.driver import Driver, Order
    from ebbtide.kernels.methods import Method

MIB = 1 << 20


class HostQueue:
    """A copy queue whose device is host memory: copies have ended when `copy` returns."""

    def copy(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        stream: int,
        order: Order,
    ) -> None:
        """As `Driver.copy`. The addresses are not checked."""
        columns = (targets.tolist(), sources.tolist(), lengths.tolist())
        for target, source, length in zip(*columns, strict=True):
            ctypes.memmove(target, source, length)


class DeviceRig:
    """One device and a stream of ebbtide's own on it, which is torch's current one meanwhile."""

    def __init__(self, *, dry: bool, budget_s: float, as_json: bool) -> None:
        """Raises TierUnavailableError when there is no GPU and it is no dry run."""
        self.dry = dry
        self.as_json = as_json
        self.sound = True
        self._began_s = time.monotonic()
        self.budget_s = budget_s
        self.figures: dict[str, float] = {}  # ceilings that later stages are held against
        self.queue: Any
        if dry:
            self.device, self.queue, self.stream = torch.device("cpu"), HostQueue(), 5
            return
        if not torch.cuda.is_available():
            raise TierUnavailableError("There is no GPU here", next_step="Add --dry.")
        from ebbtide.kernels.driver import Driver
        from ebbtide.kernels.streams import Stream

        self.device = torch.device("cuda", torch.cuda.current_device())
        driver: Driver = Driver()
        driver.use(int(self.device.index))
        self.queue = driver
        self.stream = Stream(driver).handle
        external = torch.cuda.ExternalStream(self.stream, device=self.device)  # type: ignore[no-untyped-call]  # torch
        torch.cuda.set_stream(external)

    @property
    def left_s(self) -> float:
        """Of the budget."""
        return self.budget_s - (time.monotonic() - self._began_s)

    def pick(self, small: Any, full: Any) -> Any:
        """One size for a dry run, another for a device."""
        return small if self.dry else full

    def row(self, stage: str, *, ok: bool = True, **values: object) -> None:
        """One finding. `ok` False fails the run."""
        self.sound = self.sound and ok
        short = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in values.items()
        }
        if self.as_json:
            dry = {"dry": True} if self.dry else {}
            print(json.dumps({"stage": stage, "ok": ok, **dry, **short}), flush=True)
            return
        words = " ".join(f"{name}={value}" for name, value in short.items())
        print(f"{stage:<22}{'' if ok else 'WRONG '}{words}", flush=True)

    def pinned(self, count: int) -> torch.Tensor:
        """Host memory that the device reaches directly, uint8 [count]."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=not self.dry).fill_(0xA5)

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, work: Callable[[], object], *, repeats: int = 10) -> float:
        """Median time of `work` on the stream, after two that warm up."""
        if self.dry:
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e3
        for _ in range(2):
            work()
        marks = []
        for _ in range(repeats):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch
            pair[0].record()
            work()
            pair[1].record()
            marks.append(pair)
        self.synchronize()
        return float(median(begin.elapsed_time(end) for begin, end in marks))

    def wall_ms(self, work: Callable[[], object], *, repeats: int = 3) -> float:
        """Median time until `work` and everything that it queued has ended, on the host's clock."""
        times = []
        for _ in range(1 if self.dry else repeats + 1):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
        return median(times[1:] or times)

    def methods(self, table: FragmentTable) -> dict[str, Method]:
        """All that can be had here, by name."""
        found = {}
        for name in METHODS:
            try:
                found[name] = make_method(name, self.queue, table)
            except EbbtideError as error:
                self.row("method.missing", method=name, reason=str(error))
        return found


def table_of(pages: Pages) -> FragmentTable:
    """Of the layers as they would be registered."""
    layout = PagedLayout.from_tensors(pages.tensors, block_dim=pages.form.block_dim)
    return FragmentTable.of(layout)


def shuffled(blocks: int, count: int, seed: int = 0) -> list[int]:
    """Some of the blocks in no order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(blocks, generator=draw)[:count].tolist()
