"""The slab file: preallocated payload on disk, read and written straight from arena slots."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN_BYTES_MAX = 1 << 20  # neighbours are merged into one call up to this size
RUN_RECORDS_MAX = 256  # well below IOV_MAX
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BLOCK_BYTES = 512  # of st_blocks


class Slab(Protocol):
    """Raw bytes at offsets. Called from I/O threads; every method may raise OSError."""

    direct: bool

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write the views one behind the other. Durable only after `sync`."""
        ...

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views from `offset` on. Raises OSError(EIO) when the file ends before that."""
        ...

    def sync(self) -> None:
        """fdatasync: everything written before is durable, extent conversions included."""
        ...

    def close(self) -> None: ...


class SlabFile:
    """A slab on a real file system: O_DIRECT where it works, else buffered and dropped from the
    cache.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.direct = True
        self._fd = _open(path, os.O_DIRECT)
        if self._fd < 0:
            self.direct = False
            self._fd = _open(path, 0)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            _allocate(self._fd, path, size_bytes)
            works = self.direct and _direct_works(self._fd, size_bytes)
            if self.direct and not (works and _direct_writes_work(os.path.dirname(path))):
                self.close()
                self.direct, self._fd = False, _open(path, 0)
            if not self.direct:  # what lies behind a record is no part of it: read nothing ahead
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            on_failure.pop_all()

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        wanted = sum(len(view) for view in views)
        written = os.pwritev(self._fd, views, offset)
        if written != wanted:  # O_DIRECT writes are whole or an error, but for a full disk
            raise OSError(errno.EIO, f"short write: {written} of {wanted} bytes at {offset}")

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        wanted = sum(len(view) for view in views)
        got = os.preadv(self._fd, views, offset)
        if got != wanted:
            raise OSError(errno.EIO, f"short read: {got} of {wanted} bytes at {offset}")
        if not self.direct:
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_payload(path: str, mode: int) -> int:
    """The slab file of a directory that no store runs on, for commands: O_RDONLY or O_WRONLY.

    Raises ConfigError.
    """
    try:
        return os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(
            "The payload file cannot be opened", path=path, reason=error.strerror
        ) from error


def _open(path: str, extra_flags: int) -> int:
    """-1 when the file system refuses O_DIRECT; every other failure is raised."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | extra_flags
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if extra_flags and error.errno == errno.EINVAL:
            return -1
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError("The slab is not a regular file", path=path)
    os.fchmod(fd, 0o600)  # whatever the umask was
    return fd


def _allocate(fd: int, path: str, size_bytes: int) -> None:
    before = os.fstat(fd)
    if before.st_size > size_bytes:
        os.ftruncate(fd, size_bytes)
    try:
        if size_bytes:
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.ftruncate(fd, min(before.st_size, size_bytes))  # what it took before it failed
        free = os.fstatvfs(fd)
        raise ConfigError(
            "The file system has no room for the slab",
            next_step="Free space, lower [disk] capacity, or use another [disk] path.",
            path=path,
            slab_bytes=size_bytes,
            missing_bytes=max(0, size_bytes - before.st_blocks * BLOCK_BYTES),
            free_bytes=free.f_bavail * free.f_frsize,
            reason=error.strerror,
        ) from error


def _direct_works(fd: int, size_bytes: int) -> bool:
    """Read a block as records will be read: some file systems accept the flag and fail here."""
    if size_bytes < mmap.PAGESIZE:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page, memoryview(page) as view:
        try:
            return os.preadv(fd, [view], 0) == mmap.PAGESIZE
        except OSError:
            return False


def _direct_writes_work(directory: str) -> bool:
    """Write two blocks and read them back, in a file without a name: what the slab has must stay.

    True also where no such file can be had: then the first write will tell.
    """
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return True
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as pages, memoryview(pages) as view:
        written = os.urandom(len(view))
        view[:] = written
        try:
            os.pwritev(fd, [view], 0)
            view[:] = bytes(len(view))
            return os.preadv(fd, [view], 0) == len(view) and view == written
        except OSError as error:
            return error.errno in NO_ROOM  # which says nothing of how it is written
        finally:
            os.close(fd)
