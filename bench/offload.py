"""`ebbtide bench offload`: what tiers are worth to an engine whose conversations outgrow its pool.

Per working set (a multiple of the device pool) four engines answer the same questions in rounds:
`none` recomputes everything, `memory` and `memory+disk` have tiers, and `device`, the ceiling, has
a device pool that holds everything. See `docs/benchmarks.md` for what the numbers mean.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from ebbtide.bench.arguments import check_directory, count
from ebbtide.bench.contestant import (
    BLOCK_SIZE,
    Contestant,
    Design,
    RoundResult,
    StoreProcess,
)
from ebbtide.bench.conversations import Conversations
from ebbtide.bench.offload_report import Comparison, render
from ebbtide.bench.pairs import PAIRS_MIN, rotated
from ebbtide.bench.working_set import WorkingSet, plan
from ebbtide.errors import ConfigError
from ebbtide.machine import available_memory_bytes
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ebbtide.bench.contestant import OpenTiers
    from ebbtide.connectors.reference.model import ModelConfig

MODELS: dict[str, dict[str, Any]] = {
    "bench": {
        "hidden_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 64,
        "ffn_size": 512,
    },
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
NONE = Design("none", caching=False)
MEMORY = Design("memory", memory=True)
MEMORY_AND_DISK = Design("memory+disk", memory=True, disk=True)
CEILING = Design("device", keeps_all=True)
DESIGNS = (NONE, MEMORY, MEMORY_AND_DISK)

FACTORS = (2.0, 4.0, 8.0)
QUICK_FACTORS = (2.0, 4.0)
QUICK_PAIRS = 3
MAX_BATCHED_TOKENS = 512


def _factors(text: str) -> tuple[float, ...]:
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = ()
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of factors such as 2,4,8")
    return factors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument(
        "--factors",
        type=_factors,
        help="working sets, in device pools (default 2,4,8; with --quick 2,4)",
    )
    parser.add_argument("--quick", action="store_true", help="3 pairs: a look, not a result")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="bench", help="how large a model (default bench)"
    )
    parser.add_argument("--turns", type=count, default=2, help="questions per user (default 2)")
    parser.add_argument(
        "--document-tokens", type=count, default=240, help="length of a document (default 240)"
    )
    parser.add_argument(
        "--answer-tokens", type=count, default=8, help="length of an answer (default 8)"
    )
    parser.add_argument(
        "--concurrent", type=count, default=4, help="requests at a time (default 4)"
    )
    parser.add_argument(
        "--threads",
        type=count,
        default=1,
        help="of the tensor library, alike for all designs (default 1)",
    )
    parser.add_argument(
        "--dir", help="keep the disk tiers below this directory (default: a temporary one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of users")


def run(args: argparse.Namespace) -> int:
    """Measure all working sets. 0 when every line is valid, else 1."""
    if args.turns > 4:
        raise ConfigError("No conversation has more than four turns", next_step="Lower --turns.")
    check_directory(args.dir)
    return measure(OffloadBench(args))


def measure(bench: OffloadBench) -> int:
    """Run it and show what it found. 0 when every line is valid, else 1."""
    with tensor_threads(bench.args.threads), settled_heap():
        comparisons = list(bench.run())
    if not bench.args.json:
        render(comparisons)
    return 0 if all(comparison.valid for comparison in comparisons) else 1


class OffloadBench:
    """The options, resolved. `open_tiers` and `designs` are replaced by tests."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        open_tiers: OpenTiers = StoreProcess,
        designs: Sequence[Design] = DESIGNS,
    ) -> None:
        """Raises ConfigError for what this machine has no memory for."""
        from ebbtide.connectors.reference.model import ModelConfig

        self.config = ModelConfig(**MODELS[args.model])
        self.args = args
        self.pairs: int = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
        self.designs = designs
        self._open_tiers = open_tiers
        factors = args.factors or (QUICK_FACTORS if args.quick else FACTORS)
        self.plans = [self._plan(factor) for factor in factors]
        for working_set in self.plans:
            self._check_fits(working_set)

    def run(self) -> Iterator[Comparison]:
        """One comparison per working set; with `--json` its lines are printed as it ends."""
        for working_set in self.plans:
            _say(
                f"working set {format_size(working_set.working_blocks * working_set.record_bytes)}"
                f" = {working_set.working_blocks / working_set.device_blocks:.2f} device pools, "
                f"{working_set.shape.users} users: fill ..."
            )
            comparison = self.compare(working_set)
            if self.args.json:
                for line in comparison.lines():
                    print(line, flush=True)
            yield comparison

    def compare(self, working_set: WorkingSet) -> Comparison:
        """All rounds of one working set: the fill, then the measured ones."""
        with ExitStack() as stack:
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="ebbtide-bench-"))
            disks = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ebbtide-bench-", dir=self.args.dir)
            )
            contestants = [
                stack.enter_context(closing(self._contestant(working_set, design, sockets, disks)))
                for design in (CEILING, *self.designs)
            ]
            results = self._rounds(working_set, contestants)
            troubles = {each.design.name: each.troubles() for each in contestants}
        return Comparison(working_set, self.designs, results, troubles)

    def _rounds(
        self, working_set: WorkingSet, contestants: list[Contestant]
    ) -> dict[str, list[RoundResult]]:
        conversations = Conversations(working_set.shape)
        concurrent = working_set.concurrent
        results: dict[str, list[RoundResult]] = {}
        for contestant in contestants:
            results[contestant.design.name] = [_fill(working_set, contestant, conversations)]
        orders = working_set.orders(self.pairs)
        for number, order in enumerate(orders):
            _say(f"{working_set.name}: round {number + 1} of {len(orders)}")
            questions = working_set.questions(conversations, order)
            for contestant in rotated(contestants, number):
                result = contestant.ask([questions], concurrent)
                results[contestant.design.name].append(result)
        return results

    def _contestant(
        self, working_set: WorkingSet, design: Design, sockets: str, disks: str
    ) -> Contestant:
        settings = None
        if design.memory:
            directory = os.path.abspath(os.path.join(disks, design.name))
            socket = os.path.join(sockets, f"{design.name}.sock")
            settings = working_set.settings(socket, directory if design.disk else None)
        blocks = working_set.ceiling_blocks if design.keeps_all else working_set.device_blocks
        return Contestant(
            design,
            self.config,
            device_blocks=blocks + 1,  # and the null block
            max_batched_tokens=MAX_BATCHED_TOKENS,
            seed=self.args.seed,
            settings=settings,
            open_tiers=self._open_tiers,
        )

    def _plan(self, factor: float) -> WorkingSet:
        config, args = self.config, self.args
        return plan(
            factor,
            turns=args.turns,
            document_tokens=args.document_tokens,
            answer_tokens=args.answer_tokens,
            concurrent=args.concurrent,
            record_bytes=record_bytes(config),
            seed=args.seed,
        )

    def _check_fits(self, working_set: WorkingSet) -> None:
        """Device pools and arenas of all designs are there at the same time."""
        blocks = working_set.ceiling_blocks
        for design in self.designs:
            blocks += working_set.device_blocks
            blocks += working_set.memory_blocks if design.memory else 0
        needed, available = blocks * working_set.record_bytes, available_memory_bytes()
        if needed > available:
            raise ConfigError(
                f"The pools of {working_set.name} take {format_size(needed)}, and "
                f"{format_size(available)} of memory can be had here",
                next_step="Give smaller --factors, shorter documents or a smaller --model.",
            )


