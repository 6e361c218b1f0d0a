"""`ebbtide bench device --dry`: every stage runs on a CPU, and wrong bytes fail it."""

from __future__ import annotations

import argparse
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.kernels.conftest import HAS_GPU

from ebbtide.bench import device_bench, device_copies
from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.kernels.copy_engine import EngineCopies
from ebbtide.tiers.device_streams import StreamCopies

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ebbtide.bench.device_rig import DeviceRig
    from ebbtide.kernels.arena_records import ArenaRecords
    from ebbtide.tiers.device import CopyJob

pytest.importorskip("triton", reason="NO TRITON: kernels are not tested (pip install triton)")
pytestmark = pytest.mark.skipif(HAS_GPU, reason="here the benchmark itself can run")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    device_bench.add_arguments(parser)
    return parser.parse_args(["--json", "--dry", *words])


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_stage_runs_dry(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_bench.run(options()) == 0
    found = rows(capsys)
    assert all(row["ok"] for row in found)
    stages = {row["stage"] for row in found}
    assert {f"{name}.took" for name in device_bench.STAGES} <= stages
    assert not {stage for stage in stages if stage.endswith((".failed", ".skipped", ".missing"))}
    assert {row["method"] for row in found if row["stage"] == "exact"} == {
        "engine",
        "kernel",
        "torch",
    }
    assert {row["way"] for row in found if row["stage"] == "restore"} == {
        "engine",
        "kernel",
        "torch",
    }
    ways = {row["way"]: row for row in found if row["stage"] == "layerwise"}
    assert ways.keys() == {"whole", "layerwise"}
    assert (ways["whole"]["ahead"], ways["layerwise"]["ahead"]) == (0, 16)
    assert all(row["dry"] for row in found)  # nobody takes its times for a device's


def test_the_human_form_of_a_dry_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    args = options("--only", "ceilings")
    args.json = False
    assert device_bench.run(args) == 0
    assert "dry run" in capsys.readouterr().err


def test_wrong_bytes_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scatter = EngineCopies.scatter

    def late(self: EngineCopies, records: ArenaRecords, **named: Any) -> None:
        scatter(self, records._replace(offsets=records.offsets[::-1]), **named)

    monkeypatch.setattr(EngineCopies, "scatter", late)
    assert device_bench.run(options("--only", "exactness")) == 1
    wrong = [row for row in rows(capsys) if not row["ok"]]
    assert {row["method"] for row in wrong} == {"engine"}


def test_restoring_the_wrong_blocks_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EngineCopies, "scatter", lambda *given, **named: None)
    assert device_bench.run(options("--only", "restore")) == 1
    wrong = [row for row in rows(capsys) if not row["ok"]]
    assert {row["way"] for row in wrong} == {"engine"}


def test_a_pass_that_does_not_wait_for_its_layers_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies that are as late as can be, and end well."""
    move, wait = StreamCopies._move, StreamCopies.wait_for_end
    end = threading.Event()

    def late(self: StreamCopies, job: CopyJob) -> None:
        assert job.layer is None or end.wait(20.0)
        move(self, job)

    def ends(self: StreamCopies, tag: Hashable) -> None:
        end.set()
        wait(self, tag)
        end.clear()

    monkeypatch.setattr(StreamCopies, "_move", late)
    monkeypatch.setattr(StreamCopies, "wait_for_end", ends)
    monkeypatch.setattr(StreamCopies, "wait_for_layer", lambda *_: None)
    assert device_bench.run(options("--only", "layerwise")) == 1
    wrong = [row for row in rows(capsys) if not row["ok"]]
    assert {row["way"] for row in wrong} == {"layerwise"}


def test_a_stage_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(rig: DeviceRig) -> None:
        raise TierUnavailableError("No such luck")

    monkeypatch.setitem(device_bench.STAGES, "first_minute", broken)
    assert device_bench.run(options("--only", "first_minute,ceilings")) == 1
    found = {row["stage"]: row for row in rows(capsys)}
    assert "No such luck" in found["first_minute.failed"]["error"]
    assert found["ceilings.took"]["ok"]


def test_a_peer_that_does_not_copy_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_copies, "PEER", "ebbtide.bench.no_such_program")
    assert device_bench.run(options("--only", "first_minute")) == 1
    found = {row["stage"]: row for row in rows(capsys)}
    assert not found["peer.copied"]["ok"]
    assert not found["peer.killed"]["ok"]  # nothing was there to be quiet


def test_what_is_left_of_the_budget_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_bench.run(options("--only", "ceilings", "--budget", "5")) == 0
    assert "ceilings.skipped" in {row["stage"] for row in rows(capsys)}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such stage"):
        device_bench.run(options("--only", "everything"))
    wet = options()
    wet.dry = False
    with pytest.raises(TierUnavailableError, match="no GPU"):
        device_bench.run(wet)
