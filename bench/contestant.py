"""One engine of a comparison, with the tiers behind it: asked round by round, idle in between.

All contestants live in one process and take turns, so that they share its threads, its weights'
seed and whatever the machine does at the time. Each has a store process of its own; before another
one is asked, copies have ended and the store has nothing left to write.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ebbtide.bench.measured_store import MeasuredStore
from ebbtide.config import load_config
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ebbtide.connectors.reference.engine import Engine
    from ebbtide.connectors.reference.model import ModelConfig
    from ebbtide.connectors.reference.sequence import RequestOutput

    OpenTiers = Callable[[Engine, dict[str, Any]], "Tiers"]

BLOCK_SIZE = 16
IDLE_SLEEP_S = 0.001  # between steps without a token, as the engine's own loop has it


@dataclass(frozen=True, slots=True)
class Design:
    """What stands behind an engine's device pool."""

    name: str
    memory: bool = False
    disk: bool = False
    caching: bool = True  # of prefixes, on the device
    keeps_all: bool = False  # the device pool holds the whole working set


class Question(NamedTuple):
    """A request: its name, prompt and how many tokens to answer."""

    name: str
    prompt: list[int]
    answer_tokens: int


class Served(NamedTuple):
    """One request as it was served. `sources`: prompt tokens by tier, and computed."""

    name: str
    prompt_tokens: int
    ttft_s: float
    sources: dict[str, int]
    misses: dict[str, int]
    token_ids: tuple[int, ...]


class RoundResult(NamedTuple):
    """One round. `seconds` ends when the last answer is out and all copies have ended.

    `cpu_s` and `moved` count until the store is idle again: CPU seconds of its process, and bytes
    by edge.
    """

    served: list[Served]
    seconds: float
    cpu_s: float
    moved: dict[str, int]


class Tiers(Protocol):
    """What is behind the device, as the benchmark sees it."""

    def cpu_s(self) -> float:
        """CPU seconds that the store's process has used."""
        ...

    def moved(self) -> dict[str, int]:
        """Bytes by edge since the start."""
        ...

    def settle(self) -> None:
        """Wait until the store has nothing left to write. Raises EbbtideError when it never has."""
        ...

    def troubles(self) -> dict[str, int]:
        """What went wrong or was lost since the start: faults of hooks, corrupt records, sheds."""
        ...

    def close(self) -> None:
        """After the engine has closed: end the store and wait for it."""
        ...


class StoreProcess:
    """A private store in its own process, connected to one engine."""

    def __init__(self, engine: Engine, settings: dict[str, Any]) -> None:
        """Raises what `ensure_store` and `attach_socket` raise."""
        from ebbtide.connectors.process import start_store
        from ebbtide.connectors.reference.connect import attach_socket

        socket = str(settings["socket"])
        process = start_store(settings)
        try:
            layerwise = load_config(settings).config.connector.layerwise
            self._halves = attach_socket(engine, socket, layerwise=layerwise)
        except EbbtideError:
            process.terminate()
            process.wait()
            raise
        self._store = MeasuredStore(process, socket)

    def cpu_s(self) -> float:
        return self._store.cpu_s()

    def moved(self) -> dict[str, int]:
        tally = self._halves.scheduler.tally
        return {
            "device_to_memory": tally.bytes_by_edge["device_to_memory"],
            "memory_to_device": tally.bytes_by_edge["memory_to_device"],
            **self._store.disk_moves(),
        }

    def settle(self) -> None:
        self._store.settle()

    def troubles(self) -> dict[str, int]:
        scheduler, worker = self._halves
        return {
            "faults": scheduler.faults.count + worker.faults.count,
            "corrupt": self._store.corrupt(),
            "shed": scheduler.tally.shed,
        }

    def close(self) -> None:
        self._store.close()


class Contestant:
    """An engine, perhaps with tiers. `close` ends both."""

    def __init__(
        self,
        design: Design,
        config: ModelConfig,
        *,
        device_blocks: int,
        max_batched_tokens: int,
        seed: int,
        settings: dict[str, Any] | None,
        open_tiers: OpenTiers,
    ) -> None:
        """`settings` of the store; None: no tiers behind the device."""
        from ebbtide.connectors.reference.engine import Engine

        self.design = design
        self.engine = Engine(
            config,
            device_blocks,
            BLOCK_SIZE,
            max_batched_tokens,
            enable_prefix_caching=design.caching,
            seed=seed,
        )
        self.tiers = open_tiers(self.engine, settings) if settings is not None else None

    def ask(
        self,
        waves: Iterable[Sequence[Question]],
        concurrent: int,
        answers: dict[str, list[int]] | None = None,
    ) -> RoundResult:
        """Ask all questions, `concurrent` of them at any time, in their order.

        A wave is drawn when the one before it has been answered; `answers` has its answers by then.
        Raises EbbtideError when copies do not end or the store does not come to rest.
        """
        tiers, outputs = self.tiers, []
        cpu_s, moved = (tiers.cpu_s(), tiers.moved()) if tiers else (0.0, {})
        gc.collect()  # what others left behind is not for this one to clean up
        started = time.monotonic()
        for questions in waves:
            served = self._serve(deque(questions), concurrent)
            outputs += served
            if answers is not None:
                answers.update((one.request_id, list(one.token_ids)) for one in served)
        if not self.engine.drain():
            raise EbbtideError("An engine's copies do not end", design=self.design.name)
        seconds = time.monotonic() - started
        if tiers:
            tiers.settle()
            after = tiers.moved()
            cpu_s = tiers.cpu_s() - cpu_s
            moved = {edge: size - moved.get(edge, 0) for edge, size in after.items()}
        return RoundResult([_served(output) for output in outputs], seconds, cpu_s, moved)

    def _serve(self, waiting: deque[Question], concurrent: int) -> list[RequestOutput]:
        engine, total = self.engine, len(waiting)
        outputs: list[RequestOutput] = []
        while len(outputs) < total:
            under_way = total - len(waiting) - len(outputs)
            for _ in range(min(concurrent - under_way, len(waiting))):
                engine.add_request(*waiting.popleft())
            outputs += engine.step()
            if engine.last_step_tokens == 0 and engine.has_pending_work():
                time.sleep(IDLE_SLEEP_S)
        return outputs

    def troubles(self) -> dict[str, int]:
        """What went wrong in its tiers."""
        return self.tiers.troubles() if self.tiers is not None else {}

    def close(self) -> None:
        """Close the engine, then its tiers."""
        self.engine.close()
        if self.tiers is not None:
            self.tiers.close()


def _served(output: RequestOutput) -> Served:
    return Served(
        name=output.request_id,
        prompt_tokens=output.prompt_tokens,
        ttft_s=output.ttft_s,
        sources=asdict(output.sources),
        misses={reason: count for reason, count in output.misses.items() if count},
        token_ids=output.token_ids,
    )
