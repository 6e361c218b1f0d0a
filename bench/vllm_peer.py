"""LMCache as a peer: its daemon beside one engine, in the mode that restores fastest on a CPU.

Daemon and connector of LMCache 0.5.6, transfer mode `engine_driven` through shared memory, chunks
of 256 tokens. Run as a program, this module is the daemon, ended by the kernel with its parent.
"""

from __future__ import annotations

import ctypes
import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ebbtide.bench.measured_store import STORE_EXIT_TIMEOUT_S, process_cpu_s
from ebbtide.bench.vllm_tiers import ROLE
from ebbtide.errors import EbbtideError

HOST = "127.0.0.1"
CHUNK_TOKENS = 256
MODE = "engine_driven"
START_TIMEOUT_S = 120.0
POLL_S = 0.1
SETTLE_S = 0.3  # its stores are asynchronous and it does not say when they have ended
GB = 1 << 30
_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")


class LmcacheTiers:
    """The daemon, private to this worker."""

    def __init__(self, memory_bytes: int, disk_path: str | None, log_path: str) -> None:
        """Returns when the daemon is healthy. Raises EbbtideError when it never is."""
        port, http_port = _free_port(), _free_port()
        self._name = f"ebbtide_bench_{os.getpid()}"
        self._disk_path = disk_path
        self._memory_gb = max(1, -(-memory_bytes // GB))
        words = ["--host", HOST, "--port", str(port), "--http-host", HOST]
        words += ["--http-port", str(http_port), "--chunk-size", str(CHUNK_TOKENS)]
        words += ["--l1-size-gb", str(self._memory_gb), "--eviction-policy", "LRU"]
        words += ["--supported-transfer-mode", MODE, "--shm-name", self._name]
        if disk_path is not None:
            Path(disk_path).mkdir(exist_ok=True)
            words += ["--l2-adapter", json.dumps({"type": "fs", "base_path": disk_path})]
        self.transfer_config: dict[str, Any] | None = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": ROLE,
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": port,
            },
        }
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, "server", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        with ExitStack() as undo:
            undo.callback(self.close)
            self._until_healthy(http_port)
            undo.pop_all()

    def cpu_s(self) -> float:
        return process_cpu_s(self._process.pid)

    def settle(self) -> None:
        time.sleep(SETTLE_S)

    def counts(self) -> dict[str, int]:
        return {}

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        found: dict[str, Any] = {
            "lmcache": version("lmcache"),
            "transfer_mode": f"{MODE}, shared memory",
            "chunk_tokens": CHUNK_TOKENS,
            "memory_bytes": self._memory_gb * GB,
        }
        if self._disk_path is not None:
            found["disk_direct_io"] = False
        return found

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STORE_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for left in _SHARED_MEMORY.glob(f"*{self._name}*"):
            left.unlink(missing_ok=True)

    def _until_healthy(self, port: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EbbtideError(
                    "LMCache's daemon does not come up",
                    next_step="It needs lmcache 0.5.6 with sortedcontainers, aiofile, aiofiles and "
                    "opentelemetry-exporter-prometheus.",
                )
            time.sleep(POLL_S)


def prepare_imports() -> None:
    """Let vLLM and LMCache live in one process without Triton. Call before importing vLLM.

    vLLM 0.32 looks at the attributes of every loaded module when its worker starts, and llvmlite's
    proxy of its library answers any name, `__dict__` too, which ends that scan in an error. Make
    the proxy refuse names with two underscores.
    """
    os.environ["LMCACHE_MP_TRANSFER_MODE"] = MODE
    proxy: Any = type(importlib.import_module("llvmlite.binding.ffi").lib)
    answer = proxy.__getattr__

    def no_dunder(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    proxy.__getattr__ = no_dunder


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/healthcheck")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def _daemon() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent != os.getppid():
        return  # it has ended meanwhile
    importlib.import_module("lmcache.cli.main").main(sys.argv[1:])


if __name__ == "__main__":
    _daemon()
