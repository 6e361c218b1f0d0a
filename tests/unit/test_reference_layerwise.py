"""The reference engine on loads that arrive layer by layer: right answers, whatever fails when.

Copies here are as late as they may be: a layer moves when somebody waits for it, and not before.
So an engine that reads a layer without waiting reads what was there before.
"""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.controls import (
    HANG_S,
    NEW_TOKENS,
    TINY,
    Reference,
    Rig,
    answers,
    conversations,
    tokens,
)

from ebbtide.connectors.reference.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator
    from pathlib import Path

    from ebbtide.connectors.reference import ModelConfig
    from ebbtide.connectors.reference.scheduler import Scheduled
    from ebbtide.connectors.seam import WorkerReport
    from ebbtide.tiers.device import CopyJob

pytestmark = pytest.mark.usefixtures("single_thread")

DEEP = replace(TINY, num_layers=4)
WINDOWED = replace(DEEP, window_tokens=40)
MIXED = replace(DEEP, window_tokens=40, all_layers_windowed=False)
MODELS = pytest.mark.parametrize(
    "model", [DEEP, WINDOWED, MIXED], ids=["full", "windowed", "mixed"]
)
PROMPT = tokens(150, 3)  # nine blocks and six tokens


class Ahead:
    """A rig whose loads arrive by layer, and what it saw: parts that ran ahead of a load's end."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self.parts: list[Scheduled] = []
        self.before_step: Callable[[], object] = lambda: None  # once somebody is to run ahead
        run_ahead = Scheduler._run_ahead

        def watched(scheduler: Scheduler, budget: int) -> list[Scheduled]:
            found = run_ahead(scheduler, budget)
            self.parts += found
            if found:
                self.before_step()
            return found

        monkeypatch.setattr(Scheduler, "_run_ahead", watched)


@contextmanager
def arriving(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig = DEEP, **how: object
) -> Iterator[Ahead]:
    """The prompt is in memory, and nothing of it on the device."""
    with Rig(model=model, blocks=96, layerwise="on", **how) as rig:  # type: ignore[arg-type]
        rig.ask([PROMPT])
        rig.forget_device()
        yield Ahead(rig, monkeypatch)
        assert rig.engine.drain(HANG_S)
        rig.engine.kv.check_integrity()


class Late:
    """Copies to the device that move a layer when somebody waits for it, and not before.

    `log`: in turn what was waited for and what was moved, as ("wait" or "move", group, layer).
    """

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int, int]] = []
        copies = rig.worker._copies
        move, wait, end = copies._move, copies.wait_for_layer, copies.wait_for_end
        interleave = copies.interleave
        asked: dict[Hashable, int] = {}  # by tag, the last layer that somebody wants
        arriving: set[Hashable] = set()
        changed = threading.Condition()

        def ask(tag: Hashable, layer: int) -> None:
            with changed:
                asked[tag] = layer
                changed.notify_all()

        def may_move(job: CopyJob) -> bool:
            if job.tag not in arriving:
                return bool(asked)  # it stands in the way of what is wanted
            return max(asked.values(), default=-1) >= (job.layer or 0)

        def late(job: CopyJob) -> None:
            if job.layer is not None:
                with changed:
                    assert changed.wait_for(lambda: may_move(job), HANG_S)
                self.log.append(("move", job.group, job.layer))
            move(job)

        def together(tags: Collection[Hashable]) -> None:
            arriving.update(tags)
            interleave(tags)

        def waits(tag: Hashable, group: int, layer: int) -> None:
            self.log.append(("wait", group, layer))
            ask(tag, layer)
            wait(tag, group, layer)

        def ends(tag: Hashable) -> None:
            ask(tag, 99)
            end(tag)
            del asked[tag]

        monkeypatch.setattr(copies, "interleave", together)
        monkeypatch.setattr(copies, "_move", late)
        monkeypatch.setattr(copies, "wait_for_layer", waits)
        monkeypatch.setattr(copies, "wait_for_end", ends)


def fails_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, group: int, layer: int, block: int | None = None
) -> list[int]:
    """The first copy of that layer (and of that block, by its number in the load) fails."""
    copies = rig.worker._copies
    move = copies._move
    seen: list[int] = []
    failed: list[int] = []

    def fails(job: CopyJob) -> None:
        if (job.group, job.layer) == (group, layer) and not failed:
            seen.append(layer)
            if block is None or len(seen) == block + 1:
                failed.append(layer)
                raise OSError(errno.EIO, "injected: the copy to the device")
        move(job)

    monkeypatch.setattr(copies, "_move", fails)
    return failed


# -- right answers --------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("late", [False, True])
def test_restored_answers_are_those_without_a_cache(
    model: ModelConfig, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens(150 + 16 * number, number) for number in range(3)] + [tokens(96, 8)]
    expected = Reference(model).answers(prompts)
    with Rig(model=model, disk=tmp_path / "disk", blocks=96, layerwise="on") as rig:
        ahead = Ahead(rig, monkeypatch)
        assert answers(rig.ask(prompts)) == expected
        assert not ahead.parts
        if late:
            Late(rig, monkeypatch)
        rig.forget_device()
        from_memory = rig.ask(prompts)
        assert answers(from_memory) == expected
        assert min(output.sources.memory for output in from_memory) >= 80
        assert {part.sequence.request.num_prompt_tokens for part in ahead.parts} == {
            len(prompt) for prompt in prompts
        }
        rig.forget_device()
        rig.forget_memory()
        from_disk = rig.ask(prompts, one_by_one=False)
        assert answers(from_disk) == expected
        assert min(output.sources.disk for output in from_disk) >= 80
        rig.assert_adds_up([*from_memory, *from_disk])
        rig.assert_idle()
        assert rig.faults == 0


def test_whole_and_by_layer_give_the_same_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = Reference(DEEP).outputs([PROMPT])
    for layerwise in ("off", "auto", "on"):
        with Rig(model=DEEP, layerwise=layerwise) as rig:
            ahead = Ahead(rig, monkeypatch)
            rig.ask([PROMPT])
            rig.forget_device()
            (output,) = rig.ask([PROMPT])
            assert output.token_ids == right.token_ids
            assert output.first_logits is not None
            assert right.first_logits is not None
            assert (output.first_logits - right.first_logits).abs().max() < 1e-4
            assert bool(ahead.parts) is (layerwise == "on")  # a host's own thread cannot wait


def test_a_layer_is_used_before_the_next_one_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    with arriving(monkeypatch) as ahead:
        late = Late(ahead.rig, monkeypatch)
        assert answers(ahead.rig.ask([PROMPT])) == Reference(DEEP).answers([PROMPT])
        expected = [(what, 0, layer) for layer in range(4) for what in ("wait", "move")]
        assert late.log[: len(expected)] == expected


def test_what_a_step_filled_ahead_of_the_load_is_found_when_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the request ends with that step: nobody else will give those blocks their names."""
    longer = PROMPT + tokens(50, 6)
    with arriving(monkeypatch) as ahead:
        Late(ahead.rig, monkeypatch)
        ahead.rig.engine.generate([longer], 1)
        assert [part.num_tokens for part in ahead.parts] == [200 - 144]
        assert ahead.rig.engine.tokens_ahead == 200 - 144
        assert all(ahead.rig.device_bytes(ahead.rig.hashes(longer)))  # twelve full blocks


