"""Whether a configuration can work: in itself, on this machine, with the records of this model.

Each check raises `ConfigError` with both numbers, before anything is allocated.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING

from ebbtide.config_schema import (
    DISK_CAPACITY_MIN,
    MEMORY_CAPACITY_MIN,
    SLOT_ALIGNMENT,
    Config,
    DiskConfig,
    FairnessConfig,
    HttpConfig,
    MemoryConfig,
)
from ebbtide.errors import ConfigError
from ebbtide.machine import available_memory_bytes, free_disk_bytes, used_disk_bytes
from ebbtide.sizes import exact_size, format_size, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SOCKET_PATH_MAX = 107  # sun_path holds 108 bytes, the last of them a NUL
ROUNDING = 1e-9  # sums of decimal shares are not exact


def _check_absolute(path: str, name: str) -> None:
    # The store has a working directory of its own: a relative path would mean two places.
    if not os.path.isabs(path) or "\0" in path:
        raise ConfigError(
            f"{name} is not an absolute path", next_step="Write it from the root on", path=path
        )


def _refuse_above(name: str, value: int, bound_name: str, bound: int) -> None:
    if value > bound:
        raise ConfigError(
            f"{name} is {format_size(value)}, more than {bound_name} with {format_size(bound)}",
            next_step=f"Lower {name} or raise {bound_name}",
        )


def _refuse_below(least: int, name: str, value: int) -> None:
    if value < least:
        raise ConfigError(
            f"{name} is {exact_size(value)}, and the least that works is {exact_size(least)}",
            next_step=f"Raise {name}",
        )


def _check_http(http: HttpConfig) -> None:
    if http.token_file is not None:
        _check_absolute(http.token_file, "http.token_file")
    if http.host == "localhost":
        return
    try:
        ipaddress.ip_address(http.host)
    except ValueError as error:
        # What a name means depends on who answers for it: not for deciding who may connect.
        raise ConfigError(
            f"http.host is {http.host!r}, which is no address",
            next_step='Write an IP address, or "localhost"',
        ) from error


def check_consistent(config: Config) -> None:
    """Raise `ConfigError` when values contradict each other or a path cannot be used anywhere."""
    memory, disk = config.memory, config.disk
    _refuse_below(MEMORY_CAPACITY_MIN, "memory.capacity", memory.capacity_bytes)
    _refuse_above(
        "memory.load_window", memory.load_window_bytes, "memory.capacity", memory.capacity_bytes
    )
    if config.socket is not None:
        _check_absolute(config.socket, "socket")
        length = len(os.fsencode(config.socket))
        if length > SOCKET_PATH_MAX:
            raise ConfigError(
                f"socket has a path of {length} bytes, and Linux allows {SOCKET_PATH_MAX}",
                next_step="Choose a shorter directory",
            )
    if config.http is not None:
        _check_http(config.http)
    if disk is not None:
        _check_absolute(disk.path, "disk.path")
        _refuse_below(DISK_CAPACITY_MIN, "disk.capacity", disk.capacity_bytes)
        _refuse_above(
            "disk.dirty_max", disk.dirty_max_bytes, "memory.capacity", memory.capacity_bytes
        )
        _refuse_above(
            "disk.commit_batch", disk.commit_batch_bytes, "disk.capacity", disk.capacity_bytes
        )
    check_fairness(config.fairness)


def check_fairness(fairness: FairnessConfig) -> None:
    """Raise `ConfigError` when a floor is above its cap, or the floors are more than the whole.

    Each rule is counted once: how many namespaces it will match, nobody knows here. A store gives
    floors only as long as they add up.
    """
    shares = [("fairness", fairness.floor, fairness.cap)]
    for rule in fairness.namespace:
        floor = fairness.floor if rule.floor is None else rule.floor
        cap = fairness.cap if rule.cap is None else rule.cap
        shares.append((f"fairness.namespace {rule.match!r}", floor, cap))
    for name, floor, cap in shares:
        if floor > cap:
            raise ConfigError(
                f"{name} has a floor of {floor:g}, more than its cap of {cap:g}",
                next_step="Lower the floor or raise the cap",
            )
    total = sum(floor for _, floor, _ in shares)
    if total > 1 + ROUNDING:
        raise ConfigError(
            f"the floors of [fairness] add up to {total:g}, and the whole is 1",
            next_step="Lower some of them; the default floor counts once",
        )


def disk_room_bytes(path: str) -> int:
    """Return what a tier in `path` may occupy: free space, and what it occupies already."""
    return free_disk_bytes(path) + used_disk_bytes(path)


def check_memory_fits(memory: MemoryConfig, available: int) -> None:
    """Raise `ConfigError` when the arena is larger than `available` bytes of system RAM."""
    if memory.capacity_bytes > available:
        raise ConfigError(
            f"memory.capacity is {format_size(memory.capacity_bytes)}, but "
            f"{format_size(available)} of system RAM (not GPU memory) can be had here, the "
            "cgroup's limit included",
            next_step="Lower memory.capacity; it is the total of all ranks, not a share",
        )


def check_disk_fits(disk: DiskConfig, room: int) -> None:
    """Raise `ConfigError` when the disk tier is larger than `room` bytes (`disk_room_bytes`)."""
    if disk.capacity_bytes > room:
        raise ConfigError(
            f"disk.capacity is {format_size(disk.capacity_bytes)}, but the file system of the "
            f"directory has room for {format_size(room)}",
            next_step="Lower disk.capacity or choose another disk.path",
            path=disk.path,
        )


def check_fits(
    config: Config,
    *,
    available_memory: Callable[[], int] = available_memory_bytes,
    disk_room: Callable[[str], int] = disk_room_bytes,
) -> None:
    """Raise `ConfigError` when this machine cannot hold what `config` asks for. Allocates nothing.

    `available_memory` and `disk_room` say what the machine has, in bytes; tests give their own.
    """
    check_consistent(config)
    check_memory_fits(config.memory, available_memory())
    if config.disk is not None:
        check_disk_fits(config.disk, disk_room(config.disk.path))


def check_record_fits(config: Config, record_bytes: int) -> None:
    """Raise `ConfigError` when one record, all shards of a block, is larger than a place for it."""
    slot = round_up(record_bytes, SLOT_ALIGNMENT)
    bounds = [
        ("memory.capacity", config.memory.capacity_bytes),
        ("memory.load_window", config.memory.load_window_bytes),
    ]
    if config.disk is not None:
        bounds.append(("disk.capacity", config.disk.capacity_bytes))
    for name, bound in bounds:
        if slot > bound:
            raise ConfigError(
                f"one record takes {format_size(slot)}, but {name} is {format_size(bound)}",
                next_step=f"Raise {name} or lower the engine's block size",
                record_bytes=record_bytes,
            )


def capacity_table(config: Config, shard_bytes: Sequence[int]) -> str:
    """Return the plan that a start prints: per tier its total, its records and each rank's share.

    `shard_bytes` are the local ranks' parts of one record. The counts are upper bounds: segments
    that serve one slot size each, and on disk the index, take some of the total.
    """
    record = sum(shard_bytes)
    slot = round_up(record, SLOT_ALIGNMENT)
    tiers = [("memory", config.memory.capacity_bytes)]
    if config.disk is not None:
        tiers.append(("disk", config.disk.capacity_bytes))
    lines = [f"{'tier':<8}{'total':>12}{'slot':>12}{'records':>12}  bytes of each local rank"]
    for name, total in tiers:
        records = total // slot
        shares = " ".join(format_size(records * shard) for shard in shard_bytes)
        lines.append(
            f"{name:<8}{format_size(total):>12}{format_size(slot):>12}{records:>12}  {shares}"
        )
    return "\n".join(lines)
