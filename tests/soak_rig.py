"""What a soak looks at, and an engine that works all the while."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.connectors.reference import ModelConfig
from tests.controls import Reference, tokens
from tests.live.conftest import PATIENCE_S, PROGRAMS
from tests.live.test_engine_restart import MODEL

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS, LENGTHS = 8, (120, 190, 260)  # those of a number begin alike
NEW_TOKENS = 12
BLOCKS = 40


@dataclass
class Sample:
    """What the store's process holds at one moment."""

    at_s: float
    rss_anon_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def take(cls, pid: int, at_s: float) -> Sample:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        rss_anon_bytes = int(fields["RssAnon"].split()[0]) << 10
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(at_s, rss_anon_bytes, descriptors, int(fields["Threads"]))


def slope_mib(samples: list[Sample]) -> float:
    """Least squares: MiB a minute."""
    minutes = np.array([sample.at_s / 60 for sample in samples])
    sizes = np.array([sample.rss_anon_bytes / (1 << 20) for sample in samples])
    return float(np.polyfit(minutes, sizes, 1)[0])


class ReferenceProcess:
    """A reference engine in a process of its own: one prompt after the other, each answer right."""

    def __init__(self, settings: dict[str, Any], log: Path, seed: int) -> None:
        """`settings`: of the store that it uses. `log`: for what it says when it fails."""
        self._settings = settings
        self._log = log
        self._reference = Reference(ModelConfig(**MODEL))
        self._asked: list[int] = []
        self._draw = Random(seed)
        self.answers = self.restored = self.kills = 0
        self._start()

    def _start(self) -> None:
        spec = {
            "settings": self._settings,
            "model": MODEL,
            "blocks": BLOCKS,
            "new_tokens": NEW_TOKENS,
        }
        program = [sys.executable, "-P", str(PROGRAMS / "engine_answers.py"), json.dumps(spec)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )

    def is_ready(self) -> bool:
        """It has said something."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def look(self) -> None:
        """Compare an answer that has come, and ask for the next. Never waits."""
        assert self._process.poll() is None, self._log.read_text()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        if not self.is_ready():
            return
        said = stdout.readline()
        if not said.startswith(b"ready"):
            answer = json.loads(said)
            (wanted,) = self._reference.answers([self._asked])
            assert tuple(answer["token_ids"]) == wanted
            self.answers += 1
            self.restored += answer["sources"]["memory"] + answer["sources"]["disk"]
        self._asked = tokens(self._draw.choice(LENGTHS), seed=self._draw.randrange(PROMPTS))
        stdin.write(json.dumps(self._asked).encode() + b"\n")

    def kill(self) -> None:
        """And another one comes."""
        self.close()
        self.kills += 1
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
