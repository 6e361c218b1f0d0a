"""The tiers of one worker: a process beside its engine, started before it and ended after it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide.bench.contestant import (
    SETTLE_POLL_S,
    SETTLE_TIMEOUT_S,
    STORE_EXIT_TIMEOUT_S,
    process_cpu_s,
)
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from ebbtide.bench.vllm_answer import WorkerSpec

ROLE = "kv_both"


class Tiers(Protocol):
    """What is behind the device, as its worker sees it."""

    transfer_config: dict[str, Any] | None

    def cpu_s(self) -> float:
        """CPU seconds that its process has used."""
        ...

    def settle(self) -> None:
        """Wait until it has nothing left to do."""
        ...

    def counts(self) -> dict[str, int]:
        """Its own counters since the start: bytes by edge, and `corrupt` records."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a reader of its numbers must know."""
        ...

    def close(self) -> None:
        """After the engine: end the process and wait for it."""
        ...


class NoTiers:
    """vLLM alone."""

    transfer_config: dict[str, Any] | None = None

    def cpu_s(self) -> float:
        return 0.0

    def settle(self) -> None: ...

    def counts(self) -> dict[str, int]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class EbbtideTiers:
    """A store that is private to this worker: it ends with it, whatever ends the worker."""

    def __init__(self, settings: dict[str, Any], log_path: str) -> None:
        """Raises what `start_store` raises."""
        from ebbtide.config_schema import (
            VLLM_CONNECTOR,
            VLLM_LOAD_FAILURE_POLICY,
            VLLM_MODULE_PATH,
        )
        from ebbtide.connectors.process import start_store

        self.transfer_config: dict[str, Any] | None = {
            "kv_connector": VLLM_CONNECTOR,
            "kv_connector_module_path": VLLM_MODULE_PATH,
            "kv_role": ROLE,
            "kv_load_failure_policy": VLLM_LOAD_FAILURE_POLICY,
            "kv_connector_extra_config": settings,
        }
        self._settings = settings
        self._process = start_store(settings, log_path=log_path)

    def cpu_s(self) -> float:
        return process_cpu_s(self._process.pid)

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            stats = self._stats()
            unwritten = stats["memory"]["dirty_bytes"] if "disk" in stats else 0
            if not unwritten and not stats["loads"]:
                return
            if time.monotonic() > deadline:
                raise EbbtideError(
                    "The store does not come to rest, so nothing else can be measured",
                    next_step="Run `ebbtide bench` while the disk has nothing else to do.",
                    unwritten_bytes=unwritten,
                    loads=stats["loads"],
                )
            time.sleep(SETTLE_POLL_S)

    def counts(self) -> dict[str, int]:
        stats = self._stats()
        disk = stats.get("disk", {})
        return {
            "memory_to_disk": int(disk.get("write_bytes", 0)),
            "disk_to_memory": int(disk.get("read_bytes", 0)),
            "corrupt": stats["counts"].get("memory_corrupt", 0) + int(disk.get("corrupt", 0)),
        }

    def facts(self) -> dict[str, Any]:
        found = {"memory_bytes": self._stats()["memory"]["capacity_bytes"]}
        if "disk" in self._settings:
            found["disk_direct_io"] = _direct_io(self._process.pid, self._settings["disk"]["path"])
        return found

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STORE_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # what it held was this run's alone
            self._process.wait()

    def _stats(self) -> dict[str, Any]:
        from ebbtide.connectors import protocol as wire
        from ebbtide.connectors.client import SocketClient, ask

        client = SocketClient(str(self._settings["socket"]), b"\0" * 16, "tool", arena=False)
        try:
            answer = ask(client, wire.Stats())
        finally:
            client.close()
        if not isinstance(answer, wire.Report):
            raise EbbtideError("The store does not say how it is", answered=answer)
        return answer.report


def open_tiers(spec: WorkerSpec) -> Tiers:
    """Start what the spec asks for."""
    tiers = spec.tiers
    if tiers.kind == "ebbtide":
        return EbbtideTiers(tiers.settings, spec.log_path)
    if tiers.kind == "lmcache":
        from ebbtide.bench.vllm_peer import LmcacheTiers

        return LmcacheTiers(tiers.memory_bytes, tiers.disk_path, spec.log_path)
    return NoTiers()


def _direct_io(pid: int, directory: str) -> bool:
    """Whether a process has a file below `directory` open that bypasses the page cache."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(link).startswith(directory):
            lines = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text().splitlines()
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
            if flags & os.O_DIRECT:
                return True
    return False
