"""An engine process with a private store: one prompt a line in, one answer a line out.

Usage: engine_answers.py SPEC, a JSON object with the store's `settings`, the `model`'s shape, the
number of device `blocks` and of `new_tokens`. It says "ready" and its store's process id first, 0
when another process started the store. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from ebbtide.connectors.process import ensure_store
from ebbtide.connectors.reference import Engine, ModelConfig
from ebbtide.connectors.reference.connect import attach_socket


def main() -> None:
    """Serve until the end of input."""
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    store = ensure_store(spec["settings"])
    engine = Engine(ModelConfig(**spec["model"]), spec["blocks"])
    attach_socket(engine, spec["settings"]["socket"])
    sys.stdout.write(f"ready {store.pid if store else 0}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        (output,) = engine.generate([json.loads(line)], spec["new_tokens"])
        engine.drain()  # what an idle engine's steps do: its last blocks are committed
        answer = {"token_ids": output.token_ids, "sources": asdict(output.sources)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    engine.close()  # a private store ends after this process


if __name__ == "__main__":
    main()
