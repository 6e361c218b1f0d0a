"""A real engine under pressure over a real store: nothing lost, nothing twice, nothing left."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.controls import (
    HANG_S,
    NEW_TOKENS,
    PATIENT,
    Reference,
    Rig,
    answers,
    conversations,
    tokens,
)

from ebbtide.tiers.reasons import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ebbtide.connectors.reference import RequestOutput
    from ebbtide.tiers.device import CopyEnd

pytestmark = pytest.mark.usefixtures("single_thread")

SEEDS = 50


def test_what_the_pool_evicts_has_ebbed_and_nothing_is_copied_twice(reference: Reference) -> None:
    prompts = conversations(3, users=6, turns=8)
    with Rig(blocks=64, memory_records=1024, budget=64) as rig:
        outputs = rig.ask(prompts)
        rig.settle()
        assert answers(outputs) == reference.answers(prompts)
        tally, records = rig.scheduler.tally, rig.memory_records()
        assert tally.shed == 0
        assert tally.demoted == len(records)
        assert tally.bytes_by_edge["device_to_memory"] == len(records) * rig.record_bytes
        asked = {name for prompt in prompts for name in rig.hashes(prompt)}
        assert asked <= records.keys()
        assert len(records) > 2 * len(rig.engine.pool.blocks)
        restored = sum(output.sources.memory for output in outputs)
        assert restored > 1000
        assert tally.bytes_by_edge["memory_to_device"] == restored // 16 * rig.record_bytes
        assert sum(output.misses.get("evicted", 0) for output in outputs) == 0
        rig.assert_adds_up(outputs)
        assert tally.requests == len(prompts)
        assert rig.faults == 0
        rig.assert_idle()


def test_requests_that_run_together_find_the_same(reference: Reference, tmp_path: Path) -> None:
    prompts = conversations(4, users=8, turns=5)
    with Rig(blocks=96, memory_records=64, disk=tmp_path / "disk", budget=96) as rig:
        outputs = []
        for first in range(0, len(prompts), 5):
            outputs += rig.ask(prompts[first : first + 5], one_by_one=False)
        assert answers(outputs) == reference.answers(prompts)
        assert sum(output.sources.disk for output in outputs) > 0
        rig.assert_adds_up(outputs)
        assert rig.faults == 0
        rig.assert_idle()


def hold_back_ends(rig: Rig, draw: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end late and in a mixed order."""
    copies = rig.worker._copies
    poll: Callable[[], list[CopyEnd]] = copies.poll
    held: list[CopyEnd] = []

    def late() -> list[CopyEnd]:
        new = poll()
        held.extend(new)
        draw.shuffle(held)
        cut = draw.randrange(len(held) + 1) if draw.random() < 0.5 else 0
        given, held[:] = held[:cut], held[cut:]
        copies.open_jobs += len(new) - len(given)
        return given

    monkeypatch.setattr(copies, "poll", late)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_p24_preempted_aborted_and_readmitted_requests_leave_no_pin(
    seed: int, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stores and loads in flight all the time, and their ends delivered late."""
    draw = Random(seed)
    prompts = conversations(100 + seed % 5, users=4, turns=3)
    right = reference.answers(prompts)
    with Rig(blocks=26, memory_records=200, budget=48) as rig:
        rig.ask(prompts[:4])
        rig.forget_device()
        hold_back_ends(rig, draw, monkeypatch)
        outputs: dict[str, RequestOutput] = {}
        waiting = list(range(len(prompts)))
        aborted: set[str] = set()
        deadline = time.monotonic() + HANG_S
        while waiting or rig.engine.has_unfinished():
            assert time.monotonic() < deadline
            if waiting and draw.random() < 0.3:
                number = waiting.pop(0)
                rig.engine.add_request(str(number), prompts[number], NEW_TOKENS)
            names = sorted(rig.engine.scheduler.names - aborted)
            if names and draw.random() < 0.06:
                victim = draw.choice(names)
                aborted.add(victim)
                rig.engine.abort(victim)
            running = rig.engine.scheduler.running
            if running and draw.random() < 0.06:
                rig.engine.scheduler._preempt(running[-1])
            outputs.update((output.request_id, output) for output in rig.engine.step())
            rig.engine.kv.check_integrity()
        for name, output in outputs.items():
            assert output.token_ids == right[int(name)]
        assert len(outputs) + len(aborted) >= len(prompts)
        assert rig.faults == 0
        rig.assert_idle()


def test_blocks_of_an_aborted_load_stay_until_its_copies_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = tokens(130, seed=1)
    with Rig(blocks=32) as rig:
        rig.ask([prompt])
        rig.forget_device()
        copies = rig.worker._copies
        poll = copies.poll
        ended: list[CopyEnd] = []

        def none_yet() -> list[CopyEnd]:
            ended.extend(poll())
            return []

        monkeypatch.setattr(copies, "poll", none_yet)
        rig.engine.add_request("r", prompt, NEW_TOKENS)
        rig.wait_for(lambda: rig.engine.step() or ended)
        used = len(rig.engine.pool.blocks) - 1 - rig.engine.pool.num_free_blocks
        rig.engine.abort("r")
        for _ in range(5):
            rig.engine.step()
            free = rig.engine.pool.num_free_blocks
            assert len(rig.engine.pool.blocks) - 1 - free == used
        monkeypatch.setattr(copies, "poll", lambda: [ended.pop() for _ in list(ended)] + poll())
        assert rig.engine.run() == []
        rig.assert_idle()


def test_p31_a_long_prompt_is_stored_without_a_hole(reference: Reference, tmp_path: Path) -> None:
    prompt = tokens(200 * 16 + 3, seed=31)
    with Rig(blocks=240, memory_records=4, disk=tmp_path / "disk", budget=128) as rig:
        (first,) = rig.ask([prompt])
        rig.write_out()
        names = rig.hashes(prompt)
        held = rig.memory_records().keys() | rig.disk_records().keys()
        assert [name in held for name in names] == [True] * 200
        assert rig.scheduler.tally.shed == 0
        rig.forget_device()
        before = rig.store.stats()
        rig.engine.add_request("r", prompt, NEW_TOKENS)
        assert {rig.scheduler.matched_tokens("r", 0) for _ in range(100)} == {200 * 16}
        assert rig.store.stats() == before  # asking changes nothing
        (second,) = rig.engine.run()
        assert second.sources.disk + second.sources.memory == 200 * 16
        assert second.token_ids == first.token_ids == reference.answers([prompt])[0]
        assert rig.faults == 0


def test_p31_without_room_every_drop_is_counted(reference: Reference) -> None:
    prompt = tokens(200 * 16 + 3, seed=31)
    with Rig(blocks=240, memory_records=4, budget=128) as rig:
        (output,) = rig.ask([prompt])
        rig.settle()
        assert output.token_ids == reference.answers([prompt])[0]
        counts, records = rig.store.ledger.counts, rig.memory_records()
        assert rig.scheduler.tally.demoted == counts["stored"] == 200
        assert counts["memory_evicted"] + len(records) == 200
        assert rig.scheduler.tally.shed == 0
        rig.assert_idle()


@pytest.mark.parametrize("with_disk", [False, True])
def test_p46_more_stores_in_a_step_than_memory_has_slots(
    with_disk: bool, reference: Reference, tmp_path: Path
) -> None:
    prompts = [tokens(3 * 16 + 1, seed=number) for number in range(20)]
    disk = tmp_path / "disk" if with_disk else None
    with Rig(blocks=160, memory_records=10, disk=disk, budget=1024) as rig:
        for _ in range(3):
            outputs = rig.ask(prompts, one_by_one=False)
            assert answers(outputs) == reference.answers(prompts)
            rig.assert_adds_up(outputs)
            rig.assert_idle()
            rig.forget_device()
        assert rig.store.ledger.counts["reserve_busy"] > 0
        assert rig.faults == 0
        if with_disk:
            assert sum(output.sources.disk for output in outputs) > 0


def test_p90_short_requests_of_all_lengths_that_end_at_any_time(
    reference: Reference, tmp_path: Path
) -> None:
    draw = Random(90)
    texts = [tokens(draw.randrange(1, 66), seed=number) for number in range(40)]
    with Rig(blocks=40, memory_records=24, block_size=64, disk=tmp_path / "disk") as rig:
        todo = [draw.randrange(len(texts)) for _ in range(200)]
        which: dict[str, int] = {}
        ended = 0
        deadline = time.monotonic() + HANG_S
        while todo or rig.engine.has_unfinished():
            assert time.monotonic() < deadline
            while todo and len(which) < 20 and draw.random() < 0.7:
                name = f"r{len(todo)}"
                which[name] = todo.pop()
                rig.engine.add_request(name, texts[which[name]], NEW_TOKENS)
            if which and draw.random() < 0.2:
                name = draw.choice(sorted(which))
                rig.engine.abort(name)
                del which[name]
            for output in rig.engine.step():
                number = which.pop(output.request_id)
                assert output.token_ids == reference.answers([texts[number]])[0]
                ended += 1
        assert ended > 100
        assert rig.faults == 0
        rig.assert_idle()


def test_p95_tiers_that_hold_different_parts_are_stitched(
    reference: Reference, tmp_path: Path
) -> None:
    prompt = tokens(165, seed=95)
    with Rig(disk=tmp_path / "disk") as rig:
        rig.ask([prompt])
        rig.write_out()
        names = rig.hashes(prompt)
        assert rig.store.disk is not None
        for number in range(4, 8):
            rig.store.disk.discard(rig.disk_records()[names[number]])
        for number in (8, 9):
            rig.store.memory.discard(rig.memory_records()[names[number]])
        rig.forget_device()
        down = rig.scheduler.tally.bytes_by_edge["device_to_memory"]
        written = rig.store.disk.write_bytes
        (output,) = rig.ask([prompt])
        assert (output.sources.memory, output.sources.disk) == (8 * 16, 2 * 16)
        assert output.token_ids == reference.answers([prompt])[0]
        rig.settle()
        # Nothing that a tier has is put again.
        assert rig.scheduler.tally.bytes_by_edge["device_to_memory"] == down
        assert rig.store.disk.write_bytes == written


@pytest.mark.parametrize("seed", range(12))
def test_p95_any_mixture_of_tiers_gives_the_same_answer(
    seed: int, reference: Reference, tmp_path: Path
) -> None:
    draw = Random(seed)
    prompt = tokens(165, seed=95)
    with Rig(disk=tmp_path / "disk") as rig:
        rig.ask([prompt])
        rig.write_out()
        assert rig.store.disk is not None
        expected = []
        for name in rig.hashes(prompt):
            memory, disk = draw.random() < 0.6, draw.random() < 0.6
            if not memory:
                rig.store.memory.discard(rig.memory_records()[name])
            if not disk:
                rig.store.disk.discard(rig.disk_records()[name])
            expected.append(Place.MEMORY if memory else Place.DISK if disk else None)
        run = expected.index(None) if None in expected else len(expected)
        rig.forget_device()
        (output,) = rig.ask([prompt])
        assert output.sources.memory == 16 * expected[:run].count(Place.MEMORY)
        assert output.sources.disk == 16 * expected[:run].count(Place.DISK)
        assert output.token_ids == reference.answers([prompt])[0]
        rig.assert_adds_up([output])


def test_a_tiny_pool_gets_its_blocks_back_from_a_store_that_does_not_answer(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins hold blocks for no longer than the bound, and then nothing is pinned any more."""
    from dataclasses import replace

    prompts = [tokens(16 * 9, seed=number) for number in range(4)]
    bounds = replace(PATIENT, pin_timeout_s=0.2, reserve_timeout_s=0.2, lookup_timeout_s=0.05)
    with Rig(blocks=13, bounds=bounds, load_timeout_s=0.2) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.scheduler._client, "poll", list)
            patch.setattr(rig.worker._client, "poll", list)
            for prompt in prompts:  # each needs ten of the twelve blocks
                assert answers(rig.ask([prompt])) == reference.answers([prompt])
            assert rig.engine.drain(5.0)
        assert answers(rig.ask(prompts)) == reference.answers(prompts)
        assert rig.faults == 0
        rig.assert_idle()
