"""Whatever breaks, wherever: a miss and a count, the right answers, and no wait without end."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.controls import (
    NEW_TOKENS,
    PATIENT,
    Reference,
    Rig,
    answers,
    conversations,
    tokens,
)

from ebbtide.kernels.copy import gather_into, scatter_from
from ebbtide.testing import Fault, FaultSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from ebbtide.connectors.reference import RequestOutput
    from ebbtide.kernels.layout import PagedLayout
    from ebbtide.testing.faults import Operation
    from ebbtide.tiers.slab import Slab

pytestmark = pytest.mark.usefixtures("single_thread")

PROMPT = tokens(8 * 16 + 3, seed=39)
FAILED_BLOCK = 3
PATIENCE_S = 20.0


# -- P39: one block of a load fails, at each stage ------------------------------------------------


class Device:
    """A slab whose reads of one place go wrong."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.place: int | None = None
        self.slab: FaultSlab | None = None

    def wrap(self, slab: Slab) -> Slab:
        self.slab = FaultSlab(slab, on_operation=self.judge)
        return self.slab

    def judge(self, operation: Operation) -> None:
        place = -1 if self.place is None else self.place
        hit = operation.offset <= place < operation.offset + operation.length
        if operation.name == "read" and hit:
            assert self.slab is not None
            self.slab.fail_next("read", self.fault)


def assert_recomputed_from_the_failed_block_on(
    rig: Rig, output: RequestOutput, reference: Reference, tier: str, reason: str
) -> None:
    assert output.token_ids == reference.answers([PROMPT])[0]
    assert getattr(output.sources, tier) == FAILED_BLOCK * 16
    assert output.misses == {reason: 1, "behind_miss": 8 - FAILED_BLOCK - 1, "partial_block": 1}
    rig.assert_adds_up([output])
    rig.assert_idle()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.EIO, "io_error"),
        (Fault.TORN, "io_error"),
        (Fault.SHORT, "io_error"),
        (Fault.FLIP, "corrupt"),
    ],
)
def test_p39_a_block_that_the_disk_does_not_give_back(
    fault: Fault, reason: str, reference: Reference, tmp_path: Path
) -> None:
    device = Device(fault)
    with Rig(disk=tmp_path / "disk", wrap_slab=device.wrap) as rig:
        rig.ask([PROMPT])
        rig.forget_device()
        rig.forget_memory()
        rig.read_one_by_one()
        assert rig.store.disk is not None
        name = rig.hashes(PROMPT)[FAILED_BLOCK]
        device.place = rig.disk_records()[name].offset
        (output,) = rig.ask([PROMPT])
        assert_recomputed_from_the_failed_block_on(rig, output, reference, "disk", reason)
        assert rig.store.ledger.counts[reason] == 1
        assert rig.faults == 0
        device.place = None
        rig.forget_device()
        (again,) = rig.ask([PROMPT])  # it was stored anew, and is not tried for ever
        assert again.sources.computed < 16
        assert again.token_ids == output.token_ids


def test_p39_a_block_that_memory_does_not_give_back(reference: Reference) -> None:
    with Rig() as rig:
        rig.ask([PROMPT])
        rig.forget_device()
        rig.flip_in_memory(rig.hashes(PROMPT)[FAILED_BLOCK])
        (output,) = rig.ask([PROMPT])
        assert_recomputed_from_the_failed_block_on(rig, output, reference, "memory", "corrupt")


