"""Faults of the copies between arena and device blocks, put into this process by a test."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from ebbtide.kernels.copy import scatter
from ebbtide.tiers.device import CopyJob, DeviceCopies

if TYPE_CHECKING:
    import pytest

HOLD_S = 30.0


def zeros_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copy to the device bring zeros in place of the record."""
    move = DeviceCopies._move

    def zeros(self: DeviceCopies, job: CopyJob) -> None:
        move(self, job)
        if job.to_device:
            layout = self.layouts[job.group]
            nothing = torch.zeros(layout.record_bytes, dtype=torch.uint8)
            scatter(layout, job.block_ids, [nothing] * len(job.block_ids))

    monkeypatch.setattr(DeviceCopies, "_move", zeros)


class HeldLoads:
    """Copies to the device that have begun and do not end before `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self._released = threading.Event()
        move = DeviceCopies._move
        held = self

        def hold(self: DeviceCopies, job: CopyJob) -> None:
            if job.to_device:
                held.begun.set()
                assert held._released.wait(HOLD_S), "a held load was never released"
            move(self, job)

        monkeypatch.setattr(DeviceCopies, "_move", hold)

    def release(self) -> None:
        """Let them and all later copies go on."""
        self._released.set()
