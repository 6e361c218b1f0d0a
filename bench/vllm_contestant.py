"""One engine of `ebbtide bench vllm`, seen from the benchmark: a process on the other end of pipes.

Each engine has a process of its own, because vLLM allows one engine per process. Only one is asked
at a time; the others wait for a line and use no CPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ebbtide.bench.vllm_answer import Answer, Order
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.bench.vllm_answer import Prompt, WorkerSpec

START_TIMEOUT_S = 600.0  # a large model's weights are hashed first
ANSWER_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
LOG_LINES = 5
LINE_BYTES_MAX = 64 << 20


class Design(NamedTuple):
    """What stands behind an engine's device pool. `name` is the one in the results."""

    name: str
    kind: str = "none"
    disk: bool = False

    @property
    def hit_tier(self) -> str:
        """Where a prompt comes from that the device has lost."""
        return "disk" if self.disk else "memory"


PLAIN = Design("plain")
MEMORY = Design("memory", "ebbtide")
MEMORY_AND_DISK = Design("memory+disk", "ebbtide", disk=True)
PEER = Design("lmcache", "lmcache")
PEER_AND_DISK = Design("lmcache+disk", "lmcache", disk=True)
PEER_OF = {MEMORY.name: PEER, MEMORY_AND_DISK.name: PEER_AND_DISK}


def environment(threads: int) -> dict[str, str]:
    """Of every worker: one engine in the process itself, so many threads, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    kept.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else vLLM asks for most of the machine
    return {
        **kept,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",  # by default it logs several lines per request
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
    }


class Contestant:
    """A worker process. `close` ends it, whatever it is doing. One thread."""

    def __init__(self, design: Design, spec: WorkerSpec, threads: int) -> None:
        """Starts the process and does not wait: see `until_ready`."""
        self.design = design
        self.record_bytes = 0
        self.facts: dict[str, Any] = {}
        self._spec = spec
        self._threads = threads
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "ebbtide.bench.vllm_worker"]
        with open(self._spec.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(self._spec).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(self._threads),
                start_new_session=True,  # a Ctrl-C is for the benchmark, which ends its workers
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._busy = True
        self._received = b""

    @property
    def pid(self) -> int:
        """Of the worker."""
        return self._process.pid

    def until_ready(self) -> None:
        """Wait for the engine. Raises EbbtideError with the worker's last words if it fails."""
        first = self._answer(START_TIMEOUT_S)
        self.record_bytes, self.facts = first.record_bytes, first.facts

    def ask(self, prompts: Sequence[Prompt]) -> Answer:
        """Have the prompts answered, one after the other, and all copies ended."""
        self._tell(Order("ask", list(prompts)))
        return self._answer(ANSWER_TIMEOUT_S)

    def forget(self) -> None:
        """Empty the device's prefix cache."""
        self._tell(Order("forget"))
        self._answer(ANSWER_TIMEOUT_S)

    def restart(self) -> None:
        """End engine and tiers and start them again, on the same disk tier."""
        self.close()
        self._start()
        self.until_ready()

    def drop_page_cache(self) -> None:
        """Have its disk tier read from the device the next time, where it does buffered I/O."""
        if self._spec.tiers.disk_path is not None:
            drop_page_cache(Path(self._spec.tiers.disk_path))

    def close(self) -> None:
        """End the worker and what it has started. Idempotent; at most two minutes."""
        if self._process.poll() is None:
            if self._busy:
                self._process.terminate()
            else:
                with contextlib.suppress(EbbtideError):
                    self._tell(Order("stop"))
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its store or daemon notices, and ends by itself
            self._process.wait()
        self._from.close()

    def _tell(self, order: Order) -> None:
        self._busy = True
        try:
            self._to.write(msgspec.json.encode(order) + b"\n")
            self._to.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _answer(self, timeout_s: float) -> Answer:
        answer = msgspec.json.decode(self._line(timeout_s), type=Answer)
        if answer.error:
            raise EbbtideError(
                "A contestant cannot go on", design=self.design.name, said=answer.error
            )
        self._busy = False
        return answer

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        while b"\n" not in self._received and len(self._received) < LINE_BYTES_MAX:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise EbbtideError(
                    "A contestant does not answer", design=self.design.name, waited_s=timeout_s
                )
            chunk = os.read(self._from.fileno(), 1 << 16)
            if not chunk:
                raise self._ended()
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ended(self) -> EbbtideError:
        """The worker is gone: what it said last, because its log is temporary."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        text = Path(self._spec.log_path).read_text(errors="replace")
        return EbbtideError(
            "A contestant's process has ended",
            design=self.design.name,
            exit_code=self._process.returncode,
            said=" | ".join(text.splitlines()[-LOG_LINES:]),
        )


def drop_page_cache(directory: Path) -> None:
    """Have what is below `directory` read from the device the next time."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
