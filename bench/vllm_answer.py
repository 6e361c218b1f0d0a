"""What a worker of `ebbtide bench vllm` is started with, is asked, and answers: plain data."""

from __future__ import annotations

import random
from typing import Any, Literal

from msgspec import Struct, field

BLOCK_SIZE = 32
_TOKEN_IDS = range(3, 503)  # every vocabulary has these; 0 to 2 are special


class Prompt(Struct, frozen=True):
    """A prompt by name: it shares no prefix with that of another name."""

    name: str
    tokens: int

    def token_ids(self) -> list[int]:
        """The same in every process."""
        return random.Random(self.name).choices(_TOKEN_IDS, k=self.tokens)

    @property
    def restorable_tokens(self) -> int:
        """Whole blocks without the last token, which is always computed.

        A device hit gives no more. A load may bring a block that ends with the prompt, too.
        """
        return (self.tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class TiersSpec(Struct, frozen=True):
    """What stands behind an engine's device pool.

    `settings`: of ebbtide's store and connector. `memory_bytes`, `disk_path`: of the peer's daemon.
    """

    kind: Literal["none", "ebbtide", "lmcache"] = "none"
    settings: dict[str, Any] = {}
    memory_bytes: int = 0
    disk_path: str | None = None


class WorkerSpec(Struct, frozen=True):
    """One engine."""

    model: str
    dtype: str
    max_model_len: int
    device_blocks: int
    log_path: str
    tiers: TiersSpec = TiersSpec()


class Order(Struct, frozen=True, omit_defaults=True):
    """A line to a worker. `ask`: answer the prompts one after the other, one token each.

    `forget`: drop the device's prefix cache and nothing else.
    """

    do: Literal["ask", "forget", "stop"]
    prompts: list[Prompt] = []


class Answer(Struct):
    """A worker's line. `record_bytes` and `facts` come with the first one.

    `seconds` runs until the last answer is out, `copied_s` until the engine has nothing left to do.
    `hits` are prompt tokens by ebbtide's tier, `moved` bytes by edge, `hooks_us` durations by hook.
    """

    times_s: list[float] = []
    seconds: float = 0.0
    copied_s: float = 0.0
    token_ids: list[list[int]] = []
    cached_tokens: list[int] = []
    hits: dict[str, int] = {}
    misses: dict[str, int] = {}
    moved: dict[str, int] = {}
    stored_blocks: int = 0
    faults: int = 0
    corrupt: int = 0
    engine_cpu_s: float = 0.0
    store_cpu_s: float = 0.0
    hooks_us: dict[str, list[float]] = {}
    record_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
