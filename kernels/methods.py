"""The ways to copy between blocks and an arena, by name, and how fast each is here."""

from __future__ import annotations

import contextlib
import logging
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch

from ebbtide.errors import TierUnavailableError
from ebbtide.kernels.arena_records import ArenaRecords
from ebbtide.kernels.choice import AUTO, ENGINE, METHODS, TORCH, Choice, Figure, choose
from ebbtide.kernels.copy import gather_into, scatter_from
from ebbtide.kernels.copy_engine import EngineCopies
from ebbtide.kernels.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.kernels.driver import Driver
    from ebbtide.kernels.fragments import FragmentTable

_log = logging.getLogger(__name__)

SCRATCH_BYTES = 16 << 20
"""Pinned memory that a measurement copies to and from: about 0.3 ms of a fast bus."""
ROUNDS = 3


class Method(Protocol):
    """Gather and scatter for one table; see `EngineCopies`, whose contract all of them share."""

    name: str

    @property
    def staging(self) -> torch.Tensor | None:
        """Device memory that other methods of the same stream may use too."""
        ...

    def gather(self, records: ArenaRecords, *, stream: int) -> None:
        """Blocks into records, on `stream`."""
        ...

    def scatter(self, records: ArenaRecords, *, stream: int) -> None:
        """Records into blocks, on `stream`."""
        ...


class TorchCopies:
    """Copies by torch alone: the reference, on any device."""

    name = TORCH
    staging = None

    def __init__(self, table: FragmentTable) -> None:
        self._layout = table.layout

    def gather(self, records: ArenaRecords, *, stream: int) -> None:
        """On torch's current stream, which must be `stream`."""
        gather_into(self._layout, records.block_ids, records.arena, records.offsets)

    def scatter(self, records: ArenaRecords, *, stream: int) -> None:
        """On torch's current stream, which must be `stream`."""
        scatter_from(self._layout, records.block_ids, records.arena, records.offsets)


def make_method(
    name: str, driver: Driver, table: FragmentTable, staging: torch.Tensor | None = None
) -> Method:
    """A new one. Where it needs staging memory: `staging` of another one, or its own.

    Raises TierUnavailableError with the reason when it cannot be had here.
    """
    if name == TORCH:
        return TorchCopies(table)
    if name == ENGINE:
        return EngineCopies(driver, table)
    if find_spec("triton") is None:
        raise TierUnavailableError(
            "Triton is not installed", next_step="Install ebbtide with its extra: ebbtide[cuda]"
        )
    from ebbtide.kernels.staged_copy import StagedCopies

    try:
        return StagedCopies(driver, table, staging=staging)
    except torch.OutOfMemoryError as error:
        raise TierUnavailableError("No device memory is left for staging") from error


def choose_method(
    wanted: str,
    driver: Driver,
    table: FragmentTable,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> Choice:
    """What to copy with, by a measurement with the engine's own tensors when `wanted` is auto.

    Call it before the engine uses its blocks, with the driver in use in this thread: the blocks are
    read and written back as they were. Raises ConfigError when the wanted method cannot be had.
    Cost: below 0.3 s, and the compiler's second or two when Triton is there.
    """
    figures: list[Figure] = []
    unavailable: dict[str, str] = {}
    scratch = torch.empty(
        max(SCRATCH_BYTES, table.record_bytes),
        dtype=torch.uint8,
        pin_memory=table.layout.device.type == "cuda",
    )
    stream = Stream(driver)
    try:
        for name in METHODS if wanted == AUTO else (wanted,):
            try:
                method = make_method(name, driver, table)
                with current_stream(table, stream.handle):
                    figures += measure(method, table, scratch, stream, now=now)
            except (TierUnavailableError, RuntimeError) as error:
                # RuntimeError: what Triton and torch raise when they cannot compile or launch.
                unavailable[name] = str(error)
    finally:
        stream.close()
    choice = choose(wanted, figures, unavailable)
    _log.info(
        "Copies from the device by %s, to it by %s (%s%s)",
        choice.store,
        choice.load,
        ", ".join(
            f"{one.method} {'up' if one.to_device else 'down'} {one.bytes_per_s / 1e9:.1f} GB/s"
            for one in figures
        ),
        "".join(f"; no {name}: {reason}" for name, reason in unavailable.items()),
    )
    return choice


def measure(
    method: Method,
    table: FragmentTable,
    scratch: torch.Tensor,
    stream: Stream,
    *,
    now: Callable[[], float] = time.perf_counter,
) -> list[Figure]:
    """The best of `ROUNDS` copies each way, after one that warms up, of blocks in no order."""
    size = table.record_bytes
    blocks = table.layout.num_blocks
    count = max(1, min(blocks, scratch.numel() // size))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randperm(blocks, generator=draw)[:count].tolist()
    records = ArenaRecords(ids, scratch, [number * size for number in range(count)])
    best = {False: float("inf"), True: float("inf")}
    for number in range(ROUNDS + 1):
        for to_device, move in ((False, method.gather), (True, method.scatter)):
            started = now()
            move(records, stream=stream.handle)
            stream.synchronize()
            if number:
                best[to_device] = min(best[to_device], now() - started)
    return [
        Figure(method.name, to_device, count * size, max(seconds, 1e-9))
        for to_device, seconds in best.items()
    ]


def current_stream(table: FragmentTable, stream: int) -> contextlib.AbstractContextManager[object]:
    """Make `stream` what torch and Triton use in this thread; nothing on host memory."""
    device = table.layout.device
    if device.type != "cuda":
        return contextlib.nullcontext()
    external = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]  # torch
    return torch.cuda.stream(external)
