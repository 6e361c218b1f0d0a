"""One phase of the demo or of the offload benchmark, in a process of its own.

`python -m ebbtide.bench.phase` reads a `PhaseSpec` as JSON from standard input and writes a
`PhaseResult` as JSON to standard output. A new phase process is a new engine: nothing but the disk
tier's directory carries over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from ebbtide.bench.conversations import Conversations, Shape, Turn
from ebbtide.config import load_config
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from ebbtide.connectors.reference.connect import Halves
    from ebbtide.connectors.reference.engine import Engine
    from ebbtide.connectors.reference.sequence import RequestOutput

STORE_EXIT_TIMEOUT_S = 60.0
WARM_UP_TOKENS = 600


class Round(msgspec.Struct, frozen=True):
    """A named series of requests on the phase's engine, `concurrent` of them at a time."""

    name: str
    turns: list[Turn]
    concurrent: int = 1


class PhaseSpec(msgspec.Struct, frozen=True):
    """What a phase process shall do."""

    shape: Shape
    model: dict[str, Any]  # arguments of ModelConfig
    device_blocks: int
    rounds: list[Round]
    settings: dict[str, Any] | None = None  # of the store; None: no cache at all
    answers: dict[str, list[int]] = {}
    seed: int = 0
    max_batched_tokens: int = 512
    measure_rate: bool = False  # before the first turn of each user


class Served(msgspec.Struct, frozen=True):
    """One request as it was served."""

    name: str
    prompt_tokens: int
    ttft_s: float
    sources: dict[str, int]  # prompt tokens by tier, and computed
    token_ids: list[int]
    misses: dict[str, int]  # blocks by reason
    prefill_flops: int = 0  # of the whole prompt
    matmul_flops_per_s: float = 0.0  # of this machine just before it; 0 = not measured


class RoundResult(msgspec.Struct, frozen=True):
    """One round's requests, and what moved meanwhile."""

    name: str
    served: list[Served]
    seconds: float
    bytes_by_edge: dict[str, int]
    demoted: int
    shed: int
    corrupt: int


class PhaseResult(msgspec.Struct, frozen=True):
    """What a phase process reports."""

    rounds: list[RoundResult]
    faults: int = 0