def test_groups_and_batches_arrive_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two groups take turns in the model, and every block may be a batch of its own."""
    with arriving(monkeypatch, MIXED) as ahead:
        ahead.rig.read_one_by_one()
        late = Late(ahead.rig, monkeypatch)
        assert answers(ahead.rig.ask([PROMPT])) == Reference(MIXED).answers([PROMPT])
        moves = [layer for what, _, layer in late.log if what == "move"]
        assert moves == sorted(moves)
        assert len(moves) == 2 * (9 + 3)  # all blocks of the one group, a window of the other
        waited = [(group, layer) for what, group, layer in late.log if what == "wait"]
        assert list(dict.fromkeys(waited)) == [(1, 0), (0, 0), (1, 1), (0, 1)]
        assert late.log.index(("wait", 0, 0)) < late.log.index(("move", 0, 1))


def test_planted_a_forward_pass_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with arriving(monkeypatch) as ahead:
        Late(ahead.rig, monkeypatch)
        execute = ahead.rig.engine.runner.execute
        monkeypatch.setattr(ahead.rig.engine.runner, "execute", lambda parts, wait: execute(parts))
        # The load is told to end whole, as a device would that nobody waited for.
        for_layer = ahead.rig.worker.wait_for_layer
        finish = ahead.rig.worker.finish_step

        def finish_step() -> WorkerReport:
            if ahead.parts:
                for_layer(0, 3)
            return finish()

        monkeypatch.setattr(ahead.rig.worker, "finish_step", finish_step)
        (output,) = ahead.rig.ask([PROMPT])
        assert ahead.parts
        assert output.sources.memory == 144
        assert output.token_ids != Reference(DEEP).answers([PROMPT])[0]


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "group", "layer"),
    [(DEEP, 0, layer) for layer in range(4)]
    + [(WINDOWED, 0, layer) for layer in range(4)]
    + [(MIXED, group, layer) for group in range(2) for layer in range(2)],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_fails_in_any_layer_costs_time_alone(
    model: ModelConfig, group: int, layer: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = Reference(model).answers([PROMPT])
    with arriving(monkeypatch, model) as ahead:
        rig = ahead.rig
        failed = fails_at(rig, monkeypatch, group, layer)
        if late:
            Late(rig, monkeypatch)
        (output,) = rig.ask([PROMPT])
        assert output.token_ids == expected
        assert failed == [layer]
        assert bool(ahead.parts) or not late
        assert output.sources.memory == 0
        assert output.misses["io_error"] == 1
        rig.forget_device()
        (again,) = rig.ask([PROMPT])
        assert again.token_ids == expected
        assert again.sources.memory == 144
        rig.assert_adds_up([output, again])
        rig.assert_idle()
        assert rig.faults == 0


@pytest.mark.parametrize("layer", range(4))
def test_blocks_in_front_of_a_failure_are_kept(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = Reference(DEEP).answers([PROMPT])
    with arriving(monkeypatch) as ahead:
        ahead.rig.read_one_by_one()  # a batch a record
        failed = fails_at(ahead.rig, monkeypatch, 0, layer, block=6)
        Late(ahead.rig, monkeypatch)
        (output,) = ahead.rig.ask([PROMPT])
        assert output.token_ids == expected
        assert failed == [layer]
        assert ahead.parts
        assert output.sources.memory == 6 * 16
        ahead.rig.assert_adds_up([output])
        ahead.rig.assert_idle()


def test_nobody_finds_blocks_that_may_yet_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request begins with the same text in the very step that runs ahead in vain."""
    longer = PROMPT + tokens(60, 4)  # its blocks from the tenth on are computed in that step
    prompts = [longer, longer + tokens(9, 5)]
    expected = Reference(DEEP).answers(prompts)
    with arriving(monkeypatch) as ahead:
        engine = ahead.rig.engine
        Late(ahead.rig, monkeypatch)
        fails_at(ahead.rig, monkeypatch, 0, 2)
        ahead.before_step = lambda: (
            engine.add_request("b", prompts[1], NEW_TOKENS)
            if "b" not in engine.scheduler.names
            else None
        )
        engine.add_request("a", prompts[0], NEW_TOKENS)
        monkeypatch.setattr(ahead.rig.scheduler, "matched_tokens", matched_for_a(ahead.rig))
        outputs = {output.request_id: output.token_ids for output in engine.run()}
        assert ahead.parts
        assert [outputs["a"], outputs["b"]] == expected


