"""The demo's sizes are what its documentation says: counted from the prompts, not estimated."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ebbtide.bench import demo
from ebbtide.bench.conversations import Conversations, Shape, Turn

if TYPE_CHECKING:
    from pathlib import Path


def plan(tmp_path: Path) -> demo.Demo:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.Demo(parser.parse_args(["--model", "tiny"]), tmp_path)


def test_the_working_set_is_three_device_pools_and_one_and_a_half_memories(tmp_path: Path) -> None:
    found = plan(tmp_path)
    memory_kib = int(found.settings["memory"]["capacity"].removesuffix("KiB"))
    working_set = found.working_blocks * found.record_bytes
    assert working_set >= 3 * found.device_blocks * found.record_bytes
    assert working_set >= 1.5 * (memory_kib << 10)


def test_the_working_set_counts_every_distinct_block_once() -> None:
    shape = Shape(users=3, turns=2, document_tokens=300, answer_tokens=8, group=2)
    talk = Conversations(shape)
    for turn in shape.order():
        talk.prompt(turn)
        talk.answers[turn.name] = [turn.user] * shape.answer_tokens
    prefixes = set()
    for user in range(shape.users):
        last = Turn(user, shape.turns - 1)
        tokens = [*talk.prompt(last), *talk.answers[last.name]]
        prefixes |= {tuple(tokens[:end]) for end in range(16, len(tokens) + 1, 16)}
    assert Conversations(shape).working_set_blocks(16) == len(prefixes)


def test_every_user_talks_about_another_document() -> None:
    talk = Conversations(Shape(users=6, turns=1))
    prompts = [talk.prompt(Turn(user, 0)) for user in range(6)]
    assert len({tuple(prompt[: len(prompt) // 2]) for prompt in prompts}) == 6
    assert all(len(prompt) >= 2_000 for prompt in prompts)