def run_phase(spec: PhaseSpec, *, timeout_s: float = 600.0) -> PhaseResult:
    """Run a phase in a new process. Raises EbbtideError with its last words when it fails."""
    command = [sys.executable, "-P", "-m", "ebbtide.bench.phase"]
    # Spinning threads of the tensor library would fight the store's process for the cores.
    environ = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run(
        command,
        input=msgspec.json.encode(spec),
        env=environ,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise EbbtideError(
            "A phase process failed", exit_code=done.returncode, said=words[-1] if words else ""
        )
    return msgspec.json.decode(done.stdout, type=PhaseResult)


class _Runner:
    """The engine of this process, and perhaps its store."""

    def __init__(self, spec: PhaseSpec) -> None:
        from ebbtide.connectors.process import ensure_store
        from ebbtide.connectors.reference.connect import attach_socket
        from ebbtide.connectors.reference.engine import Engine
        from ebbtide.connectors.reference.model import ModelConfig

        self.spec = spec
        self.config = ModelConfig(**spec.model)
        self.store = ensure_store(spec.settings) if spec.settings else None
        self.engine: Engine = Engine(
            self.config,
            spec.device_blocks,
            max_batched_tokens=spec.max_batched_tokens,
            enable_prefix_caching=spec.settings is not None,
            seed=spec.seed,
        )
        self.halves: Halves | None = None
        if spec.settings:
            layerwise = load_config(spec.settings).config.connector.layerwise
            self.halves = attach_socket(self.engine, spec.settings["socket"], layerwise=layerwise)
        self.conversations = Conversations(spec.shape, dict(spec.answers))

    def warm_up(self) -> None:
        """Let the tensor library start threads and choose kernels before anything is timed."""
        room = (self.spec.device_blocks - 2) * self.engine.block_size
        self.engine.generate([[1] * min(WARM_UP_TOKENS, room)], 2)
        self.engine.drain()  # its blocks ebb as well: not in the first round's time
        self.engine.reset_prefix_cache()

    def run(self, round_: Round) -> RoundResult:
        before = self._moved()
        started = time.monotonic()
        served: list[Served] = []
        for first in range(0, len(round_.turns), round_.concurrent):
            served += self._wave(round_.turns[first : first + round_.concurrent], round_.name)
        seconds = time.monotonic() - started
        self.engine.drain()
        after = self._moved()
        tally = self.halves.scheduler.tally if self.halves else None
        return RoundResult(
            name=round_.name,
            served=served,
            seconds=seconds,
            bytes_by_edge={edge: after[edge] - before.get(edge, 0) for edge in after},
            demoted=tally.demoted if tally else 0,
            shed=tally.shed if tally else 0,
            corrupt=self._corrupt(),
        )

    def _wave(self, turns: list[Turn], round_name: str) -> list[Served]:
        names = {f"{round_name}/{turn.name}": turn for turn in turns}
        from ebbtide.connectors.reference.rate import measure_matmul_rate

        first = self.spec.measure_rate and any(turn.turn == 0 for turn in turns)
        rate = measure_matmul_rate() if first else 0.0
        for name, turn in names.items():
            prompt = self.conversations.prompt(turn)
            self.engine.add_request(name, prompt, self.spec.shape.answer_tokens)
        outputs = {output.request_id: output for output in self.engine.run()}
        for name, turn in names.items():
            self.conversations.answers[turn.name] = list(outputs[name].token_ids)
        return [self._served(turn.name, outputs[name], rate) for name, turn in names.items()]

    def _served(self, name: str, output: RequestOutput, rate: float) -> Served:
        from ebbtide.connectors.reference.rate import matmul_flops

        return Served(
            name=name,
            prompt_tokens=output.prompt_tokens,
            ttft_s=output.ttft_s,
            sources=asdict(output.sources),
            token_ids=list(output.token_ids),
            misses=dict(output.misses or {}),
            prefill_flops=matmul_flops(self.config, output.prompt_tokens),
            matmul_flops_per_s=rate,
        )

    def _moved(self) -> dict[str, int]:
        """Bytes by edge since the phase began."""
        if self.halves is None:
            return {}
        tally, disk = self.halves.scheduler.tally, self._store_stats().get("disk", {})
        return {
            "device_to_memory": tally.bytes_by_edge["device_to_memory"],
            "memory_to_device": tally.bytes_by_edge["memory_to_device"],
            "memory_to_disk": disk.get("write_bytes", 0),
            "disk_to_memory": disk.get("read_bytes", 0),
        }

    def _corrupt(self) -> int:
        stats = self._store_stats()
        return int(stats.get("disk", {}).get("corrupt", 0)) + int(
            stats.get("counts", {}).get("memory_corrupt", 0)
        )

    def _store_stats(self) -> dict[str, Any]:
        from ebbtide.connectors import protocol as wire
        from ebbtide.connectors.client import SocketClient, ask

        if self.spec.settings is None:
            return {}
        client = SocketClient(self.spec.settings["socket"], b"\0" * 16, "tool", arena=False)
        try:
            answer = ask(client, wire.Stats())
        finally:
            client.close()
        return answer.report if isinstance(answer, wire.Report) else {}

    def close(self) -> int:
        """Close the engine, have the store drain. Returns how many hooks faulted."""
        self.engine.close()
        if self.store is not None:
            self.store.terminate()
            self.store.wait(STORE_EXIT_TIMEOUT_S)
        halves = self.halves
        return halves.scheduler.faults.count + halves.worker.faults.count if halves else 0


def main() -> int:
    """The phase process."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=PhaseSpec)
    runner = _Runner(spec)
    try:
        runner.warm_up()
        rounds = [runner.run(round_) for round_ in spec.rounds]
    finally:
        faults = runner.close()
    sys.stdout.buffer.write(msgspec.json.encode(PhaseResult(rounds, faults)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
