"""A reference engine in a process of its own: prompts in, answers out."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.controls import NEW_TOKENS, TINY
from tests.live.conftest import PATIENCE_S, PROGRAMS

from ebbtide.connectors.reference import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MODEL_FIELDS = [field.name for field in fields(ModelConfig) if field.name != "dtype"]


class Answer(NamedTuple):
    """To one prompt."""

    token_ids: tuple[int, ...]
    sources: dict[str, int]  # tokens, by where their KV came from
    misses: dict[str, int]  # blocks, by reason

    @property
    def restored_tokens(self) -> int:
        return self.sources["memory"] + self.sources["disk"]


class EngineProcess:
    """A process that runs `programs/engine_answers.py`, whose words these arguments are.

    It starts while the caller goes on: `until_ready` waits for it.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        model: ModelConfig = TINY,
        seed: int = 0,
        blocks: int = 64,
        store: str = "private",
        lookup_timeout_s: float = 10.0,
        load_timeout_s: float = 10.0,
        log: Path | None = None,
    ) -> None:
        spec = {
            "settings": settings,
            "model": {name: getattr(model, name) for name in MODEL_FIELDS},
            "seed": seed,
            "blocks": blocks,
            "new_tokens": NEW_TOKENS,
            "store": store,
            "lookup_timeout_s": lookup_timeout_s,
            "load_timeout_s": load_timeout_s,
        }
        program = [sys.executable, "-P", str(PROGRAMS / "engine_answers.py"), json.dumps(spec)]
        with contextlib.ExitStack() as stack:
            self.process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(open(log, "ab")) if log else None,
                text=True,
                bufsize=1,
            )
        self.faults = 0  # of its halves' hooks
        self.store_fd: int | None = None  # of its private store, if this engine started one

    def until_ready(self) -> None:
        """Wait until it takes prompts. Raises EOFError when it has been killed."""
        word, _, pid = self._line().partition(" ")
        assert word == "ready"
        if int(pid):
            self.store_fd = os.pidfd_open(int(pid))

    def send(self, *prompts: Sequence[int]) -> None:
        """Ask without waiting for the answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()

    def ask(self, *prompts: Sequence[int]) -> list[Answer]:
        """The answers to prompts that are asked together. Raises EOFError when it is killed."""
        try:
            self.send(*prompts)
        except BrokenPipeError as error:
            raise EOFError from error
        found = json.loads(self._line())
        self.faults = found["faults"]
        assert prompts or found["drained"]
        return [
            Answer(tuple(one["token_ids"]), one["sources"], one["misses"])
            for one in found["outputs"]
        ]

    def drain(self) -> None:
        """Wait until no copy is under way."""
        self.ask()

    def store_has_ended(self) -> bool:
        """Waits for it. The private store."""
        assert self.store_fd is not None
        return bool(select.select([self.store_fd], [], [], PATIENCE_S)[0])

    def finish(self) -> int:
        """The end of its input; returns the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Kill what is left, whatever its state, and collect it. Idempotent."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self.store_fd is not None:
            if not self.store_has_ended():
                signal.pidfd_send_signal(self.store_fd, signal.SIGKILL)
            os.close(self.store_fd)
            self.store_fd = None

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the engine does not answer"
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise EOFError("the engine has ended")
        return line.strip()
