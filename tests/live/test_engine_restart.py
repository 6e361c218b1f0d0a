"""An engine that is killed leaves a store that drains and ends; the next one finds the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.controls import Reference, answers, tokens
from tests.live.answering import EngineProcess

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("single_thread")]

PROMPTS = [tokens(200 + 16 * number, seed=number) for number in range(8)]


def test_a_killed_engines_store_drains_and_the_next_engine_finds_its_blocks(tmp_path: Path) -> None:
    right = Reference().answers(PROMPTS)
    settings = {
        "socket": str(tmp_path / "s"),
        "memory": {"capacity": "4MiB"},
        "disk": {"path": str(tmp_path / "disk"), "capacity": "32MiB"},  # written at the drain
    }
    first = EngineProcess(settings)
    try:
        first.until_ready()
        assert answers(first.ask(prompt)[0] for prompt in PROMPTS) == right
        first.drain()
        first.send(PROMPTS[0] + PROMPTS[1])
        first.process.kill()
        assert first.store_has_ended()
    finally:
        first.end()
    second = EngineProcess(settings)
    try:
        second.until_ready()
        found = [second.ask(prompt)[0] for prompt in PROMPTS]
        assert answers(found) == right
        for prompt, answer in zip(PROMPTS, found, strict=True):
            assert answer.sources["disk"] >= len(prompt) - 32
        assert second.finish() == 0
    finally:
        second.end()
