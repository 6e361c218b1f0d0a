"""`ebbtide bench daemon`: what one store's process costs its clients, and whether they share it.

A real store behind a real socket, and client processes that copy in and out of its arena. The
ceilings are taken in the same rounds by the same processes: a raw Unix socket with the same bytes
each way, and the same copies without anybody to ask. Of two designs, one lets the clients take and
check digests, as `ebbtide.Client` does; the other has the store do it, as the engines' connectors
do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import json as msgspec_json

from ebbtide.bench.arguments import positive_seconds
from ebbtide.bench.daemon_worker import KEPT, Answer, Order, Start
from ebbtide.bench.measured_store import MeasuredStore
from ebbtide.bench.pairs import INVALID, PAIRS_MIN, Case, measured_case, rotated
from ebbtide.connectors.process import start_store
from ebbtide.errors import EbbtideError
from ebbtide.sizes import exact_size, format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

BENCH, DESIGN, BY_STORE = "daemon", "ebbtide", "digests_by_store"
MIB, MB, GB = 1 << 20, 1e6, 1e9
RECORD_SIZES = (MIB, 2 * MIB)  # the latter: 16 tokens of a model of 8 billion parameters
SMALL_RECORD_BYTES = 4096  # of those that are only looked up
CLIENTS = 3
KEYS = (64, 2048, 8192)
LOOKUPS = {64: 400, 2048: 200, 8192: 100}  # in a round
MEMORY_RECORDS = 1536  # so that what a slow client loads next is not evicted by the others
LOOKUP_MEMORY_BYTES = 64 * MIB
SECONDS, QUICK_SECONDS = 30.0, 3.0  # of loading and storing, all rounds together
BESIDE_SHARE = 2  # single loads beside a flood: half as long
QUICK_PAIRS = 3
MISSING_MAX = 0.01  # of the records that were asked for; of each client
WORKER_GRACE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--quick", action="store_true", help="3 pairs: a look, not a result")
    parser.add_argument(
        "--seconds", type=positive_seconds, help="of loading and storing in all (default 30)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure. 0 when every line is valid, else 1."""
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS_MIN)
    total_s = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    valid = True
    for case in _cases(pairs, total_s / pairs):
        print(case.line() if args.json else _row(case), flush=True)
        valid = valid and case.verdict != INVALID
    return 0 if valid else 1


def _cases(pairs: int, seconds: float) -> Iterator[Case]:
    yield from _lookups(pairs)
    for record_bytes in RECORD_SIZES:
        with House(MEMORY_RECORDS * record_bytes, record_bytes, CLIENTS) as house:
            house.all(Order("fill", count=2 * KEPT))
            yield from _mixed(house, pairs, seconds)
            yield from _beside(house, pairs, seconds / BESIDE_SHARE)


class House:
    """A store, the raw socket's process and some workers. A context manager: it ends them all."""

    def __init__(self, memory_bytes: int, record_bytes: int, workers: int) -> None:
        self.record_bytes = record_bytes
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ebbtide-bench-"))
            socket, raw_socket = (os.path.join(scratch, name) for name in ("store", "raw"))
            settings = {"socket": socket, "memory": {"capacity": exact_size(memory_bytes)}}
            log = os.path.join(scratch, "log")
            self.store = MeasuredStore(start_store(settings, private=False, log_path=log), socket)
            stack.callback(self.store.close)
            raw = Process("ebbtide.bench.daemon_raw", raw_socket)
            stack.callback(raw.close)
            self.workers = []
            for number in range(workers):
                start = Start(socket, raw_socket, number, record_bytes)
                worker = Process("ebbtide.bench.daemon_worker", msgspec_json.encode(start).decode())
                stack.callback(worker.close)
                self.workers.append(worker)
            self._stack = stack.pop_all()

    def __enter__(self) -> House:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def all(self, order: Order) -> list[Answer]:
        """All workers at the same time."""
        for worker in self.workers:
            worker.send(order)
        return [worker.answer() for worker in self.workers]


