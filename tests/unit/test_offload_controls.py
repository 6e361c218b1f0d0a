"""What comes back is what went down, the answers depend on it, and damage is recomputed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.controls import NEW_TOKENS, RECORD_BYTES, Reference, Rig, answers, tokens

from ebbtide.kernels.copy import gather_into, scatter, scatter_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ebbtide.kernels.layout import PagedLayout

pytestmark = pytest.mark.usefixtures("single_thread")

PROMPTS = [tokens(100 + 7 * number, seed=number) for number in range(24)]
LONG = tokens(330, seed=77)
LONG_BLOCKS = 20  # full blocks that a load may bring
CHANGED_SHARE = 0.9


def damage_restores(rig: Rig, monkeypatch: pytest.MonkeyPatch, scatter_badly: object) -> None:
    badly = SimpleNamespace(gather_into=gather_into, scatter_from=scatter_badly)
    monkeypatch.setattr(rig.worker._copies, "_copy", badly)


def test_zeros_in_place_of_records_change_the_answers(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they did not, no other test here would say anything."""

    def zeros(
        layout: PagedLayout, ids: Sequence[int], arena: torch.Tensor, offsets: Sequence[int]
    ) -> None:
        nothing = torch.zeros(layout.record_bytes, dtype=torch.uint8)
        scatter(layout, ids, [nothing for _ in offsets])

    with Rig(memory_records=512) as rig:
        assert answers(rig.ask(PROMPTS)) == reference.answers(PROMPTS)
        rig.forget_device()
        damage_restores(rig, monkeypatch, zeros)
        restored = rig.ask(PROMPTS)
        assert all(output.sources.memory >= 80 for output in restored)
        right = reference.answers(PROMPTS)
        changed = sum(a != b for a, b in zip(answers(restored), right, strict=True))
        assert changed >= CHANGED_SHARE * len(PROMPTS)


