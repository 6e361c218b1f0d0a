"""What the LOCK file of a disk directory says: who owns the directory, and where to reach it.

The lock itself is `flock`; the text is for whoever finds it taken. `docs/disk-format.md`.
"""

from __future__ import annotations

import fcntl
import os
from typing import NamedTuple

TEXT_BYTES_MAX = 4096


class Owner(NamedTuple):
    """A process that holds the lock, in its own words."""

    pid: str  # "" when it has said nothing yet, or has said goodbye
    socket: str  # of the store; "" when it listens on none


def owner_text(socket: str = "") -> str:
    """What this process leaves in a LOCK that it holds. `socket`: an absolute path."""
    return f"{os.getpid()}\n{socket}\n" if socket else f"{os.getpid()}\n"


def read_owner(text: str) -> Owner:
    """The owner that a text names. What an orderly end leaves there names none."""
    first, _, rest = text.partition("\n")
    if not first.isdecimal():
        return Owner("", "")
    socket = rest.removesuffix("\n")
    return Owner(first, socket if socket.startswith("/") else "")


def read_lock(fd: int) -> str:
    """The text of a LOCK file."""
    return os.fsdecode(os.pread(fd, TEXT_BYTES_MAX, 0))


def write_lock(fd: int, text: str) -> None:
    """Replace the text. Cut last, so that no reader finds the file empty."""
    data = os.fsencode(text)
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))


def find_owner(directory: str) -> Owner | None:
    """Who holds the directory's lock now; None: nobody, whatever the text says. Does not wait.

    Also None where there is no lock file to look at: whoever opens the directory will say why.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(os.path.join(directory, "LOCK"), flags)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read_owner(read_lock(fd))
    finally:
        os.close(fd)
    return None
