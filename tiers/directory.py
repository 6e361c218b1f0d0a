"""The disk tier's directory: its geometry, its lock, and who may own it. `docs/disk-format.md`."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import stat
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.tiers.lock_file import owner_text, read_lock, read_owner, write_lock
from ebbtide.tiers.segments import ALIGNMENT_BYTES, segment_bytes_for

_log = logging.getLogger("ebbtide.tiers")

FORMAT = 2
SMALL_FILES_BYTES = 64 << 10
INDEX_BYTES_MIN = 1 << 20
INDEX_SHARE = 14  # this part of the capacity belongs to the index
# A tree under change needs its pages three times: committed, being written, and freed by the last
# commit, which LMDB reuses one later. A page has the room of 51 slots, however few of them hold a
# record: where all slots are small, all pages together take a 51st of the slab, and three times
# that, with the last page of each segment, is up to nine tenths of the index. The rest has room for
# the saved order of eviction (24 bytes a record) and the tree itself.
INDEX_BYTES_PER_RECORD = 400
OURS = {"FORMAT", "LOCK", "slab", "index"}
LEFTOVERS = {"FORMAT.new", "index.new"}  # of an opening that crashed
TOLERATED = {"lost+found"}  # of a file system's root
NAMES_SHOWN = 3
LOCK_PATIENCE_S = 5.0  # a killed owner's last I/O holds the lock until it has ended


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers in FORMAT. All sizes in bytes."""

    format: int
    directory: str
    alignment: int
    segment_bytes: int
    slab_bytes: int
    index_bytes: int

    @property
    def is_possible(self) -> bool:
        """Whether a store of this format can have written these values."""
        sizes = (self.segment_bytes, self.slab_bytes, self.index_bytes)
        return (
            self.format == FORMAT
            and self.alignment == ALIGNMENT_BYTES
            and isinstance(self.directory, str)
            and all(isinstance(size, int) and size > 0 == size % self.alignment for size in sizes)
        )

    def slot_bytes(self, length: int) -> int:
        """Of the slab, what a record of this length takes."""
        return -(-length // self.alignment) * self.alignment

    @property
    def records_max(self) -> int:
        """More records than this would not let a full index be rewritten within its map."""
        return self.index_bytes // INDEX_BYTES_PER_RECORD

    @classmethod
    def plan(cls, capacity_bytes: int, kept: Geometry | None = None) -> Geometry:
        """Divide a capacity. `kept` is the existing geometry whose identity and segments stay."""
        index = max(INDEX_BYTES_MIN, capacity_bytes // INDEX_SHARE)
        index = index // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        slab = (capacity_bytes - index - SMALL_FILES_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if slab < ALIGNMENT_BYTES:
            raise ConfigError(
                "The disk capacity leaves no room for payload",
                next_step="Raise [disk] capacity.",
                capacity_bytes=capacity_bytes,
                index_bytes=index,
            )
        return cls(
            format=FORMAT,
            directory=kept.directory if kept else uuid.uuid4().hex,
            alignment=ALIGNMENT_BYTES,
            segment_bytes=kept.segment_bytes if kept else segment_bytes_for(slab),
            slab_bytes=slab,
            index_bytes=index,
        )


class Directory:
    """A locked directory of the disk tier. Raises ConfigError when it cannot be ours."""

    def __init__(self, path: str, capacity_bytes: int | None) -> None:
        """`capacity_bytes` None: as it was, see `existing`."""
        self.path = path
        _prepare(path)
        if os.path.islink(self.index_path):
            raise ConfigError("The index is a link (links are refused)", path=self.index_path)
        self._lock_fd, self._last_words = _lock(os.path.join(path, "LOCK"))
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            kept = self._read_format()
            if capacity_bytes is None and kept is not None:
                self.geometry = kept
            elif capacity_bytes is None:
                raise ConfigError(
                    "The directory's FORMAT cannot be read, or is an earlier one",
                    next_step="A store that starts on it begins empty.",
                    path=path,
                    known=FORMAT,
                )
            else:
                self.geometry = Geometry.plan(capacity_bytes, kept)
            self.is_new = kept is None
            if kept is None:
                self.forget_index()
            if kept != self.geometry:
                self._write_format()
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, "FORMAT.new"))
            on_failure.pop_all()

    @classmethod
    def existing(cls, path: str) -> Directory:
        """One that a store has made, with the geometry that it has. Creates nothing."""
        if not os.path.isfile(os.path.join(path, "FORMAT")):
            raise ConfigError(
                "This is no directory of a disk tier",
                next_step="Name the [disk] path of a store.",
                path=path,
            )
        return cls(path, None)

    @property
    def slab_path(self) -> str:
        return os.path.join(self.path, "slab")

    @property
    def index_path(self) -> str:
        return os.path.join(self.path, "index")

    @property
    def index_is_untouched(self) -> bool:
        """The last owner closed the index in order, and nobody has changed its file since."""
        return self._last_words == self._index_mark()

    def name_socket(self, socket: str) -> None:
        """Tell whoever finds the directory in use where its store listens."""
        write_lock(self._lock_fd, owner_text(os.path.abspath(socket)))

    def say_goodbye(self) -> None:
        """The index is closed in order. The last word before `close`."""
        write_lock(self._lock_fd, self._index_mark())

    def _index_mark(self) -> str:
        try:
            found = os.stat(os.path.join(self.index_path, "data.mdb"))
        except OSError:
            return "closed without an index\n"
        return f"closed {found.st_size} {found.st_mtime_ns}\n"

    def forget_index(self) -> None:
        """Start empty. A damaged index is never repaired: this is a cache."""
        shutil.rmtree(self.index_path, ignore_errors=True)
        os.mkdir(self.index_path, 0o700)
        self._sync()

    def replace_index(self, path: str) -> None:
        """Put a rewritten index in the place of the old one. A crash between leaves none: empty."""
        shutil.rmtree(self.index_path)
        os.rename(path, self.index_path)
        self._sync()

    def check_unchanged(self) -> None:
        """Raise TierUnavailableError when the path no longer leads to what was opened.

        A file system that was unmounted leaves an empty directory behind, on another one.
        """
        try:
            there, ours = os.stat(os.path.join(self.path, "LOCK")), os.fstat(self._lock_fd)
            same = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
            same = same and self._read_format() == self.geometry
        except OSError as error:
            raise TierUnavailableError(
                "The disk directory is not there", path=self.path, reason=error.strerror
            ) from error
        if not same:
            raise TierUnavailableError(
                "The disk directory is not the one that was opened", path=self.path
            )

    def close(self) -> None:
        """Give the directory up. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _read_format(self) -> Geometry | None:
        try:
            path = os.path.join(self.path, "FORMAT")
            with open(path, opener=_open_no_link, encoding="ascii") as file:
                fields = json.load(file)
            found = int(fields["format"])
            if found > FORMAT:
                raise ConfigError(
                    "The directory was written by a newer ebbtide",
                    next_step="Use that version, or point [disk] path at another directory.",
                    path=self.path,
                    format=found,
                    known=FORMAT,
                )
            if found < FORMAT:
                _log.warning("%s is of format %d: a store starts empty on it", self.path, found)
                return None
            kept = Geometry(**fields)
            return kept if kept.is_possible else None
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return None  # unreadable: a cache starts over

    def _write_format(self) -> None:
        text = json.dumps(asdict(self.geometry), indent=2) + "\n"
        target = os.path.join(self.path, "FORMAT")
        fd = os.open(target + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, text.encode("ascii"))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(target + ".new", target)
        self._sync()

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _prepare(path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise ConfigError(
            "The disk directory cannot be created or opened",
            next_step="Point [disk] path at a directory that this user may write.",
            path=path,
            reason=error.strerror,
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError("[disk] path is not a directory (links are refused)", path=path)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            "The disk directory belongs to another user",
            next_step="Give ebbtide a directory of its own.",
            path=path,
            owner_uid=found.st_uid,
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            "Others may write to the disk directory",
            next_step=f"Run: chmod 700 {path}",
            path=path,
            mode=oct(found.st_mode & 0o777),
        )
    foreign = sorted(set(os.listdir(path)) - OURS - LEFTOVERS - TOLERATED)
    if foreign:
        raise ConfigError(
            "The disk directory holds what is not ebbtide's, and the capacity is for all in it",
            next_step="Give ebbtide a directory of its own.",
            path=path,
            found=", ".join(foreign[:NAMES_SHOWN]),
            entries=len(foreign),
        )
    if stat.S_IMODE(found.st_mode) != 0o700:  # a read-only file system is for `_lock` to name
        os.chmod(path, 0o700)


def _lock(path: str) -> tuple[int, str]:
    """The lock, and what its last owner left in it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(
            "The disk directory cannot be written",
            next_step="Check its permissions and that its file system is mounted read-write.",
            path=path,
            reason=error.strerror,
        ) from error
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = read_owner(read_lock(fd)).pid
                os.close(fd)
                raise ConfigError(
                    "Another store owns the disk directory",
                    next_step="Stop it, connect to its socket, or use another [disk] path.",
                    path=os.path.dirname(path),
                    owner_pid=owner,
                ) from None
            time.sleep(0.02)
    last_words = read_lock(fd)
    write_lock(fd, owner_text())
    return fd, last_words