def test_granted_slots_that_are_zeroed_before_the_copy_change_the_answers(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the store sees at the next load that its records are no longer what they were."""

    def wipe(
        layout: PagedLayout, ids: Sequence[int], arena: torch.Tensor, offsets: Sequence[int]
    ) -> None:
        for offset in offsets:
            arena[offset : offset + layout.record_bytes].zero_()
        scatter_from(layout, ids, arena, offsets)

    with Rig(memory_records=512) as rig:
        rig.ask(PROMPTS)
        rig.forget_device()
        damage_restores(rig, monkeypatch, wipe)
        right = reference.answers(PROMPTS)
        changed = sum(a != b for a, b in zip(answers(rig.ask(PROMPTS)), right, strict=True))
        assert changed >= CHANGED_SHARE * len(PROMPTS)
        rig.forget_device()
        assert answers(rig.ask(PROMPTS)) == right
        assert rig.store.ledger.counts["memory_corrupt"] >= len(PROMPTS)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_block_comes_back_as_it_went_down(tier: str, tmp_path: Path) -> None:
    with Rig(disk=tmp_path / "disk") as rig:
        names = rig.hashes(LONG)[:LONG_BLOCKS]
        (first,) = rig.ask([LONG])
        before = rig.device_bytes(names)
        assert len(set(before)) == LONG_BLOCKS
        rig.forget_device()
        if tier == "disk":
            rig.forget_memory()
        (second,) = rig.ask([LONG])
        assert getattr(second.sources, tier) == LONG_BLOCKS * 16
        assert rig.device_bytes(names) == before
        assert second.token_ids == first.token_ids


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_restored_logits_are_the_recomputed_ones(
    tier: str, reference: Reference, tmp_path: Path
) -> None:
    with Rig(disk=tmp_path / "disk") as rig:
        rig.ask([LONG, *PROMPTS[:6]])
        rig.forget_device()
        if tier == "disk":
            rig.forget_memory()
        restored = rig.ask([LONG, *PROMPTS[:6]])
        for output, right in zip(restored, reference.outputs([LONG, *PROMPTS[:6]]), strict=True):
            assert getattr(output.sources, tier) > 80
            assert output.first_logits is not None
            assert right.first_logits is not None
            assert (output.first_logits - right.first_logits).abs().max() <= 1e-5
            assert output.token_ids == right.token_ids


def test_a_byte_flipped_on_disk_is_counted_and_recomputed(
    reference: Reference, tmp_path: Path
) -> None:
    damaged = {(0, 0): 0, (1, 3): RECORD_BYTES - 1, (2, 5): 4096, (3, 1): 1, (3, 4): 8000}
    with Rig(disk=tmp_path / "disk") as rig:
        rig.ask(PROMPTS[:6])
        rig.forget_device()
        rig.forget_memory()
        for (prompt, block), byte in damaged.items():
            rig.flip_on_disk(rig.hashes(PROMPTS[prompt])[block], byte)
        restored = rig.ask(PROMPTS[:6])
        assert answers(restored) == reference.answers(PROMPTS[:6])
        assert rig.store.disk is not None
        assert rig.store.disk.corrupt == len(damaged)
        lost = [output.misses.get("corrupt", 0) for output in restored]
        assert lost == [1, 1, 1, 1, 0, 0]
        assert [output.sources.disk for output in restored[:4]] == [0, 3 * 16, 5 * 16, 1 * 16]
        rig.assert_adds_up(restored)
        # What was recomputed has ebbed again and is whole.
        rig.forget_device()
        again = rig.ask(PROMPTS[:6])
        assert answers(again) == reference.answers(PROMPTS[:6])
        assert sum(output.misses.get("corrupt", 0) for output in again) == 0
        assert all(output.sources.computed <= 16 for output in again)


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_byte_flipped_in_memory_is_counted_and_never_used(
    with_disk: bool, reference: Reference, tmp_path: Path
) -> None:
    with Rig(disk=tmp_path / "disk" if with_disk else None) as rig:
        rig.ask(PROMPTS[:4])
        rig.forget_device()
        if with_disk:
            rig.write_out()
        for prompt, block in ((0, 0), (1, 2), (2, 5)):
            rig.flip_in_memory(rig.hashes(PROMPTS[prompt])[block])
        restored = rig.ask(PROMPTS[:4])
        assert answers(restored) == reference.answers(PROMPTS[:4])
        assert rig.store.ledger.counts["memory_corrupt"] == 3
        if with_disk:
            assert [output.sources.disk for output in restored] == [16, 16, 16, 0]
            assert all("corrupt" not in output.misses for output in restored)
        else:
            assert [output.misses.get("corrupt", 0) for output in restored] == [1, 1, 1, 0]
            assert [output.sources.memory for output in restored[:3]] == [0, 2 * 16, 5 * 16]
        rig.assert_adds_up(restored)


def test_p22_a_store_waits_for_the_step_that_computes_its_block(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is filled with rubbish whenever a step has only been planned, not yet computed."""
    with Rig(memory_records=512) as rig:
        execute: Callable[..., torch.Tensor] = rig.engine.runner.execute
        written: set[int] = set()

        def poison_first(parts: list[object], *more: object) -> torch.Tensor:
            for part in parts:
                first = part.position // 16  # type: ignore[attr-defined]
                fresh = part.block_tables[0][first + (part.position % 16 > 0) :]  # type: ignore[attr-defined]
                written.update(fresh)
                for cache in rig.engine.runner.kv_caches:
                    cache[:, fresh] = 1e30
            return execute(parts, *more)

        monkeypatch.setattr(rig.engine.runner, "execute", poison_first)
        assert answers(rig.ask(PROMPTS, one_by_one=False)) == reference.answers(PROMPTS)
        assert written
        rig.forget_device()
        restored = rig.ask(PROMPTS)
        assert answers(restored) == reference.answers(PROMPTS)
        assert sum(output.sources.memory for output in restored) > 1000


def test_new_tokens_are_restored_too(reference: Reference) -> None:
    """What an answer adds to a conversation ebbs like its prompt."""
    with Rig() as rig:
        prompt = tokens(60, seed=5)
        (first,) = rig.ask([prompt])
        assert len(first.token_ids) == NEW_TOKENS
        rig.forget_device()
        longer = prompt + list(first.token_ids) + tokens(20, seed=6)
        (second,) = rig.ask([longer])
        assert second.sources.memory == 64  # 60 + 12 tokens, the last one's block not full
        assert second.token_ids == reference.answers([longer])[0]
