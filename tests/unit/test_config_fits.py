"""Sizes against this machine and this model: refused with both numbers, before any allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ebbtide.config import Config, capacity_table, check_fits, check_record_fits, load_config
from ebbtide.config_checks import disk_room_bytes
from ebbtide.errors import ConfigError
from ebbtide.machine import (
    available_memory_bytes,
    describe_machine,
    free_disk_bytes,
    used_disk_bytes,
)
from ebbtide.sizes import GIB, KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path


def configured(memory: str = "64MiB", disk: str | None = None, **more: str) -> Config:
    """Return a configuration with these capacities."""
    extra: dict[str, object] = {"memory": {"capacity": memory, **more}}
    if disk is not None:
        extra["disk"] = {"path": "/cache", "capacity": disk}
    return load_config(extra, {}).config


def machine(root: Path, files: dict[str, str]) -> Path:
    """Lay out a machine's facts under `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {300 * MIB} kB\nMemAvailable: {256 * MIB} kB\n"}
VERSION_2 = MEMINFO | {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/memory.max": f"{64 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{10 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
    "sys/fs/cgroup/pod/box/memory.current": f"{5 * GIB}\n",
}
VERSION_1 = MEMINFO | {
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{16 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{20 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {8 * GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MEMINFO, 256 * GIB),
        (VERSION_2, 56 * GIB),  # 64 - (10 - 2); the inner group has no limit of its own
        (VERSION_1, 4 * GIB),  # 16 - (20 - 8); the outer group's number means none
        # A container sees its own group as the top of the mount.
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/elsewhere\n",
                "sys/fs/cgroup/memory.max": f"{GIB}",
                "sys/fs/cgroup/memory.current": "0",
            },
            GIB,
        ),
        # Over its limit already: nothing is left, not less than nothing.
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/unified/memory.max": "1",
                "sys/fs/cgroup/unified/memory.current": "5",
            },
            0,
        ),
    ],
)
def test_available_memory_is_the_tightest_bound(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    assert available_memory_bytes(machine(tmp_path, files)) == available


def test_a_machine_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="can be read"):
        available_memory_bytes(tmp_path)


def test_this_machine_describes_itself() -> None:
    facts = describe_machine()
    assert facts["cpu_model"]
    assert 0 < int(facts["memory_available_bytes"]) <= int(facts["memory_bytes"])
    assert int(facts["cpu_cores"]) >= 1
    assert str(facts["python"]).startswith("3.")


def test_disk_facts_of_present_and_absent_directories(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path) > 0
    assert free_disk_bytes(tmp_path / "not" / "yet") > 0
    assert used_disk_bytes(tmp_path / "not") == 0
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "slab").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "inner" / "slab")
    assert 100_000 <= used_disk_bytes(tmp_path) < 200_000


def test_p73_memory_above_what_the_cgroup_leaves_is_refused_before_any_allocation(
    tmp_path: Path,
) -> None:
    root = machine(tmp_path, VERSION_2)
    check_fits(configured("56GiB"), available_memory=lambda: available_memory_bytes(root))
    with pytest.raises(ConfigError) as caught:
        check_fits(configured("57GiB"), available_memory=lambda: available_memory_bytes(root))
    line = str(caught.value)
    assert "memory.capacity is 57GiB, but 56GiB of system RAM (not GPU memory)" in line
    assert "Lower memory.capacity" in line


@pytest.mark.parametrize("local_ranks", [1, 2, 8])
@pytest.mark.parametrize("shard_bytes", [512 * KIB, 1_000_003])
def test_p73_capacity_is_the_total_of_all_ranks(local_ranks: int, shard_bytes: int) -> None:
    # Two nodes have a store each, and two data-parallel engines share one: neither changes a total.
    total = 50 * GIB
    config = configured("50GiB", "100GiB")
    assert config.memory.capacity_bytes == total
    table = capacity_table(config, [shard_bytes] * local_ranks)
    header, memory, disk = (line.split() for line in table.splitlines())
    assert header[:4] == ["tier", "total", "slot", "records"]
    assert memory[:2] == ["memory", "50GiB"]
    assert disk[:2] == ["disk", "100GiB"]
    assert len(memory[4:]) == local_ranks
    slot = -(-shard_bytes * local_ranks // 4096) * 4096
    assert 0 <= total - int(memory[3]) * slot < slot


def test_disk_above_the_room_of_its_file_system_is_refused_with_both_numbers() -> None:
    config = configured(disk="200GiB")
    check_fits(config, available_memory=lambda: GIB, disk_room=lambda path: 200 * GIB)
    with pytest.raises(ConfigError) as caught:
        check_fits(config, available_memory=lambda: GIB, disk_room=lambda path: 150 * GIB)
    line = str(caught.value)
    assert "disk.capacity is 200GiB" in line
    assert "room for 150GiB" in line
    assert "path=/cache" in line


def test_what_the_directory_holds_already_counts_as_room(tmp_path: Path) -> None:
    (tmp_path / "slab").write_bytes(b"x" * 20 * MIB)
    assert disk_room_bytes(str(tmp_path)) >= free_disk_bytes(tmp_path) + 20 * MIB - MIB


def test_small_sizes_fit_this_machine() -> None:
    check_fits(configured("16KiB"))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (configured("64KiB", load_window="64KiB"), "memory.capacity"),
        (configured("256KiB"), "memory.load_window"),
    ],
)
def test_p94_a_record_larger_than_its_place_is_refused(config: Config, name: str) -> None:
    check_record_fits(config, 64 * KIB)
    with pytest.raises(ConfigError) as caught:
        check_record_fits(config, 64 * KIB + 1)  # a slot is a multiple of 4 KiB
    assert f"one record takes 68KiB, but {name} is 64KiB" in str(caught.value)


def test_a_record_larger_than_the_disk_is_refused() -> None:
    config = configured("256MiB", "16MiB")
    with pytest.raises(ConfigError, match=r"one record takes 17MiB, but disk\.capacity is 16MiB"):
        check_record_fits(config, 17 * MIB)
