"""An engine that is killed leaves a store that drains and ends; the next one finds the blocks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.controls import NEW_TOKENS, TINY, Reference, one_thread, tokens
from tests.live.conftest import PATIENCE_S, PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.live

MODEL = {
    name: getattr(TINY, name)
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
}
PROMPTS = [tokens(200 + 16 * number, seed=number) for number in range(8)]


@pytest.fixture(scope="module", autouse=True)
def single() -> Iterator[None]:
    with one_thread():
        yield


class EngineProcess:
    """A process that runs `programs/engine_answers.py`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        spec = {"settings": settings, "model": MODEL, "blocks": 64, "new_tokens": NEW_TOKENS}
        program = [sys.executable, "-P", str(PROGRAMS / "engine_answers.py"), json.dumps(spec)]
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        word, _, pid = self._line().partition(" ")
        assert word == "ready"
        self.store_fd = os.pidfd_open(int(pid))

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        found: dict[str, Any] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the engine does not answer"
        return self.process.stdout.readline().strip()

    def store_has_ended(self) -> bool:
        """Waits for it."""
        return bool(select.select([self.store_fd], [], [], PATIENCE_S)[0])

    def finish(self) -> int:
        """The end of its input; returns the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def collect(self) -> None:
        """Kill what is left."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        if not self.store_has_ended():
            signal.pidfd_send_signal(self.store_fd, signal.SIGKILL)
        os.close(self.store_fd)


def test_a_killed_engines_store_drains_and_the_next_engine_finds_its_blocks(tmp_path: Path) -> None:
    right = [list(answer) for answer in Reference().answers(PROMPTS)]
    settings = {
        "socket": str(tmp_path / "s"),
        "memory": {"capacity": "4MiB"},
        "disk": {"path": str(tmp_path / "disk"), "capacity": "32MiB"},  # written at the drain
    }
    first = EngineProcess(settings)
    try:
        assert [first.ask(prompt)["token_ids"] for prompt in PROMPTS] == right
        assert first.process.stdin is not None
        first.process.stdin.write(json.dumps(PROMPTS[0] + PROMPTS[1]) + "\n")
        first.process.kill()
        assert first.store_has_ended()
    finally:
        first.collect()
    second = EngineProcess(settings)
    try:
        answers = [second.ask(prompt) for prompt in PROMPTS]
        assert [answer["token_ids"] for answer in answers] == right
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer["sources"]["disk"] >= len(prompt) - 32
        assert second.finish() == 0
    finally:
        second.collect()