class Process:
    """A process of the benchmark that says `ready`."""

    def __init__(self, module: str, argument: str) -> None:
        command = [sys.executable, "-m", module, argument]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._line() != b"ready\n":
            self.close()
            raise EbbtideError("A process of the benchmark did not start", module=module)

    def send(self, order: Order) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec_json.encode(order) + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        """Wait until it is done."""
        line = self._line()
        if not line:
            raise EbbtideError("A worker of the benchmark failed; its error is above")
        return msgspec_json.decode(line, type=Answer)

    def do(self, order: Order) -> Answer:
        """Both."""
        self.send(order)
        return self.answer()

    def close(self) -> None:
        """End it and wait."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.terminate()
        try:
            self._process.wait(WORKER_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


# -- lookups --------------------------------------------------------------------------------------


def _lookups(pairs: int) -> list[Case]:
    found: dict[int, list[Answer]] = {keys: [] for keys in KEYS}
    ceilings: dict[int, list[Answer]] = {keys: [] for keys in KEYS}
    with House(LOOKUP_MEMORY_BYTES, SMALL_RECORD_BYTES, 1) as house:
        (worker,) = house.workers
        worker.do(Order("fill", count=max(KEYS)))
        for number in range(pairs):
            _say(f"lookups, {number + 1} of {pairs}")
            for keys in KEYS:
                orders = [(found, "lookups"), (ceilings, "raw_lookups")]
                for into, verb in orders[:: 1 if number % 2 else -1]:
                    into[keys].append(worker.do(Order(verb, keys=keys, count=LOOKUPS[keys])))
    cases = []
    for keys in KEYS:
        for name, quantile in (("p50", 0.5), ("p99", 0.99)):
            cases.append(
                _case(
                    f"lookup_{name}.{keys}",
                    SMALL_RECORD_BYTES,
                    "ms",
                    [_quantile(answer, quantile) for answer in found[keys]],
                    [_quantile(answer, quantile) for answer in ceilings[keys]],
                    higher_is_better=False,
                    valid=all(answer.loaded == keys * LOOKUPS[keys] for answer in found[keys]),
                )
            )
    return cases


# -- clients beside each other --------------------------------------------------------------------


def _mixed(house: House, pairs: int, seconds: float) -> list[Case]:
    orders = {
        DESIGN: Order("mixed", seconds),
        BY_STORE: Order("mixed", seconds, digests_by_store=True),
        "raw": Order("raw_mixed", seconds),
        "raw_verified": Order("raw_verified", seconds),
    }
    answers_of: dict[str, list[list[Answer]]] = {design: [] for design in orders}
    cpu_s = dict.fromkeys(orders, 0.0)
    for number in range(pairs):
        _say(f"{CLIENTS} clients load and store, {number + 1} of {pairs}")
        for design in rotated(list(orders), number):
            before = house.store.cpu_s()
            answers_of[design].append(house.all(orders[design]))
            cpu_s[design] += house.store.cpu_s() - before
    ceilings = [_rates(answers, house.record_bytes) for answers in answers_of.pop("raw")]
    cases = []
    for design, rounds in answers_of.items():
        rates = [_rates(answers, house.record_bytes) for answers in rounds]
        is_ours = design != "raw_verified"
        valid = not is_ours or all(_is_right(answer) for answers in rounds for answer in answers)
        records = sum(answer.loaded + answer.stored for one in rounds for answer in one)
        cpu_s_per_gb = cpu_s[design] / (records * house.record_bytes / GB) if records else None
        cases.append(
            _case(
                f"load_and_store.{CLIENTS}_clients",
                house.record_bytes,
                "MB/s",
                list(map(sum, rates)),
                list(map(sum, ceilings)),
                higher_is_better=True,
                valid=valid,
                cpu_s_per_gb=cpu_s_per_gb if is_ours else None,
                design=design,
            )
        )
        if is_ours:
            cases.append(
                _case(
                    f"jain_index.{CLIENTS}_clients",
                    house.record_bytes,
                    "",
                    list(map(_jain, rates)),
                    [1.0] * pairs,
                    higher_is_better=True,
                    valid=valid,
                    design=design,
                )
            )
    return cases


def _beside(house: House, pairs: int, seconds: float) -> list[Case]:
    """The raw socket and the raw copy have the same flood beside them."""
    reader, flooder = house.workers[:2]
    orders = {
        DESIGN: Order("loads", seconds),
        BY_STORE: Order("loads", seconds, digests_by_store=True),
        "raw": Order("raw_loads", seconds),
    }
    answers_of: dict[str, list[Answer]] = {design: [] for design in orders}
    stored = []
    for number in range(pairs):
        _say(f"loads beside a flood of stores, {number + 1} of {pairs}")
        for design in rotated(list(orders), number):
            order = orders[design]
            reader.do(Order("fill", count=KEPT))  # what the last flood has evicted
            flooder.send(Order("flood", seconds, digests_by_store=order.digests_by_store))
            answers_of[design].append(reader.do(order))
            stored.append(flooder.answer().stored)
    ceilings = answers_of.pop("raw")
    return [
        _case(
            "load_beside_stores_p99",
            house.record_bytes,
            "ms",
            [_quantile(answer, 0.99) for answer in answers],
            [_quantile(answer, 0.99) for answer in ceilings],
            higher_is_better=False,
            valid=all(_came(answer) for answer in answers) and all(stored),
            design=design,
        )
        for design, answers in answers_of.items()
    ]


# -- numbers --------------------------------------------------------------------------------------


def _is_right(answer: Answer) -> bool:
    return bool(answer.stored) and _came(answer)


def _came(answer: Answer) -> bool:
    """Whether what was loaded was right, and nearly all of it there."""
    few = answer.missing <= MISSING_MAX * (answer.loaded + answer.missing)
    right = bool(answer.loaded) and not answer.wrong and few
    if not right:
        _say(
            f"{answer.loaded} records were loaded, {answer.wrong} were wrong,"
            f" {answer.missing} missing"
        )
    return right


def _rates(answers: Sequence[Answer], record_bytes: int) -> list[float]:
    """MB/s of each client, both ways."""
    return [(one.loaded + one.stored) * record_bytes / one.seconds / MB for one in answers]


def _jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 when all have the same, 1/n when one has all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def _quantile(answer: Answer, quantile: float) -> float:
    """By nearest rank."""
    ordered = sorted(answer.times_ms)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def _case(
    name: str,
    record_bytes: int,
    unit: str,
    values: Sequence[float],
    ceilings: Sequence[float],
    *,
    higher_is_better: bool,
    valid: bool,
    cpu_s_per_gb: float | None = None,
    design: str = DESIGN,
) -> Case:
    positive = all(value > 0 for value in (*values, *ceilings))
    return measured_case(
        bench=BENCH,
        case=name,
        design=design,
        record_bytes=record_bytes,
        unit=unit,
        values=values if positive else [1.0],
        ceilings=ceilings if positive else [1.0],
        higher_is_better=higher_is_better,
        cpu_s_per_gb=cpu_s_per_gb,
        exercised=positive,
        valid=valid and positive,
    )


def _row(case: Case) -> str:
    cpu = "" if case.cpu_s_per_gb is None else f"  {case.cpu_s_per_gb:.2f} s/GB"
    return (
        f"{case.case:<28} {case.design:<16} {format_size(case.record_bytes):>6}"
        f" {case.value:>9.4g} {case.unit:<4} raw {case.ceiling:>9.4g}"
        f"  {case.ratio:.2f} [{case.ratio_low:.2f}, {case.ratio_high:.2f}]{cpu}  {case.verdict}"
    )


def _say(text: str) -> None:
    print(f"ebbtide bench daemon: {text}", file=sys.stderr, flush=True)
