"""What `ebbtide doctor` looks at in file systems: the disk tier's directory and the socket's.

A check only looks: it creates no directory and leaves no file behind. To know whether a directory
can be written it makes an unnamed file there, which goes when it is closed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import tempfile
from typing import TYPE_CHECKING

from ebbtide.config import check_disk_fits
from ebbtide.config_checks import disk_room_bytes
from ebbtide.connectors.endpoint import check_socket_directory
from ebbtide.doctor_checks import Finding, Verdict, ok, problem, refused, warning
from ebbtide.errors import ConfigError
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from ebbtide.config import DiskConfig

# What a disk tier, and the root of a file system of its own, have under their directory.
_EXPECTED_FILES = frozenset({"FORMAT", "FORMAT.new", "LOCK", "index", "slab", "lost+found"})
_PASSING_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "overlay"})
# LMDB maps its file and locks it: neither holds between machines.
_NETWORK_FILE_SYSTEMS = re.compile(r"nfs|cifs|smb|ceph|lustre|glusterfs|9p|afs|fuse\.")
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def _nearest(path: str) -> str:
    """Return the longest part of `path` that exists, be it a directory or not."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _direct_io_works(fd: int) -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page, memoryview(page) as view:
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.pwritev(fd, [view], 0) == os.preadv(fd, [view], 0) == mmap.PAGESIZE
        except OSError as error:
            if error.errno in _NO_DIRECT_IO:
                return False
            raise


def _check_writing(check: str, path: str, *, direct: bool) -> list[Finding]:
    """Try to write in the part of `path` that exists, with direct I/O as well when asked."""
    place = _nearest(path)
    findings = []
    try:
        # Without a name where the file system can, else removed before anything is written.
        with tempfile.TemporaryFile(dir=place, buffering=0) as probe:
            findings.append(ok(check, f"{place} can be written"))
            if direct and _direct_io_works(probe.fileno()):
                findings.append(ok("direct I/O", "works"))
            elif direct:
                findings.append(
                    warning(
                        "direct I/O",
                        "the file system refuses O_DIRECT: reads and writes go through the page "
                        "cache",
                        "For speed, use a local ext4 or XFS file system",
                    )
                )
    except OSError as error:
        next_step = f"Choose a directory that this user ({os.geteuid()}) can write"
        return [problem(check, f"{place} cannot be written: {error.strerror}", next_step)]
    return findings


def _check_directory(path: str) -> Finding:
    """Whether the store would take this directory for its disk tier, or can make it."""
    check, own = "disk directory", "Give ebbtide a directory of its own"
    place = _nearest(path)
    facts = os.lstat(place)
    if place != path and os.path.isdir(place):
        return ok(check, f"{path} does not exist yet; the store makes it in {place}")
    if not stat.S_ISDIR(facts.st_mode):
        return problem(check, f"{place} is not a directory, or is a link", own)
    if facts.st_uid != os.geteuid():
        return problem(check, f"{path} belongs to another user ({facts.st_uid})", own)
    mode = f"{path} has mode {facts.st_mode & 0o777:o}"
    if facts.st_mode & 0o022:
        return problem(check, f"{mode}: others may write to it", f"Run: chmod 700 {path}")
    if facts.st_mode & 0o055:
        return warning(
            check,
            f"{mode}: others may look into it until the store makes it 700",
            f"Run: chmod 700 {path}",
        )
    names = os.listdir(path)
    if "FORMAT" not in names and (others := sorted({*names} - _EXPECTED_FILES)):
        return warning(check, f"{path} holds other files, {others[0]!r} among them", own)
    return ok(check, f"{path} exists and is closed to others")


def mount_type(path: str, mountinfo: str) -> str:
    """Return the file system type that `path` lies on, by the text of /proc/self/mountinfo."""
    best, found = "", "unknown"
    for line in mountinfo.splitlines():
        mounted, _, source = line.partition(" - ")
        # Spaces and such are written as three octal digits.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mounted.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two at one place the later hides the earlier
            best, found = point, source.split()[0]
    return found


def check_file_system(path: str, mountinfo: str) -> Finding:
    """For information, but for file systems that lose a tier or that its index does not work on."""
    kind = mount_type(os.path.realpath(_nearest(path)), mountinfo)
    advice = "Use a local ext4 or XFS file system"
    if kind in _PASSING_FILE_SYSTEMS:
        what = "memory" if kind != "overlay" else "a container's own layer"
        return warning("file system", f"{kind} is {what}: the tier ends with it", advice)
    if _NETWORK_FILE_SYSTEMS.match(kind):
        return warning("file system", f"{kind} is not local: the index needs local locks", advice)
    return ok("file system", kind)


def check_disk(disk: DiskConfig, mountinfo: str) -> list[Finding]:
    """The directory of the disk tier: whose it is, whether it can be written, and what it holds."""
    try:
        findings = [_check_directory(disk.path)]
        if findings[0].verdict is Verdict.PROBLEM:
            return findings
        room = disk_room_bytes(disk.path)
        check_disk_fits(disk, room)
        findings.append(
            ok(
                "disk room",
                f"{format_size(disk.capacity_bytes)}, and {format_size(room)} can be had there",
            )
        )
    except ConfigError as error:
        findings.append(refused("disk room", error))
    except OSError as error:
        return [
            problem(
                "disk directory",
                f"{disk.path} cannot be looked into: {error.strerror}",
                "Choose a directory that this user may use",
            )
        ]
    findings += _check_writing("disk writing", disk.path, direct=True)
    return [*findings, check_file_system(disk.path, mountinfo)]


def check_socket(path: str | None) -> list[Finding]:
    """The socket of a shared store; its length was checked with the configuration."""
    if path is None:
        return [ok("socket", "none: each engine starts a private store")]
    directory = os.path.dirname(path)
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        return [problem("socket", f"{path} is there and no socket", "Remove it or choose another")]
    try:
        check_socket_directory(_nearest(directory))
    except ConfigError as error:
        return [refused("socket", error)]
    return _check_writing("socket", directory, direct=False)
