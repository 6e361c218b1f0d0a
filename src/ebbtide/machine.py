"""Facts about this machine: memory that may still be taken, room on a file system, a description.

Facts this module relies on (Linux): `/proc/meminfo` counts in KiB; a cgroup's limit holds for the
whole subtree, so the tightest ancestor decides; pages under `inactive_file` are given back under
pressure and therefore not counted as taken; version 1 states "no limit" as a number near 2**63.
Every reader takes the root of the file system, so that tests can lay out a machine in a directory.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")


class _CgroupFiles(NamedTuple):
    """Where one cgroup version keeps its numbers."""

    limit: str
    usage: str
    reclaimable: str  # key in memory.stat


_VERSION_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def _read_text(path: Path) -> str | None:
    """Return the text of `path`, or None when it is absent or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _meminfo_bytes(name: str, root: Path) -> int | None:
    for line in (_read_text(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_chains(root: Path) -> Iterator[tuple[list[Path], _CgroupFiles]]:
    """Yield, per cgroup version in use, this process's group and all groups above it."""
    mount = root / "sys/fs/cgroup"
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            tops, files = [mount, mount / "unified"], _VERSION_2
        elif "memory" in controllers.split(","):
            tops, files = [mount / "memory"], _VERSION_1
        else:
            continue
        for top in tops:
            # A container may see its own group as the mount's top: missing levels are skipped.
            here = top / group.lstrip("/")
            levels = [here, *here.parents]
            yield levels[: levels.index(top) + 1], files


def _cgroup_room_bytes(group: Path, files: _CgroupFiles) -> int | None:
    limit, usage = _read_text(group / files.limit), _read_text(group / files.usage)
    if limit is None or usage is None or limit.strip() == "max":
        return None
    reclaimable = 0
    for line in (_read_text(group / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == files.reclaimable:
            reclaimable = int(value)
    taken = max(0, int(usage) - reclaimable)
    return max(0, int(limit) - taken)


def available_memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes of system RAM that can still be taken, the cgroup's limits included.

    Raises `OSError` when the machine does not say.
    """
    rooms = [_meminfo_bytes("MemAvailable", root)]
    for groups, files in _cgroup_chains(root):
        rooms.extend(_cgroup_room_bytes(group, files) for group in groups)
    known = [room for room in rooms if room is not None]
    if not known:
        raise OSError(f"neither {root / 'proc/meminfo'} nor a memory cgroup can be read")
    return min(known)


def free_disk_bytes(path: str | Path) -> int:
    """Return the bytes free for this user on the file system of `path`, which may be absent yet."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def used_disk_bytes(path: str | Path) -> int:
    """Return the bytes that the files under `path` occupy, 0 when absent. Follows no link."""
    used = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                used += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # deleted since the folder was listed
    return used


def _cpu_model(root: Path) -> str:
    for line in (_read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def describe_machine(root: Path = ROOT) -> dict[str, str | int]:
    """Return what a reader of a benchmark must know of this machine. Memory in bytes."""
    return {
        "cpu_model": _cpu_model(root),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _meminfo_bytes("MemTotal", root) or 0,
        "memory_available_bytes": available_memory_bytes(root),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
