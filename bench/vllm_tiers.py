"""The tiers of one worker: a process beside its engine, started before it and ended after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ebbtide.bench.measured_store import MeasuredStore

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
        process = start_store(settings, log_path=log_path)
        self._store = MeasuredStore(process, str(settings["socket"]))

    def cpu_s(self) -> float:
        return self._store.cpu_s()

    def settle(self) -> None:
        self._store.settle()

    def counts(self) -> dict[str, int]:
        return {**self._store.disk_moves(), "corrupt": self._store.corrupt()}

    def facts(self) -> dict[str, Any]:
        found = {"memory_bytes": self._store.stats()["memory"]["capacity_bytes"]}
        if "disk" in self._settings:
            pid = self._store.process.pid
            found["disk_direct_io"] = _direct_io(pid, self._settings["disk"]["path"])
        return found

    def close(self) -> None:
        self._store.close()


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
