"""Engines that are killed while they hold slots of a shared store, again and again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import DEFAULT_FLAGS, Engine
from tests.engine.prompts import prompt, tokens_of
from tests.engine.servers import END_S, SharedStore, eventually, shared_memory_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

KILLS = int(os.environ.get("EBBTIDE_TEST_ENGINE_KILLS", "1"))
USERS = [prompt(seed) for seed in range(4)]
CATCH_S = 60.0
STEP_S = 0.002

# An engine in one process, so that one signal ends all of it: asks without end.
PROGRAM = """
import json, random, sys
from vllm import LLM, SamplingParams
spec = json.load(sys.stdin)
llm = LLM(**spec["flags"])
draw = random.Random(spec["seed"])
users = [{"prompt_token_ids": tokens} for tokens in spec["users"]]
few = SamplingParams(max_tokens=4, temperature=0)
llm.generate(users, few, use_tqdm=False)
print("ready", flush=True)
while True:
    news = {"prompt_token_ids": [draw.randrange(3, 512) for _ in range(1000)]}
    llm.generate([*draw.sample(users, 2), news], few, use_tqdm=False)
"""


class Victim:
    """One such engine."""

    def __init__(self, flags: dict[str, object], seed: int, log: Path) -> None:
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
            )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(json.dumps({"flags": flags, "users": USERS, "seed": seed}).encode())

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        said = iter(self.process.stdout.readline, b"")
        assert b"ready\n" in said, "the engine did not start"

    def stop_while_it_holds(self, store: SharedStore) -> int:
        """SIGSTOP, at a moment when it has slots reserved or loaded. Returns how much."""
        deadline = time.monotonic() + CATCH_S
        while True:
            assert time.monotonic() < deadline, "the engine never holds a slot"
            self.process.send_signal(signal.SIGSTOP)
            held = store.held()
            if held:
                return held
            self.process.send_signal(signal.SIGCONT)
            time.sleep(STEP_S)

    def processes(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def end(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.timeout(150 + 60 * KILLS)
@pytest.mark.long
def test_p72_killed_engines_leave_no_slot_held_and_no_file_in_shared_memory(
    models: Models, plain: Plain, tiers: Tiers, tmp_path: Path
) -> None:
    expected = plain(USERS)
    draw = random.Random(0)
    with SharedStore(tmp_path, memory="32MiB", disk="64MiB") as store:
        transfer = tiers(disk=False, socket=store.socket)
        transfer["kv_connector_extra_config"]["limits"] = {"lookup_timeout": "2s"}
        flags = {**DEFAULT_FLAGS, "model": str(models["llama"]), "num_gpu_blocks_override": 160}
        for kill in range(KILLS):
            victim = Victim({**flags, "kv_transfer_config": transfer}, kill, tmp_path / "log")
            try:
                victim.until_ready()
                time.sleep(draw.uniform(0.0, 2.0))
                held = victim.stop_while_it_holds(store)
                files = shared_memory_of(victim.processes())
            finally:
                victim.end()
            assert held > 0
            eventually(lambda: store.held() == 0, END_S, f"kill {kill}: {store.stats()}")
            left = [name for name in files if os.path.exists(name)]
            assert not left, f"kill {kill} left {left}"
        with Engine(models["llama"], transfer=transfer) as engine:
            answers = engine.one_by_one(USERS)
            counters = engine.counters()
        eventually(lambda: store.held() == 0, END_S, f"after all: {store.stats()}")
    assert tokens_of(answers) == tokens_of(expected)
    assert counters.restored_tokens > 0, counters.by("ebbtide_miss_blocks_total", "reason")
    assert_counters_add_up(counters, requests=len(USERS))
