"""The socket's place in the file system, and who is at its other end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import select
import socket
import stat
import struct
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.config_checks import SOCKET_PATH_MAX
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

BACKLOG = 128
LOCK_RETRY_S = 0.05
SO_PEERPIDFD = 77  # Linux 6.5; not named in Python 3.11
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Endpoint:
    """A socket path that this process owns, from before its store opens until after it has closed.

    The lock beside the path decides who owns it, not the socket file, which a kill leaves behind.
    Whoever finds the lock taken by a store that no longer answers, because it drains, waits for it.
    """

    def __init__(self, path: str, wait_s: float, group: str | None = None) -> None:
        """Raises ConfigError when the path cannot be used, when others could put a socket of their
        own there, or when another store serves it. `group`: whose members may open the socket.
        """
        self.path = path
        self._mine: tuple[int, ...] | None = None  # what `listen` has put there
        self._gid = None if group is None else _group_id(group)
        if len(os.fsencode(path)) > SOCKET_PATH_MAX:
            raise ConfigError(
                "The socket path is too long for a Unix socket",
                next_step="Choose a shorter `socket`.",
                path=path,
                bytes_max=SOCKET_PATH_MAX,
            )
        try:
            self._make_directory(os.path.dirname(path) or ".")
            self._lock_fd = open_lock(path + ".lock")
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._take(wait_s)
        except ConfigError:
            os.close(self._lock_fd)
            raise

    def _make_directory(self, directory: str) -> None:
        try:
            os.makedirs(directory, mode=0o700)
        except FileExistsError:
            check_socket_directory(directory)
        else:
            self._admit_group(directory, 0o750)

    def _admit_group(self, path: str, mode: int) -> None:
        """What only its owner can use opens to the group, if there is one."""
        if self._gid is None:
            return
        try:
            os.chown(path, -1, self._gid)  # first: no other group is ever let in
            os.chmod(path, mode)
        except PermissionError as error:
            raise ConfigError(
                "The socket cannot be given to its group",
                next_step="Make this user a member of [server] socket_group.",
                path=path,
                gid=self._gid,
            ) from error

    def _take(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if answers(self.path) or time.monotonic() > deadline:
                raise ConfigError(
                    "Another store serves this socket",
                    next_step="Connect to it, stop it, or choose another `socket`.",
                    socket=self.path,
                )
            time.sleep(LOCK_RETRY_S)

    def listen(self) -> socket.socket:
        """A listening socket at the path, mode 0600, with a group 0660. What a killed store left
        there is replaced.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._unlink()
            listener.setblocking(False)
            previous = os.umask(0o177)
            try:
                listener.bind(self.path)
            finally:
                os.umask(previous)
            self._mine = _identity(self.path)
            self._admit_group(self.path, 0o660)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise _unusable(self.path, error) from error
        except ConfigError:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Give the path up. Where the directory was emptied meanwhile, a successor's socket may be
        there by now, which is left alone.
        """
        with contextlib.suppress(OSError):
            if _identity(self.path) == self._mine:
                os.unlink(self.path)
        os.close(self._lock_fd)

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise ConfigError(
                    "There is something at the socket's path that is no socket",
                    next_step="Remove it, or choose another `socket`.",
                    path=self.path,
                )
            os.unlink(self.path)


def check_socket_directory(directory: str) -> None:
    """Raise ConfigError where somebody else could take the socket away and listen in its place.

    Who only looks into it does no harm: the socket itself is closed. Raises OSError when it cannot
    be looked at.
    """
    found = os.stat(directory)
    if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ConfigError(
            "The socket's directory belongs to another user",
            next_step="Choose a `socket` in a directory of this user.",
            directory=directory,
            owner_uid=found.st_uid,
        )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:  # sticky: as in /tmp
        raise ConfigError(
            "Others may write to the socket's directory",
            next_step=f"Run: chmod go-w {directory}",
            directory=directory,
            mode=oct(stat.S_IMODE(found.st_mode)),
        )


def _identity(path: str) -> tuple[int, ...]:
    """Of the file itself. A number alone may be used again as soon as its file is gone."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _group_id(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(
            "There is no such group on this machine",
            next_step="Correct [server] socket_group, or write the group's number.",
            socket_group=group,
        ) from error


def open_lock(path: str) -> int:
    """A lock file, made if need be, that is no link and that only its owner can use."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def answers(path: str) -> bool:
    """Whether a store accepts connections there. One that is too busy to accept counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


class Process(NamedTuple):
    """A live process at the other end. `identity` names it as long as the pidfd is not readable."""

    identity: object
    pidfd: int


def peer_uid(peer: socket.socket) -> int:
    """The user at the other end, from the kernel."""
    return int(_credentials(peer)[1])


def trusted(peer: socket.socket, allow_uids: Collection[int] = ()) -> bool:
    """Whether the other end is this user, root, or one of `allow_uids`."""
    uid = peer_uid(peer)
    return uid in (os.geteuid(), 0) or uid in allow_uids


def peer_process(peer: socket.socket) -> Process:
    """The connecting process. Raises OSError when it has exited or cannot be seen from here."""
    pid = _credentials(peer)[0]
    try:
        pidfd = peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        pidfd = os.pidfd_open(pid)  # an older kernel: a pid may in theory be another's by now
    described = os.readlink(f"/proc/self/fd/{pidfd}")
    if described.startswith("pidfd:"):  # Linux 6.9: its inode belongs to this one process
        return Process(described, pidfd)
    return Process(pid or object(), pidfd)  # pid 0: of another pid namespace, never the same twice


def receive_with_fds(peer: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Bytes and the descriptor that rides with them, if any. No child inherits it.

    `socket.recv_fds` does not pass its flags on in Python 3.11: its descriptors leak into children.
    """
    space = socket.CMSG_LEN(array("i", [0]).itemsize)
    data, ancillary, _, _ = peer.recvmsg(count, space, socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
    return data, list(fds)


def has_exited(pidfd: int) -> bool:
    """Whether every thread of the process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return pid, uid, gid


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        "The socket path cannot be used",
        next_step="Choose a `socket` in a directory that this user can write.",
        path=path,
        reason=error.strerror,
    )
