"""`ebbtide demo`: several users talk about long documents to an engine whose device pool is too
small.

Four phases: *no cache* gives the reference answers; *cold* fills the tiers; *warm* asks everything
again; *restart* asks the last turns again in new processes, where only the disk tier holds
anything. Every answer of every phase must be the reference's, token by token.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.bench.conversations import QUESTIONS, Conversations, Shape
from ebbtide.bench.phase import PhaseResult, PhaseSpec, Round, RoundResult, run_phase
from ebbtide.bench.report import PhaseReport, render, summarise
from ebbtide.config import check_fits, load_config
from ebbtide.errors import ConfigError
from ebbtide.machine import describe_machine
from ebbtide.sizes import exact_size

if TYPE_CHECKING:
    import argparse

BLOCK_SIZE = 16
MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "tiny": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 128,
    },
}
RECORD_BYTES = {"demo": 256 << 10, "tiny": 8 << 10}
DEVICE_SHARE = 3.2  # the working set is this many times the device pool
MEMORY_SHARE = 1.55  # and this many times the memory tier
DISK_SHARE = 2.5  # of the working set
TURNS_MAX = len(QUESTIONS)
COUNT_MAX = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--users", type=int, default=6, help="how many users talk (default 6)")
    parser.add_argument("--turns", type=int, default=3, help="questions per user (default 3)")
    parser.add_argument(
        "--document-tokens", type=int, default=1_950, help="length of a document (default 1950)"
    )
    parser.add_argument(
        "--answer-tokens", type=int, default=16, help="length of an answer (default 16)"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="demo", help="how large a model")
    parser.add_argument("--dir", help="keep the disk tier here (default: a temporary directory)")
    parser.add_argument("--disk", help="capacity of the disk tier (default: 2.5 working sets)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's weights")


def run(args: argparse.Namespace) -> int:
    """Run all phases. 0 when every answer is identical and every tier was exercised, else 1."""
    _check(args)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ebbtide-demo-") as scratch:
        demo = Demo(args, Path(scratch))
        reports = demo.run()
    summary = summarise(
        reports,
        faults=demo.faults,
    )
    summary["seconds"] = round(time.monotonic() - started, 1)
    summary["settings"] = demo.described()
    summary["machine"] = describe_machine()
    render(reports, summary)
    if args.json:
        print(json.dumps(summary))
    return 0 if summary["valid"] else 1


def _check(args: argparse.Namespace) -> None:
    for name in ("users", "turns", "document_tokens", "answer_tokens"):
        value, most = getattr(args, name), TURNS_MAX if name == "turns" else COUNT_MAX
        if not 1 <= value <= most:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {value}", next_step=f"Choose 1 to {most:,}")


class Demo:
    """The plan of the phases, and what they gave."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        group = max(1, args.users // 2)
        self.shape = Shape(args.users, args.turns, args.document_tokens, args.answer_tokens, group)
        self.model = MODELS[args.model]
        self.record_bytes = RECORD_BYTES[args.model]
        tokens = self.shape.prompt_tokens_max
        self.working_blocks = Conversations(self.shape).working_set_blocks(BLOCK_SIZE)
        one_request = -(-(tokens + args.answer_tokens) // BLOCK_SIZE)
        self.device_blocks = max(int(self.working_blocks / DEVICE_SHARE), one_request + 4)
        memory_blocks = int(self.working_blocks / MEMORY_SHARE)
        disk = args.disk or exact_size(
            max(int(self.working_blocks * DISK_SHARE) * self.record_bytes, 64 << 20)
        )
        self.settings: dict[str, Any] = {
            "socket": str(scratch / "store.sock"),
            "memory": {"capacity": exact_size(memory_blocks * self.record_bytes)},
            "disk": {"path": str(Path(args.dir or scratch / "tier").absolute()), "capacity": disk},
        }
        check_fits(load_config(self.settings, environ={}).config)
        self.seed = args.seed
        self.faults = 0

    def described(self) -> dict[str, Any]:
        """The sizes of this run."""
        return {
            "users": self.shape.users,
            "turns": self.shape.turns,
            "working_set_bytes": self.working_blocks * self.record_bytes,
            "device_bytes": self.device_blocks * self.record_bytes,
            "memory": self.settings["memory"]["capacity"],
            "disk": self.settings["disk"]["capacity"],
            "record_bytes": self.record_bytes,
        }

    def run(self) -> list[PhaseReport]:
        """All phases, in order."""
        everything = self.shape.order()
        _say("no cache: the reference answers ...")
        reference = self._phase([Round("no cache", everything)], cached=False)
        answers = {s.name: s.token_ids for s in reference.rounds[0].served}
        _say("cold, then warm: one engine, one store ...")
        cached = self._phase([Round("cold", everything), Round("warm", everything)], cached=True)
        _say("restart: new processes, only the disk tier remembers ...")
        restart = self._phase(
            [Round("restart", self.shape.last_turns())], cached=True, answers=answers
        )
        self.faults = cached.faults + restart.faults
        rounds: list[RoundResult] = [*reference.rounds, *cached.rounds, *restart.rounds]
        return [PhaseReport(round_, answers) for round_ in rounds]

    def _phase(
        self,
        rounds: list[Round],
        *,
        cached: bool,
        answers: dict[str, list[int]] | None = None,
    ) -> PhaseResult:
        return run_phase(
            PhaseSpec(
                shape=self.shape,
                model=self.model,
                device_blocks=self.device_blocks,
                rounds=rounds,
                settings=self.settings if cached else None,
                answers=answers or {},
                seed=self.seed,
                measure_rate=not cached,
            )
        )


def _say(text: str) -> None:
    print(f"ebbtide demo: {text}", file=sys.stderr, flush=True)
