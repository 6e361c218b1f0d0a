"""The slab file: preallocated payload on disk, read and written straight from arena slots."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from ebbtide.errors import ConfigError
from ebbtide.tiers.runs import Run
from ebbtide.tiers.slab_io import slab_io

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.runs import Outcomes
    from ebbtide.tiers.slab_io import SlabIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BLOCK_BYTES = 512  # of st_blocks


class Slab(Protocol):
    """Raw bytes at offsets. Called from I/O threads; every method may raise OSError."""

    direct: bool
    runs_at_once: int
    """How many runs one call of `write_runs` or `read_runs` has under way at a time."""

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write the views one behind the other. Durable only after `sync`."""
        ...

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views from `offset` on. Raises OSError(EIO) when the file ends before that."""
        ...

    def write_runs(self, runs: Sequence[Run]) -> Outcomes:
        """`write` each, in any order; what each raised, or None."""
        ...

    def read_runs(self, runs: Sequence[Run]) -> Outcomes:
        """`read` each, in any order; what each raised, or None."""
        ...

    def sync(self) -> None:
        """fdatasync: everything written before is durable, extent conversions included."""
        ...

    def close(self) -> None: ...


class OneByOne:
    """The part of a `Slab` that has many runs, for one that has a call for each."""

    runs_at_once = 1

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        raise NotImplementedError

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        raise NotImplementedError

    def write_runs(self, runs: Sequence[Run]) -> Outcomes:
        return [_outcome(self.write, run) for run in runs]

    def read_runs(self, runs: Sequence[Run]) -> Outcomes:
        return [_outcome(self.read, run) for run in runs]


def _outcome(call: Callable[[int, Sequence[memoryview]], None], run: Run) -> OSError | None:
    try:
        call(run.offset, run.views)
    except OSError as error:
        return error
    return None


class SlabFile(OneByOne):
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
        # Through the page cache the kernel would do one after the other all the same.
        found = slab_io() if self.direct else None
        self._io: SlabIO | None = found if found is not None and found.has_queues() else None
        if self._io is not None:
            self.runs_at_once = self._io.DEPTH

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        failure = _failure("write", Run(offset, views), os.pwritev(self._fd, views, offset))
        if failure is not None:
            raise failure

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        run = Run(offset, views)
        failure = _failure("read", run, os.preadv(self._fd, views, offset))
        if failure is not None:
            raise failure
        if not self.direct:
            os.posix_fadvise(self._fd, offset, run.size_bytes, os.POSIX_FADV_DONTNEED)

    def write_runs(self, runs: Sequence[Run]) -> Outcomes:
        if self._io is None or len(runs) == 1:
            return super().write_runs(runs)
        moved = self._io.transfer(self._fd, runs, True)
        return [_failure("write", *each) for each in zip(runs, moved, strict=True)]

    def read_runs(self, runs: Sequence[Run]) -> Outcomes:
        if self._io is None or len(runs) == 1:
            return super().read_runs(runs)
        moved = self._io.transfer(self._fd, runs, False)
        return [_failure("read", *each) for each in zip(runs, moved, strict=True)]

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _failure(verb: str, run: Run, moved: int) -> OSError | None:
    """What became of a run, by the bytes that were moved or an errno below zero. Direct writes are
    whole or an error, but for a full disk.
    """
    if moved < 0:
        return OSError(-moved, os.strerror(-moved))
    if moved != run.size_bytes:
        wanted = f"{moved} of {run.size_bytes} bytes at {run.offset}"
        return OSError(errno.EIO, f"short {verb}: {wanted}")
    return None


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
