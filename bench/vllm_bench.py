"""`ebbtide bench vllm`: what the connector costs a real vLLM, and what its tiers give back.

Every contestant is a vLLM in a process of its own; they are asked the same prompts in turn. See
`docs/benchmarks.md` for what the numbers mean.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ebbtide.bench import vllm_miss, vllm_ttft
from ebbtide.bench.arguments import check_directory, count
from ebbtide.bench.pairs import PAIRS_MIN, rotated
from ebbtide.bench.vllm_answer import BLOCK_SIZE
from ebbtide.bench.vllm_contestant import (
    MEMORY,
    MEMORY_AND_DISK,
    PEER,
    PEER_AND_DISK,
    PLAIN,
    Contestant,
)
from ebbtide.bench.vllm_model import write_tiny_model
from ebbtide.bench.vllm_report import Findings, render
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ebbtide.bench.vllm_contestant import Design
    from ebbtide.bench.vllm_sizes import Load

T = TypeVar("T")

TINY = "tiny"
DESIGNS = (PLAIN, MEMORY, MEMORY_AND_DISK)
CASES = (vllm_miss.NAME, vllm_ttft.NAME)
LENGTHS = (512, 1024, 2048, 4096)
QUICK_LENGTHS = (512, 2048)
QUICK_PAIRS = 3
MISS_TOKENS = 2048
MISS_PROMPTS = 8


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) <= BLOCK_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of lengths above {BLOCK_SIZE} tokens, such as 512,2048"
        )
    return lengths


def _length(text: str) -> int:
    (length,) = _lengths(text) if "," not in text else (0,)
    if not length:
        raise argparse.ArgumentTypeError(f"{text!r} is no length")
    return length


def _cases(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not names or not set(names) <= set(CASES):
        raise argparse.ArgumentTypeError(f"{text!r} names other cases than {','.join(CASES)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--quick", action="store_true", help="3 pairs: a look, not a result")
    parser.add_argument(
        "--model",
        default=TINY,
        help="directory of a model, or `tiny`: a small Llama with random weights (default)",
    )
    parser.add_argument("--peer", choices=[PEER.name], help="measure this one beside ebbtide")
    parser.add_argument(
        "--cases", type=_cases, default=CASES, help=f"what to measure (default {','.join(CASES)})"
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        help="prompt lengths of ttft (default 512,1024,2048,4096; with --quick 512,2048)",
    )
    parser.add_argument(
        "--miss-tokens",
        type=_length,
        default=MISS_TOKENS,
        help=f"prompt length of miss (default {MISS_TOKENS})",
    )
    parser.add_argument(
        "--miss-prompts",
        type=count,
        default=MISS_PROMPTS,
        help=f"prompts in a round of miss (default {MISS_PROMPTS})",
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


def run(args: argparse.Namespace) -> int:
    """Measure. 0 when every line is valid, else 1."""
    _check(args)
    with tempfile.TemporaryDirectory(prefix="ebbtide-bench-") as scratch:
        findings = list(VllmBench(args, scratch).run())
    if not args.json:
        render(findings)
    return 0 if all(each.valid for each in findings) else 1


def _check(args: argparse.Namespace) -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "This Python has no vLLM",
            next_step="Start `ebbtide bench vllm` with an environment that has it; in a checkout, "
            "`make test-engine` makes one: .venv-vllm/bin/ebbtide bench vllm",
            python=sys.executable,
        )
    if args.peer is not None and find_spec(args.peer) is None:
        raise ConfigError(
            f"This Python has no {args.peer}",
            next_step="Install lmcache==0.5.6 into the environment of vLLM, or leave out --peer.",
        )
    check_directory(args.dir)
    if args.model != TINY and not os.path.isfile(os.path.join(args.model, "config.json")):
        raise ConfigError(
            "This is no directory of a model", next_step="Name one, or `tiny`.", model=args.model
        )


class VllmBench:
    """The options, resolved. `designs` are replaced by tests; the first one has no tiers."""

    def __init__(
        self, args: argparse.Namespace, scratch: str, *, designs: Sequence[Design] = DESIGNS
    ) -> None:
        """`scratch`: an empty directory, for the model, sockets and logs."""
        self.args = args
        self._designs = designs
        self.pairs: int = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
        self.lengths: tuple[int, ...] = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
        self._scratch = scratch
        self.model, self._dtype = os.path.abspath(args.model), "auto"
        if args.model == TINY:
            self.model, self._dtype = os.path.join(scratch, "model"), "float32"
            write_tiny_model(Path(self.model))

    def run(self) -> Iterator[Findings]:
        """What each case found; with `--json` its lines are printed as it ends."""
        for name in self.args.cases:
            findings = self._miss() if name == vllm_miss.NAME else self._ttft()
            if self.args.json:
                for line in findings.lines():
                    print(line, flush=True)
            yield findings

    def _miss(self) -> Findings:
        load = vllm_miss.load(self.args.miss_tokens)
        designs = [*self._designs, *([PEER] if self.args.peer else [])]
        with ExitStack() as stack:
            contestants = self._open(stack, designs, load)
            rounds = vllm_miss.MissRounds(self.args.miss_tokens, self.args.miss_prompts)
            rounds.measure(contestants, self.pairs, in_turn, _say)
            return rounds.findings(contestants)

    def _ttft(self) -> Findings:
        load = vllm_ttft.load(self.lengths, self.pairs)
        designs = [*self._designs, *([PEER, PEER_AND_DISK] if self.args.peer else [])]
        with ExitStack() as stack:
            contestants = self._open(stack, designs, load)
            found = Findings(contestants[0].record_bytes)
            for length in self.lengths:
                rounds = vllm_ttft.LengthRounds(length, load.small_memory_tokens)
                rounds.measure(contestants, self.pairs, in_turn, _say)
                rounds.add_to(found, contestants)
            return found

    def _open(self, stack: ExitStack, designs: Sequence[Design], load: Load) -> list[Contestant]:
        """Start all engines. The first one, without tiers, tells how large a record is."""
        _say("starting " + ", ".join(design.name for design in designs))
        plain = self._start(stack, designs[0], load, 0)
        plain.until_ready()
        load.check_fits(designs, plain.record_bytes)
        others = [self._start(stack, each, load, plain.record_bytes) for each in designs[1:]]
        for contestant in others:
            contestant.until_ready()
        return [plain, *others]

    def _start(self, stack: ExitStack, design: Design, load: Load, record_bytes: int) -> Contestant:
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=self._scratch))
        disks = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ebbtide-bench-", dir=self.args.dir)
        )
        spec = load.spec(
            design,
            record_bytes=record_bytes,
            directory=own,
            disk_path=os.path.join(os.path.abspath(disks), "disk"),
            model=self.model,
            dtype=self._dtype,
        )
        return stack.enter_context(closing(Contestant(design, spec, self.args.threads)))


def in_turn(contestants: Sequence[T], round_number: int) -> list[T]:
    """The order of one round: A B, then B A; with more of them, each also begins in its turn."""
    order = rotated(contestants, round_number // 2)
    return order[::-1] if round_number % 2 else order


def _say(text: str) -> None:
    print(f"ebbtide bench vllm: {text}", file=sys.stderr, flush=True)
