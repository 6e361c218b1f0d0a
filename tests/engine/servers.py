"""Processes beside the test's own: OpenAI servers of vLLM, and the stores that engines share."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
from tests.engine import environment
from tests.engine.counters import Counters
from tests.engine.prompts import Answer, Prompt, prompt

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.process import start_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOST = "127.0.0.1"
MODEL = "tiny"
START_S = 300.0  # three to four processes that import vLLM, on a machine that does other things
END_S = 40.0
ANSWER_S = 60.0
POLL_S = 0.05
# The same engine as `in_process.DEFAULT_FLAGS`, on the command line.
FLAGS = {
    "--dtype": "float32",
    "--seed": "0",
    "--block-size": "32",
    "--max-model-len": "2304",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "2048",
    "--num-gpu-blocks-override": "80",
    "--prefix-caching-hash-algo": "sha256_cbor",
    "--shutdown-timeout": "15",  # with none, vLLM kills its worker at the end
}
SWITCHES = ("--enforce-eager", "--enable-prompt-tokens-details")
# Options of `ebbtide config vllm`: on a busy machine, what is slow is still waited for, so that
# tests can say exactly what comes back.
PATIENT = (
    *("--set", "connector.always_load=true", "--set", "limits.lookup_timeout=2s"),
    *("--set", "connector.load_timeout=40s"),
)
_NOT_READY = {"namespace_pending", "timeout", "unknown"}  # reasons of misses at an engine's start
_probe_seeds = itertools.count(2 * 10**9)


def eventually(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait until something is true; say `what` when it does not come to be."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)


def transfer_config(*options: str) -> str:
    """What `ebbtide config vllm` prints: the value of `--kv-transfer-config`."""
    command = [sys.executable, "-P", "-m", "ebbtide", "config", "vllm", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=ANSWER_S)
    return done.stdout.strip()


class Server:
    """One OpenAI server: API, engine core and worker, each a process. A context manager.

    The constructor does not wait, so that several can start side by side; `until_ready` does.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        transfer: str | None,
        flags: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """`transfer`: JSON of `--kv-transfer-config`. `directory`: for its log and its caches.
        `variables`: of the environment.
        """
        directory.mkdir(exist_ok=True)
        self.port = _free_port()
        self.log_path = directory / "server.log"
        self._transfer = transfer
        self._before = Counters({})
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", MODEL, "--host", HOST]
        command += ["--port", str(self.port), *SWITCHES]
        command += [word for flag in FLAGS.items() for word in flag] + [*flags]
        if transfer is not None:
            command += ["--kv-transfer-config", transfer]
        caches = {"XDG_CACHE_HOME": str(directory / "cache")}
        surroundings = {**os.environ, **environment.SERVER, **caches, **variables}
        surroundings.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command,
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=directory,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.terminate()

    # ------------------------------------------------------------------ start, end

    def until_ready(self) -> Self:
        """Wait until it is healthy and ebbtide knows its namespace."""
        eventually(self._healthy, START_S, f"the server does not start:\n{self.log()[-4000:]}")
        if self._transfer is not None:
            self.probe()
        self.forget_counters()
        return self

    def probe(self) -> None:
        """Ask short prompts until ebbtide stores and restores: after the start, after a reset."""
        deadline = time.monotonic() + START_S
        reasons = {"unknown": 1}
        while reasons.keys() & _NOT_READY:
            assert time.monotonic() < deadline, f"the connector does not come up: {reasons}"
            before = self._read_counters()
            self.complete(prompt(next(_probe_seeds), 65), max_tokens=1)
            eventually(
                lambda before=before: _asked(self._read_counters().since(before)),  # type: ignore[misc]
                ANSWER_S,
                "a request is never counted",
            )
            reasons = self._read_counters().since(before).by("ebbtide_miss_blocks_total", "reason")

    def terminate(self) -> int:
        """End it as a service is ended; a private store ends with it. Returns its exit code."""
        everybody = self.processes()
        self.process.terminate()
        return self._until_gone(everybody)

    def kill(self) -> None:
        """SIGKILL to vLLM's processes; others below them have to end by themselves."""
        everybody = self.processes()
        for process in self.engine_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._until_gone(everybody)

    def _until_gone(self, everybody: list[psutil.Process]) -> int:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        _, alive = psutil.wait_procs(everybody, timeout=END_S)
        for process in alive:
            process.kill()
        assert not alive, f"processes outlive the server: {alive}\n{self.log()[-4000:]}"
        return code

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it, a private store included."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def engine_processes(self) -> list[psutil.Process]:
        """Those of vLLM: no private store, and not Python's own that removes shared memory."""
        return [one for one in self.processes() if not _is_other(one)]

    # ------------------------------------------------------------------ what a test does

    def complete(self, asked: Prompt, *, max_tokens: int = 16, salt: str | None = None) -> Answer:
        """Greedy tokens for one prompt."""
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(asked),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        found = json.loads(self._call("POST", "/v1/completions", body))
        details = found["usage"]["prompt_tokens_details"] or {}
        return Answer(tuple(found["choices"][0]["token_ids"]), details.get("cached_tokens") or 0)

    def one_by_one(self, prompts: Sequence[Prompt], **how: Any) -> list[Answer]:
        """Answer the prompts one after the other."""
        return [self.complete(each, **how) for each in prompts]

    def until_stored(self, blocks: int) -> None:
        """Wait until so many blocks have ebbed: the next request would push them off the device."""
        eventually(
            lambda: self._now().total("ebbtide_demoted_blocks_total") >= blocks,
            ANSWER_S,
            f"{blocks} blocks never ebb",
        )

    def reset(self, *, external: bool = False) -> bool:
        """`POST /reset_prefix_cache`; `external`: of the tiers as well. Retried while copies run,
        as its documentation says.
        """
        path = "/reset_prefix_cache" + ("?reset_external=true" if external else "")
        deadline = time.monotonic() + ANSWER_S
        while not json.loads(self._call("POST", path))["success"]:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def metrics(self) -> str:
        """What `GET /metrics` answers."""
        return self._call("GET", "/metrics")

    def counters(self, *, requests: int) -> Counters:
        """The growth since the server was ready, once `requests` requests have been counted."""
        eventually(
            lambda: self._now().total("ebbtide_requests_total") >= requests,
            ANSWER_S,
            f"{requests} requests are never counted",
        )
        return self._now()

    def forget_counters(self) -> None:
        """Count from here on."""
        self._before = self._read_counters()

    def log(self) -> str:
        """What all its processes have written."""
        return self.log_path.read_text(errors="replace")

    # ------------------------------------------------------------------ inside

    def _now(self) -> Counters:
        return self._read_counters().since(self._before)

    def _read_counters(self) -> Counters:
        return Counters.of_text(self.metrics())

    def _healthy(self) -> bool:
        assert self.process.poll() is None, f"the server has ended:\n{self.log()[-6000:]}"
        try:
            self._call("GET", "/health")
        except OSError:
            return False
        return True

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            read = answer.read().decode()
        finally:
            connection.close()
        assert answer.status == 200, f"{method} {path}: {answer.status} {read[:500]}"
        return read


