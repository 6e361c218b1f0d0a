"""An engine process: the prompts of one line are answered together, in one line.

Usage: engine_answers.py SPEC, a JSON object: the store's `settings`, the `model`'s shape and its
`seed`, the number of device `blocks` and of `new_tokens`, `lookup_timeout_s`, `load_timeout_s`, and
`store`: "private" (the engine starts it), "required", or "optional" (until one answers, the engine
computes).

It says "ready" and its private store's process id first, 0 when another process started the store.
A line without prompts is answered when no copy is under way. Whoever writes a line waits for its
answer before the next one. It ends when its input does.
"""

from __future__ import annotations

import json
import select
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from ebbtide.connectors.offload.scheduler import SchedulerBounds
from ebbtide.connectors.process import ensure_store
from ebbtide.connectors.reference import Engine, ModelConfig
from ebbtide.connectors.reference.connect import attach_socket

if TYPE_CHECKING:
    from collections.abc import Iterator


def lines(engine: Engine) -> Iterator[str]:
    """The input. While there is none the engine steps on, as an idle one does."""
    while True:
        if not engine.has_pending_work() or select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            yield line
        elif not engine.step() and engine.last_step_tokens == 0:
            time.sleep(0.001)


def main() -> None:
    """Serve until the end of input."""
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    store = ensure_store(spec["settings"]) if spec["store"] == "private" else None
    engine = Engine(ModelConfig(**spec["model"]), spec["blocks"], seed=spec["seed"])
    halves = attach_socket(
        engine,
        spec["settings"]["socket"],
        bounds=SchedulerBounds(lookup_timeout_s=spec["lookup_timeout_s"]),
        load_timeout_s=spec["load_timeout_s"],
        required=spec["store"] != "optional",
    )
    sys.stdout.write(f"ready {store.pid if store else 0}\n")
    sys.stdout.flush()
    for line in lines(engine):
        prompts = json.loads(line)
        outputs = engine.generate(prompts, spec["new_tokens"])
        answer = {
            "drained": not prompts and engine.drain(),
            "faults": halves.scheduler.faults.count + halves.worker.faults.count,
            "outputs": [
                {"token_ids": one.token_ids, "sources": asdict(one.sources), "misses": one.misses}
                for one in outputs
            ],
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    engine.close()  # a private store ends after this process


if __name__ == "__main__":
    main()