def test_p39_a_block_that_the_copy_does_not_bring(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fails_once(
        layout: PagedLayout, ids: Sequence[int], arena: torch.Tensor, offsets: Sequence[int]
    ) -> None:
        nonlocal calls
        calls += 1
        if calls == FAILED_BLOCK + 1:
            raise OSError(errno.EIO, "injected: the copy to the device")
        scatter_from(layout, ids, arena, offsets)

    with Rig() as rig:
        rig.ask([PROMPT])
        rig.forget_device()
        rig.read_one_by_one()
        broken = SimpleNamespace(gather_into=gather_into, scatter_from=fails_once)
        monkeypatch.setattr(rig.worker._copies, "_copy", broken)
        (output,) = rig.ask([PROMPT])
        assert_recomputed_from_the_failed_block_on(rig, output, reference, "memory", "io_error")
        # The record is still there, and right.
        rig.forget_device()
        (again,) = rig.ask([PROMPT])
        assert again.sources.memory == 8 * 16


def test_p39_a_load_that_does_not_end_in_time(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(load_timeout_s=0.1) as rig:
        rig.ask([PROMPT])
        rig.forget_device()
        with monkeypatch.context() as patch:
            patch.setattr(rig.worker._client, "poll", list)
            (output,) = rig.ask([PROMPT])
        assert output.token_ids == reference.answers([PROMPT])[0]
        assert output.misses == {"timeout": 1, "behind_miss": 7, "partial_block": 1}
        rig.assert_adds_up([output])
        rig.engine.step()
        rig.assert_idle()  # batches that came late went back


def test_p39_a_copy_down_that_fails_stores_nothing(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(
        layout: PagedLayout, ids: Sequence[int], arena: torch.Tensor, offsets: Sequence[int]
    ) -> None:
        gather_into(layout, ids[:1], arena, offsets[:1])
        raise OSError(errno.EIO, "injected: the copy from the device")

    with Rig() as rig:
        with monkeypatch.context() as patch:
            broken = SimpleNamespace(gather_into=fails, scatter_from=scatter_from)
            patch.setattr(rig.worker._copies, "_copy", broken)
            assert answers(rig.ask([PROMPT])) == reference.answers([PROMPT])
            rig.assert_idle()
            assert not rig.memory_records()
            rig.forget_device()
        (output,) = rig.ask([PROMPT])
        assert output.sources.computed == len(PROMPT)
        assert output.token_ids == reference.answers([PROMPT])[0]


# -- every hook and every call of a client --------------------------------------------------------

TARGETS: dict[str, Callable[[Rig], tuple[object, str]]] = {
    "scheduler's submit": lambda rig: (rig.scheduler._client, "submit"),
    "scheduler's notify": lambda rig: (rig.scheduler._client, "notify"),
    "scheduler's poll": lambda rig: (rig.scheduler._client, "poll"),
    "worker's submit": lambda rig: (rig.worker._client, "submit"),
    "worker's notify": lambda rig: (rig.worker._client, "notify"),
    "worker's poll": lambda rig: (rig.worker._client, "poll"),
    "copies.submit": lambda rig: (rig.worker._copies, "submit"),
    "copies.poll": lambda rig: (rig.worker._copies, "poll"),
    "on_new_request": lambda rig: (rig.scheduler, "_ask"),
    "matched_tokens": lambda rig: (rig.scheduler, "_offer"),
    "on_allocated": lambda rig: (rig.scheduler, "_new_load"),
    "build_step": lambda rig: (rig.scheduler._demotions, "plan"),
    "build_step, late": lambda rig: (rig.scheduler._demotions, "take_jobs"),
    "on_report": lambda rig: (rig.scheduler._demotions, "settle"),
    "on_report, late": lambda rig: (rig.scheduler, "_load_ended"),
    "fence": lambda rig: (rig.scheduler._demotions, "take_fence"),
    "commits": lambda rig: (rig.scheduler._demotions._copies, "_committed"),
    "planning": lambda rig: (rig.scheduler._demotions, "_settled"),
    "start_step, loads": lambda rig: (rig.worker, "_begin_load"),
    "start_step, stores": lambda rig: (rig.worker, "_begin_stores"),
    "worker's answers": lambda rig: (rig.worker, "_load_answer"),
    "worker's batches": lambda rig: (rig.worker, "_begin_copies"),
    "worker's copies": lambda rig: (rig.worker, "_copy_ended"),
}  # fmt: skip
PROMPTS = conversations(9, users=2, turns=3, opening=30)


# A copy whose end cannot be seen has not ended: these are broken once only.
ONCE_ONLY = ("copies.poll", "worker's copies")


class InjectedError(RuntimeError):
    """Nothing in ebbtide knows it."""


def break_calls(
    rig: Rig, target: str, patch: pytest.MonkeyPatch, *, first: int, every: bool
) -> Callable[[], int]:
    """From the call number `first` on one or all raise. Returns how many have."""
    owner, name = TARGETS[target](rig)
    real: Callable[..., Any] = getattr(owner, name)
    calls = raised = 0

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, raised
        calls += 1
        if calls == first + 1 or (every and calls > first):
            raised += 1
            raise InjectedError(f"{target}, call {calls}")
        return real(*args, **kwargs)

    patch.setattr(owner, name, breaks)
    return lambda: raised


def run_bounded(rig: Rig, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    for number, prompt in enumerate(prompts):
        rig.engine.add_request(str(number), prompt, NEW_TOKENS)
    outputs: dict[int, RequestOutput] = {}
    deadline = time.monotonic() + PATIENCE_S
    while rig.engine.has_unfinished():
        assert time.monotonic() < deadline, "the engine hangs"
        for output in rig.engine.step():
            outputs[int(output.request_id)] = output
        if rig.engine.last_step_tokens == 0:
            time.sleep(0.001)
    return [outputs[number] for number in range(len(prompts))]


@pytest.mark.parametrize(
    ("target", "every"),
    [(target, every) for target in TARGETS for every in (False, True)[: 2 - (target in ONCE_ONLY)]],
)
def test_p39_an_exception_anywhere_is_a_miss_and_a_count(
    target: str, every: bool, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="ebbtide")
    right = reference.answers(PROMPTS)
    bounds = replace(
        PATIENT,
        pin_timeout_s=0.2,
        reserve_timeout_s=0.2,
        commit_timeout_s=0.2,
        lookup_timeout_s=0.05,
    )
    met = 0
    for first in (1,) if every else (0, 2, 7):
        with (
            Rig(blocks=26, memory_records=128, bounds=bounds, load_timeout_s=0.1) as rig,
            pytest.MonkeyPatch.context() as patch,
        ):
            run_bounded(rig, PROMPTS[:3])
            rig.forget_device()
            raised = break_calls(rig, target, patch, first=first, every=every)
            outputs = run_bounded(rig, PROMPTS)
            assert answers(outputs) == right, first
            assert rig.faults == raised(), first
            met += raised()
            patch.undo()
            assert answers(run_bounded(rig, PROMPTS)) == right, first
            rig.settle()
            assert rig.engine.pool.num_free_blocks == len(rig.engine.pool.blocks) - 1, first
    assert met
