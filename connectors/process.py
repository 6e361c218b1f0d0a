"""Starting a store's process: by exec, in its own session, ready when it says so."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from ebbtide.connectors.endpoint import answers, open_lock
from ebbtide.errors import ConfigError, TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

START_TIMEOUT_S = 60.0  # a large disk index takes seconds to read; so does a predecessor's drain
LINE_BYTES_MAX = 16 << 10


def start_store(
    settings: Mapping[str, Any], *, private: bool = True, log_path: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a store with these settings (the configuration's JSON form, `socket` included).

    Returns when it accepts connections; whoever keeps the process must `wait` for it some day.
    Raises ConfigError with the store's own words when it refuses to start, TierUnavailableError
    when it fails otherwise or says nothing in time. Blocking: at an engine's start only.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = _spawn(settings, write_fd, private=private, log_path=log_path)
    except OSError as error:
        os.close(read_fd)
        raise TierUnavailableError(
            "The store's process could not be started", reason=error.strerror
        ) from error
    finally:
        os.close(write_fd)
    try:
        said = _read_line(read_fd)
    finally:
        os.close(read_fd)
    if said == "ready":
        return process
    _end(process)
    kind, _, words = said.partition(" ")
    if kind == ConfigError.__name__:
        raise ConfigError(f"The store refused to start: {words}")
    raise TierUnavailableError(
        f"The store did not start: {words}" if words else "The store did not start",
        next_step="Run `ebbtide serve` with the same settings and read its log.",
        exit_code=process.returncode,
    )


def ensure_store(settings: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Connect-or-start for a private store: whoever gets the lock first starts it.

    Returns the process when this call started it, None when one answers already. Several halves and
    ranks may call it at the same time with the same `socket`. Raises as `start_store` does.
    """
    path = str(settings["socket"])
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        lock_fd = open_lock(path + ".start")
    except OSError as error:
        raise ConfigError(
            "The socket's directory cannot be used",
            next_step="Choose a `socket` in a directory that this user can write.",
            path=path,
            reason=error.strerror,
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        return None if answers(path) else start_store(settings)
    finally:
        os.close(lock_fd)


def _spawn(
    settings: Mapping[str, Any], ready_fd: int, *, private: bool, log_path: str | None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "ebbtide", "serve", "--extra", json.dumps(settings)]
    command += ["--ready-fd", str(ready_fd), *(["--private"] if private else [])]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(log_path, "ab")) if log_path else None
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(ready_fd,),
            start_new_session=True,  # a Ctrl-C at the engine's terminal is not for the store
            cwd="/",
        )


def _read_line(fd: int) -> str:
    """The one line that a starting store writes; what there is of it when it ends or is late."""
    deadline = time.monotonic() + START_TIMEOUT_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    said = b""
    while not said.endswith(b"\n") and len(said) < LINE_BYTES_MAX:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        chunk = os.read(fd, 4096) if ready else b""
        if not chunk:
            break
        said += chunk
    return said.decode("utf-8", "replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """It has failed or hangs. Its own end is awaited for a moment, so that its code is known."""
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
