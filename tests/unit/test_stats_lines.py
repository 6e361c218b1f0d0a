"""`ebbtide stats`: what a namespace may hold, and what sharing cost it, in words."""

from __future__ import annotations

from typing import Any

from ebbtide.stats import _lines

NAMESPACE = {
    "name": "0123",
    "fields": {"model": "m"},
    "memory_records": 2,
    "memory_bytes": 200,
    "memory_slot_bytes": 8192,
    "disk_slot_bytes": 4096,
    "floor": 0.1,
    "cap": 0.8,
    "evicted_for_others": {"memory": 3},
    "refused": {"over_quota": 2, "store_shed": 5},
}


def lines_of(**more: Any) -> list[str]:
    return _lines({"namespaces": [{**NAMESPACE, **more}], "store": {}, "by_store": True})


def test_a_quota_and_its_costs_are_told() -> None:
    assert lines_of() == [
        "0123  model=m",
        "  memory: 2 records, 200B",
        "  holds 8KiB of memory and 4KiB of disk, slots included; floor 0.1, cap 0.8 of each",
        "  evicted for another namespace's sake, from: 3 memory",
        "  reservations cut short, because: 5 store_shed, 2 over_quota",
    ]


def test_nothing_is_said_of_no_quota() -> None:
    assert lines_of(floor=0.0, cap=1.0, evicted_for_others={}, refused={}) == [
        "0123  model=m",
        "  memory: 2 records, 200B",
    ]


def test_p63_a_disk_without_direct_io_is_said_to_be() -> None:
    totals = {"records": 0, "used_bytes": 0, "capacity_bytes": 4096}
    found = [
        _lines({"namespaces": [], "store": {"disk": {**totals, **more}}, "by_store": True})
        for more in ({"direct_io": True}, {"direct_io": False}, {})
    ]
    plain = ["disk in all: 0 records, 0B of 4KiB used"]
    assert found == [plain, [f"{plain[0]}, no direct I/O"], plain]
