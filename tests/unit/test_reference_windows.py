"""The reference engine with sliding windows: alone in all layers, and beside full attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.controls import NEW_TOKENS, TINY, Rig, answers, tokens

from ebbtide.allocator import AllBlocksCleared, BlockStored, EventLog, LogLine
from ebbtide.connectors.reference import Engine, ModelConfig
from ebbtide.connectors.reference.runner import Part, Runner
from ebbtide.errors import ConfigError, MisuseError
from ebbtide.kernels.attention import causal_mask

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("single_thread")

WINDOWED = replace(TINY, window_tokens=40)
MIXED = replace(TINY, window_tokens=40, all_layers_windowed=False)
MODELS = pytest.mark.parametrize("model", [WINDOWED, MIXED], ids=["windowed", "mixed"])


def plain(
    model: ModelConfig, prompts: list[list[int]], new_tokens: int = NEW_TOKENS
) -> list[tuple[int, ...]]:
    """Without any cache."""
    engine = Engine(model, 256, max_batched_tokens=4096, enable_prefix_caching=False)
    return [output.token_ids for output in engine.generate(prompts, new_tokens)]


def test_a_window_is_what_the_mask_says() -> None:
    mask = causal_mask(3, 6, torch.zeros(()), 2)
    seen = [[column for column in range(6) if mask[row, column] == 0] for row in range(3)]
    assert seen == [[2, 3], [3, 4], [4, 5]]


@MODELS
def test_chunks_see_what_a_whole_prompt_sees(model: ModelConfig) -> None:
    prompt = tokens(150, 1)
    table = [list(range(1, 11)) for _ in model.windows]
    if len(table) == 2:
        table[1] = list(range(11, 21))
    whole = Runner(model, num_blocks=32, block_size=16).execute([Part(prompt, 0, table)])
    for chunk in (1, 7, 16, 64):
        runner = Runner(model, num_blocks=32, block_size=16)
        for start in range(0, len(prompt), chunk):
            part = Part(prompt[start : start + chunk], start, table)
            logits = runner.execute([part])
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_layers_without_sight_make_another_answer() -> None:
    """Else nothing here would show whether a window holds."""
    prompts = [tokens(150, seed) for seed in range(4)]
    found = {tuple(plain(model, prompts)) for model in (TINY, WINDOWED, MIXED)}
    assert len(found) == 3


@MODELS
def test_cached_and_preempted_answers_are_the_same(model: ModelConfig) -> None:
    stem = tokens(32, 1)
    prompts = [stem + tokens(5 + 7 * number, number) for number in range(6)]
    expected = plain(model, prompts, 80)
    engine = Engine(model, 20 if model is WINDOWED else 30, max_batched_tokens=64)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, 80, "salt" if number % 2 else None)
    outputs = {output.request_id: output for output in engine.run()}
    assert [outputs[str(n)].token_ids for n in range(len(prompts))] == expected
    if model is MIXED:  # a window alone never grows beyond what its admission reserved
        assert sum(output.preemptions for output in outputs.values()) > 0
    again = engine.generate([stem + tokens(9, 77)], NEW_TOKENS)
    assert answers(again) == plain(model, [stem + tokens(9, 77)])
    engine.kv.check_integrity()
    assert engine.kv.usage == 0


def test_a_salt_that_no_request_may_have_is_refused() -> None:
    engine = Engine(WINDOWED, 27)
    for wrong in ("", "a/b", "x" * 129):
        with pytest.raises(MisuseError, match="cache salt"):
            engine.add_request("a", tokens(9, 1), 1, wrong)
    assert not engine.has_unfinished()


def test_events_and_the_log_line_follow_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    log, now = EventLog(16), iter(range(0, 10_000, 6))
    line = LogLine(clock_s=lambda: float(next(now)))
    engine = Engine(MIXED, 64, events=log, log_line=line)
    prompt = tokens(100, 5)
    with caplog.at_level("INFO", "ebbtide.allocator"):
        engine.generate([prompt], 4)
        engine.generate([prompt], 4)
    stored = [event for event in log.take() if isinstance(event, BlockStored)]
    assert {event.kv_cache_spec_kind for event in stored} == {"full_attention", "sliding_window"}
    assert stored[0].token_ids == prompt[:96]
    assert "Prefix cache hit rate: 48.0%" in caplog.messages[-1]
    assert engine.reset_prefix_cache()
    assert log.take() == [AllBlocksCleared()]


def test_a_window_takes_no_more_blocks_than_it_spans() -> None:
    engine = Engine(WINDOWED, 12, max_batched_tokens=32)
    prompt = tokens(140, 3)
    assert answers(engine.generate([prompt], NEW_TOKENS)) == plain(WINDOWED, [prompt])


@MODELS
def test_restored_windows_answer_the_same(model: ModelConfig, tmp_path: Path) -> None:
    prompts = [tokens(150 + 16 * number, number) for number in range(3)]
    expected = plain(model, prompts)
    with Rig(model=model, disk=tmp_path / "disk", blocks=96) as rig:
        assert answers(rig.ask(prompts)) == expected
        rig.forget_device()
        from_memory = rig.ask(prompts)
        assert answers(from_memory) == expected
        assert min(output.sources.memory for output in from_memory) >= 128
        rig.forget_device()
        rig.forget_memory()
        from_disk = rig.ask(prompts)
        assert answers(from_disk) == expected
        assert min(output.sources.disk for output in from_disk) >= 128
        assert rig.faults == 0
        rig.engine.kv.check_integrity()


@MODELS
def test_a_load_that_fails_is_computed_from_the_start(model: ModelConfig, tmp_path: Path) -> None:
    prompt = tokens(182, 2)
    (expected,) = plain(model, [prompt])
    with Rig(model=model, disk=tmp_path / "disk", blocks=96) as rig:
        rig.ask([prompt])
        rig.forget_device()
        rig.forget_memory()
        rig.flip_on_disk(rig.hashes(prompt)[9], byte=321)
        (output,) = rig.ask([prompt])
        assert output.token_ids == expected
        assert (output.sources.disk, output.misses.get("corrupt")) == (0, 1)
        rig.forget_device()
        (again,) = rig.ask([prompt])  # what was computed anew is stored anew
        assert again.token_ids == expected
        assert again.sources.memory == 176
        assert rig.faults == 0


def test_windows_that_make_no_sense_are_refused() -> None:
    for wrong in ({"window_tokens": 0}, {"num_layers": 3, "all_layers_windowed": False}):
        with pytest.raises(ConfigError, match="window"):
            replace(WINDOWED, **wrong)  # type: ignore[arg-type]  # each a field of its own
