"""What a soak looks at, and an engine that works all the while."""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.controls import TINY, Reference, tokens
from tests.live.answering import EngineProcess

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS, LENGTHS = 8, (120, 190, 260)  # those of a number begin alike
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


class SteadyEngine:
    """A reference engine in a process of its own: one prompt after the other, each answer right."""

    def __init__(self, settings: dict[str, Any], log: Path, seed: int) -> None:
        """`settings`: of the store that it uses. `log`: for what it says when it fails."""
        self._settings = settings
        self._log = log
        self._reference = Reference(TINY)
        self._draw = Random(seed)
        self.answers = self.restored = self.kills = 0
        self._start()

    def _start(self) -> None:
        self._asked: list[int] = []
        self._process = EngineProcess(
            self._settings, blocks=BLOCKS, store="required", log=self._log
        )

    def is_ready(self) -> bool:
        """It has said something."""
        return self._process.has_spoken()

    def look(self) -> None:
        """Compare an answer that has come, and ask for the next. Never waits."""
        assert self._process.process.poll() is None, self._log.read_text()
        if not self.is_ready():
            return
        if self._asked:
            (answer,) = self._process.receive()
            assert answer.token_ids == self._reference.answers([self._asked])[0]
            self.answers += 1
            self.restored += answer.restored_tokens
        else:
            self._process.until_ready()
        self._asked = tokens(self._draw.choice(LENGTHS), seed=self._draw.randrange(PROMPTS))
        self._process.send(self._asked)

    def kill(self) -> None:
        """And another one comes."""
        self.close()
        self.kills += 1
        self._start()

    def close(self) -> None:
        self._process.end()
