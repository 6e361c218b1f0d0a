"""Digests of files that were read before: a restart must not read every byte of a model again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("ebbtide.connectors")

CACHED_FILES_MAX = 4096
CACHE_BYTES_MAX = 1 << 20  # a larger file was not written by us; cut here, it is no JSON
LOCK_TRIES_MAX = 20
LOCK_RETRY_S = 0.01

_FORMAT = 1
_CACHE_KEY = re.compile(r"\d+:\d+:\d+:-?\d+:-?\d+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def stamp_of(status: os.stat_result) -> str:
    """What changes with a file's content once its times have settled: the key of the cache."""
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, numbers))


def default_cache_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where digests are kept between starts; None for a user without a home directory."""
    caches = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # the standard says: ignore it
        caches = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(caches, "ebbtide", "weights.json") if os.path.isabs(caches) else None


class DigestCache:
    """SHA-256 of files that were read before, in one private JSON file; None: in memory only.

    Any thread may call. No method raises for what is on the disk: a file that is damaged, not
    ours or open to others counts as empty, one that cannot be written costs time only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._entries: dict[str, str] | None = None  # oldest first
        self._has_complained = False

    def get(self, status: os.stat_result) -> str | None:
        """The digest of the file with this status. The first call reads the cache file."""
        with self._lock:
            if self._entries is None:
                self._entries = self._read()
            return self._entries.get(stamp_of(status))

    def put(self, status: os.stat_result, digest: str) -> None:
        """Remember a digest and write the cache file, with what others wrote meanwhile."""
        with self._lock:
            self._entries = {**(self._entries or {}), stamp_of(status): digest}
            if self._path is None:
                return
            try:
                self._write(self._path)
            except OSError as error:
                if not self._has_complained:
                    self._has_complained = True
                    _log.warning(
                        "The digests of weights cannot be kept in %s (%s); "
                        "the weights are read again at every start",
                        self._path,
                        error.strerror,
                    )

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            with open(self._path, "rb", opener=_open_no_link) as file:
                if not _is_private(os.fstat(file.fileno()), stat.S_IFREG):
                    return {}
                text = file.read(CACHE_BYTES_MAX)
            return _entries_of(json.loads(text))
        except (OSError, ValueError, RecursionError):
            return {}

    def _write(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(os.stat(path.parent), stat.S_IFDIR):
            raise OSError(errno.EPERM, "the directory is not ours or others may write to it")
        name, flags = str(path), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock_fd = os.open(name + ".lock", flags, 0o600)
        try:
            _wait_for(lock_fd)
            merged = {**self._read(), **(self._entries or {})}
            self._entries = dict(list(merged.items())[-CACHED_FILES_MAX:])
            text = json.dumps({"format": _FORMAT, "files": self._entries}, indent=0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + ".new")  # of a process that was killed
            with os.fdopen(os.open(name + ".new", flags | os.O_EXCL, 0o600), "wb") as file:
                file.write(text.encode("ascii"))
            os.replace(name + ".new", name)
        finally:
            os.close(lock_fd)


def _open_no_link(path: str, flags: int) -> int:
    # Without O_NONBLOCK a pipe in the place of the file would hold the caller for ever.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _entries_of(document: Any) -> dict[str, str]:
    """Raises ValueError when the document is not one of ours."""
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError("another format")
    files = document.get("files")
    if not isinstance(files, dict) or len(files) > CACHED_FILES_MAX:
        raise ValueError("no table of files")
    for key, digest in files.items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ValueError("no digest")
        if not _CACHE_KEY.fullmatch(key):
            raise ValueError("no file")
    return files


def _is_private(status: os.stat_result, kind: int) -> bool:
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return is_ours and stat.S_IFMT(status.st_mode) == kind


def _wait_for(lock_fd: int) -> None:
    for attempt in range(LOCK_TRIES_MAX):
        if attempt:
            time.sleep(LOCK_RETRY_S)
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    raise OSError(errno.EBUSY, "another process keeps it locked")