@contextmanager
def tensor_threads(count: int) -> Iterator[None]:
    """So many threads of the tensor library, for all designs alike.

    They spin while they wait for each other, so beside a busy store process on few cores a second
    one makes an engine slower and its times vary more.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the collector of cycles away from what exists already.

    A full collection walks every object of the tensor library (0.2 s) and would hit one round or
    another by chance. What the rounds themselves leave behind is collected before each of them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def record_bytes(config: ModelConfig) -> int:
    """Keys and values of one block in all layers."""
    row = config.num_kv_heads * config.head_dim * config.dtype.itemsize
    return 2 * config.num_layers * BLOCK_SIZE * row


def _fill(
    working_set: WorkingSet, contestant: Contestant, conversations: Conversations
) -> RoundResult:
    """Everything once, not measured. Returns how the last turns were served.

    The ceiling comes first: its answers are what the users have heard when they ask again. An
    engine without a cache has nothing to fill and gets the last turns alone.
    """
    last = working_set.shape.turns - 1
    caching, ceiling = contestant.design.caching, contestant.design.keeps_all
    waves = (
        working_set.questions(conversations, turns)
        for turns in working_set.fill()
        if caching or turns[0].turn == last
    )
    answers = conversations.answers if ceiling else None
    result = contestant.ask(waves, working_set.concurrent, answers)
    names = {turn.name for turn in working_set.shape.last_turns()}
    return result._replace(served=[served for served in result.served if served.name in names])


def _say(text: str) -> None:
    print(f"ebbtide bench offload: {text}", file=sys.stderr, flush=True)