class SharedStore:
    """`ebbtide serve` on a socket, and what can happen to it. A context manager."""

    def __init__(
        self, directory: Path, *, memory: str = "64MiB", disk: str | None = "64MiB"
    ) -> None:
        """Starts it."""
        self.socket = str(directory / "s")
        self.disk_path = directory / "shared"
        self.log_path = directory / "store.log"
        self._settings: dict[str, Any] = {"socket": self.socket, "memory": {"capacity": memory}}
        if disk is not None:
            self._settings["disk"] = {"path": str(self.disk_path), "capacity": disk}
        self.process: subprocess.Popen[bytes]
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(END_S)
        said = self.log_path.read_text(errors="replace")
        assert "Traceback" not in said, said

    def start(self) -> None:
        """Start it, again perhaps, with the same settings."""
        self.process = start_store(self._settings, private=False, log_path=str(self.log_path))

    def stop(self) -> None:
        """As a service is stopped: what is in memory is written first."""
        self.process.terminate()
        assert self.process.wait(END_S) == 0, self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(END_S)

    def stats(self) -> dict[str, Any]:
        """The answer to STATS."""
        client = SocketClient(self.socket, os.urandom(16), "tool", arena=False)
        try:
            report = ask(client, wire.Stats())
        finally:
            client.close()
        assert isinstance(report, wire.Report)
        return report.report

    def held(self) -> int:
        """How much engines hold in it: reserved and pinned bytes, and loads under way."""
        report = self.stats()
        memory = report["memory"]
        return int(memory["reserved_bytes"] + memory["pinned_bytes"] + report["loads"])

    @property
    def slab(self) -> Path:
        """The file of the disk tier's payloads."""
        (found,) = self.disk_path.glob("*slab*")
        return found

    def flip_disk(self, stride_bytes: int) -> None:
        """Turn one bit in every `stride_bytes` of the slab. While it is stopped."""
        with open(self.slab, "r+b") as file:
            _flip(file.fileno(), stride_bytes)

    def flip_memory(self, stride_bytes: int) -> None:
        """Turn one bit in every `stride_bytes` of the arena. While it runs and nobody else does."""
        place = Path(f"/proc/{self.process.pid}/fd")
        memfds = [one for one in place.iterdir() if os.readlink(one).startswith("/memfd:")]
        arenas = {one.stat().st_ino: one for one in memfds}
        assert arenas, "the store has no arena"
        for arena in arenas.values():
            with open(arena, "r+b") as file:
                _flip(file.fileno(), stride_bytes)


def shared_memory_of(processes: Sequence[psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes have mapped or open."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            names = [line.split(maxsplit=5)[-1] for line in maps]
            fds = Path(f"/proc/{process.pid}/fd")
            for one in fds.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    names.append(os.readlink(one))
            found |= {name for name in names if name.startswith("/dev/shm/")}
    return {name for name in found if os.path.exists(name)}


def _flip(fd: int, stride_bytes: int) -> None:
    with mmap.mmap(fd, 0) as view:
        for start in range(0, len(view), stride_bytes):
            at = start + (start // stride_bytes * 4099) % stride_bytes
            if at < len(view):
                view[at] ^= 1 << (at % 8)
        view.flush()


def _is_other(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return "--private" in command or "multiprocessing.resource_tracker" in command


def _asked(counters: Counters) -> bool:
    return counters.total("ebbtide_requests_total") > 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
