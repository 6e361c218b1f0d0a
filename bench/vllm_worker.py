"""The program of one contestant of `ebbtide bench vllm`: an engine, driven over pipes.

A line of JSON in is an `Order`, a line out an `Answer`; the first line out says that the engine is
ready. What vLLM prints goes to standard error. Ends with the input, on SIGTERM, or when told to.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ebbtide.bench.vllm_answer import Answer, Order, WorkerSpec
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from ebbtide.bench.vllm_engine import Engine

EXIT_FAILED = 1


def main() -> int:
    """`argv[1]` is the `WorkerSpec`. 0 when told to stop, 1 after an error that was reported."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever prints from now on does not disturb the lines
        signal.signal(signal.SIGTERM, _end)
        spec = msgspec.json.decode(sys.argv[1].encode(), type=WorkerSpec)
        try:
            _work(spec, out)
        except EbbtideError as error:
            _say(out, Answer(error=str(error)))
            return EXIT_FAILED
    return 0


def _work(spec: WorkerSpec, out: BinaryIO) -> None:
    from ebbtide.bench.vllm_tiers import open_tiers

    if spec.tiers.kind == "lmcache":
        from ebbtide.bench.vllm_peer import prepare_imports

        prepare_imports()
    import vllm  # noqa: F401  # before the store starts: it waits for its engine for a minute only

    from ebbtide.bench.vllm_engine import Engine

    with ExitStack() as stack:
        tiers = stack.enter_context(closing(open_tiers(spec)))
        engine = stack.enter_context(closing(Engine(spec, tiers)))
        _say(out, engine.described())
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            if order.do == "stop":
                return
            _say(out, _answer(engine, order))


def _answer(engine: Engine, order: Order) -> Answer:
    if order.do == "forget":
        engine.forget()
        return Answer()
    return engine.ask(order.prompts)


def _say(out: BinaryIO, answer: Answer) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


def _end(*_: Any) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