def matched_for_a(rig: Rig) -> Callable[[str, int], int | None]:
    """Only the first request is offered anything from the tiers."""
    matched = rig.scheduler.matched_tokens
    return lambda name, local: matched(name, local) if name == "a" else 0


def test_a_reset_in_between_lets_nothing_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with arriving(monkeypatch) as ahead:
        Late(ahead.rig, monkeypatch)
        ahead.before_step = ahead.rig.scheduler.forget_loads
        (output,) = ahead.rig.ask([PROMPT])
        assert output.token_ids == Reference(DEEP).answers([PROMPT])[0]
        assert (output.sources.memory, output.misses["reset"]) == (0, 1)
        ahead.rig.assert_idle()


@pytest.mark.parametrize("layer", range(4))
def test_a_fault_in_the_waiting_itself_spoils_the_load(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass goes on without having waited, and every copy ends well."""
    with arriving(monkeypatch) as ahead:
        Late(ahead.rig, monkeypatch)
        copies = ahead.rig.worker._copies
        wait = copies.wait_for_layer

        def breaks(tag: Hashable, group: int, number: int) -> None:
            if number == layer:
                raise RuntimeError("injected: no waiting")
            wait(tag, group, number)

        monkeypatch.setattr(copies, "wait_for_layer", breaks)
        (output,) = ahead.rig.ask([PROMPT])
        assert output.token_ids == Reference(DEEP).answers([PROMPT])[0]
        assert (output.sources.memory, output.misses["unknown"]) == (0, 1)
        assert ahead.rig.faults == 1


def test_without_the_loads_end_the_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault hides the end from the step's report: it comes with the next, and so do tokens."""
    with arriving(monkeypatch) as ahead:
        Late(ahead.rig, monkeypatch)
        copies = ahead.rig.worker._copies
        end, faults = copies.wait_for_end, [1]

        def breaks(tag: Hashable) -> None:
            if faults:
                faults.pop()
                raise RuntimeError("injected: the end is not waited for")
            end(tag)

        monkeypatch.setattr(copies, "wait_for_end", breaks)
        (output,) = ahead.rig.ask([PROMPT])
        assert output.token_ids == Reference(DEEP).answers([PROMPT])[0]
        assert output.sources.memory == 144
        assert ahead.rig.faults == 1
        ahead.rig.assert_idle()


def test_an_abort_behind_a_step_that_did_not_count_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with arriving(monkeypatch) as ahead:
        Late(ahead.rig, monkeypatch)
        copies = ahead.rig.worker._copies
        end = copies.wait_for_end
        monkeypatch.setattr(copies, "wait_for_end", lambda tag: 1 / 0)
        engine = ahead.rig.engine
        engine.add_request("a", PROMPT, NEW_TOKENS)
        while not ahead.parts:
            engine.step()
        engine.abort("a")
        monkeypatch.setattr(copies, "wait_for_end", end)
        assert engine.run() == []
        assert answers(ahead.rig.ask([PROMPT])) == Reference(DEEP).answers([PROMPT])
        ahead.rig.assert_idle()


@pytest.mark.parametrize("model", [TINY, replace(TINY, window_tokens=40)])
def test_many_requests_in_a_small_pool(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemptions, cut budgets and failing copies among loads that arrive by layer."""
    prompts = conversations(23, users=5, turns=3)
    right = Reference(model).answers(prompts)
    with Rig(model=model, blocks=30, memory_records=512, budget=64, layerwise="on") as rig:
        ahead = Ahead(rig, monkeypatch)
        copies = rig.worker._copies
        move, count = copies._move, [0]

        def sometimes(job: CopyJob) -> None:
            if job.layer is not None:
                count[0] += 1
                if count[0] % 7 == 0:
                    raise OSError(errno.EIO, "injected: the copy to the device")
            move(job)

        monkeypatch.setattr(copies, "_move", sometimes)
        for one_by_one in (False, True, False):
            outputs = rig.ask(prompts, one_by_one=one_by_one)
            assert answers(outputs) == right
            rig.forget_device()
        assert len(ahead.parts) > 10
        assert count[0] > 40
        rig.assert_idle()
        assert rig.faults == 0
