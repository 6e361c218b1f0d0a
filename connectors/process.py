"""Starting a store's process: by exec, in its own session, ready when it says so."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from ebbtide.errors import ConfigError, TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

START_TIMEOUT_S = 60.0  # a large arena takes seconds to populate


def start_store(
    settings: Mapping[str, Any], *, private: bool = True, log_path: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a store with these settings (the configuration's JSON form, `socket` included).

    Returns when it accepts connections. Raises ConfigError with the store's own words when it
    refuses to start, TierUnavailableError when it says nothing in time. Blocking: at an engine's
    start only.
    """
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-P", "-m", "ebbtide", "serve", "--extra", json.dumps(settings)]
    command += ["--ready-fd", str(write_fd), *(["--private"] if private else [])]
    try:
        log = open(log_path, "ab") if log_path else None  # noqa: SIM115  # closed below
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,  # a Ctrl-C at the engine's terminal is not for the store
                cwd="/",
            )
        finally:
            if log is not None:
                log.close()
    finally:
        os.close(write_fd)
    try:
        _await_ready(process, read_fd)
    finally:
        os.close(read_fd)
    return process


def ensure_store(settings: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Connect-or-start for a private store: whoever gets the lock first starts it.

    Returns the process when this call started it, None when one answers already. Several halves and
    ranks may call it at the same time with the same `socket`.
    """
    path = str(settings["socket"])
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    lock_fd = os.open(path + ".start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        return None if _answers(path) else start_store(settings)
    finally:
        os.close(lock_fd)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _await_ready(process: subprocess.Popen[bytes], read_fd: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    said = b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([read_fd], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(read_fd, 4096) if ready else b""
        if not chunk:
            break
        said += chunk
    if said == b"ready\n":
        return
    process.kill()
    process.wait()
    line = said.decode("utf-8", "replace").strip()
    if line.startswith("error "):
        raise ConfigError(f"The store refused to start: {line.removeprefix('error ')}")
    raise TierUnavailableError(
        "The store did not start",
        next_step="Run `ebbtide serve` with the same settings and read its log.",
        exit_code=process.returncode,
    )
