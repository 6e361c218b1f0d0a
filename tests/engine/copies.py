"""Faults of the copies between arena and device blocks, put into this process by a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ebbtide.kernels.copy import scatter
from ebbtide.tiers.device import CopyJob, DeviceCopies, HostCopies

if TYPE_CHECKING:
    import pytest


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
    """Copies to the device that have been asked for and do not end before `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = False
        self._released = False
        slice_ = HostCopies._slice
        held = self

        def hold(self: HostCopies) -> None:
            if self._loads and not held._released:
                held.begun = True
                return
            slice_(self)

        monkeypatch.setattr(HostCopies, "_slice", hold)

    def release(self) -> None:
        """Let them and all later copies go on."""
        self._released = True
