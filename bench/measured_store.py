"""A store's process as benchmarks watch it: what it used, when it rests, how it ends."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from ebbtide.errors import EbbtideError

SETTLE_TIMEOUT_S = 20.0
SETTLE_POLL_S = 0.02
STORE_EXIT_TIMEOUT_S = 60.0


class MeasuredStore:
    """Owns the process: `close` ends it and waits."""

    def __init__(self, process: subprocess.Popen[bytes], socket: str) -> None:
        self.process = process
        self._socket = socket

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return process_cpu_s(self.process.pid)

    def settle(self) -> None:
        """Wait until it has nothing left to write. Raises EbbtideError when it never has."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            stats = self.stats()
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

    def stats(self) -> dict[str, Any]:
        """Its own numbers. Raises EbbtideError when it does not tell."""
        from ebbtide.connectors import protocol as wire
        from ebbtide.connectors.client import SocketClient, ask

        client = SocketClient(self._socket, b"\0" * 16, "tool", arena=False)
        try:
            answer = ask(client, wire.Stats())
        finally:
            client.close()
        if not isinstance(answer, wire.Report):
            raise EbbtideError("The store does not say how it is", answered=answer)
        return answer.report

    def corrupt(self) -> int:
        """Records that did not verify, in any tier."""
        stats = self.stats()
        in_memory = stats["counts"].get("memory_corrupt", 0)
        return int(in_memory) + int(stats.get("disk", {}).get("corrupt", 0))

    def disk_moves(self) -> dict[str, int]:
        """Bytes over the edges between memory and disk since its start."""
        disk = self.stats().get("disk", {})
        return {
            "memory_to_disk": int(disk.get("write_bytes", 0)),
            "disk_to_memory": int(disk.get("read_bytes", 0)),
        }

    def close(self) -> None:
        """End it and wait. By itself it ends with the process of its engine."""
        self.process.terminate()
        try:
            self.process.wait(STORE_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # what it held was this run's alone
            self.process.wait()


def process_cpu_s(pid: int) -> float:
    """User and system time of a process and all its threads, in the kernel's ticks (10 ms)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name may hold anything; state comes next
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
