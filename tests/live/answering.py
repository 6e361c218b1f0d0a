"""A reference engine in a process of its own, and somebody who asks it all the time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.controls import NEW_TOKENS, TINY, answers
from tests.live.conftest import PROGRAMS

from ebbtide.connectors.reference import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from random import Random

MODEL_FIELDS = [field.name for field in fields(ModelConfig) if field.name != "dtype"]
HANG_S = 100.0  # an engine that starts on a busy machine takes half a minute
FAVOURITES = 6  # texts that are asked for as often as all together


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

    def has_spoken(self) -> bool:
        """It is ready, or has answered, and nobody has looked yet. Never waits."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def ask(self, *prompts: Sequence[int]) -> list[Answer]:
        """The answers to prompts that are asked together. Raises EOFError when it is killed."""
        try:
            self.send(*prompts)
        except BrokenPipeError as error:
            raise EOFError from error
        return self.receive()

    def receive(self) -> list[Answer]:
        """The answers to what was sent. Raises EOFError when it is killed."""
        found = json.loads(self._line())
        self.faults = found["faults"]
        assert found["outputs"] or found["drained"]
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
        return bool(select.select([self.store_fd], [], [], HANG_S)[0])

    def finish(self) -> int:
        """The end of its input; returns the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(HANG_S)

    def end(self) -> None:
        """Kill what is left, whatever its state, and collect it. Idempotent."""
        self.process.kill()
        self.process.wait(HANG_S)
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
        ready, _, _ = select.select([self.process.stdout], [], [], HANG_S)
        assert ready, "the engine does not answer"
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise EOFError("the engine has ended")
        return line.strip()


class Asker:
    """Asks one engine all the time, and compares every answer with the one of no cache.

    `serve` runs in a thread of its own; the rest is for the test's thread. An engine that was
    killed is started again; one that ends by itself fails `serve`.
    """

    def __init__(
        self,
        start: Callable[[], EngineProcess],
        prompts: Sequence[list[int]],
        right: Sequence[tuple[int, ...]],
        draw: Random,
    ) -> None:
        self.requests = 0
        self.restored_tokens = 0
        self.misses: Counter[str] = Counter()  # blocks, by reason
        self.longest_s = 0.0  # until a line was answered, but for engines that were stopped
        self.engine = start()
        self._start = start
        self._prompts, self._right, self._draw = prompts, right, draw
        self._killed: EngineProcess | None = None
        self._stopped = False
        self._up, self._go = threading.Event(), threading.Event()
        self._resting, self._ended = threading.Event(), threading.Event()
        self._go.set()

    def serve(self) -> None:
        """Until `leave`."""
        while not self._ended.is_set():
            try:
                self._serve_one_life()
            except EOFError:
                self._up.clear()
                if self.engine is not self._killed:
                    code = self.engine.process.wait(HANG_S)
                    raise AssertionError(f"an engine ended by itself, code {code}") from None
                self.engine.end()
                self.engine = self._start()

    @property
    def is_up(self) -> bool:
        """Its engine takes prompts."""
        return self._up.is_set()

    def kill(self) -> None:
        """Kill its engine, which is up."""
        assert self.engine.process.poll() is None
        self._killed = self.engine
        self._up.clear()
        self.engine.process.kill()

    def stop(self) -> None:
        """Stop its engine where it is."""
        self._stopped = True
        self.engine.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `stop`."""
        self.engine.process.send_signal(signal.SIGCONT)

    def rest(self) -> None:
        """Ask no more, from the next answer on."""
        self._go.clear()

    @property
    def is_at_rest(self) -> bool:
        """The engine has nothing under way, and nobody asks it."""
        return self._resting.is_set()

    def resume(self) -> None:
        """Undo `rest`."""
        self._resting.clear()
        self._go.set()

    def leave(self) -> None:
        """Let `serve` end."""
        self._ended.set()
        self._go.set()

    def _serve_one_life(self) -> None:
        self.engine.until_ready()
        self._up.set()
        while not self._ended.is_set():
            if self._go.is_set():
                self._ask()
            else:
                self.engine.drain()
                self._resting.set()
                self._go.wait()

    def _ask(self) -> None:
        texts = self._prompts if self._draw.random() < 0.5 else self._prompts[:FAVOURITES]
        chosen = [self._draw.randrange(len(texts)) for _ in range(self._draw.randint(1, 3))]
        asked = time.monotonic()
        found = self.engine.ask(*(texts[number] for number in chosen))
        if not self._stopped:
            self.longest_s = max(self.longest_s, time.monotonic() - asked)
        self._stopped = False
        assert answers(found) == [self._right[number] for number in chosen], "a wrong token"
        assert self.engine.faults == 0
        self.requests += len(found)
        for answer in found:
            self.restored_tokens += answer.restored_tokens
            self.misses.update(answer.misses)
