"""What a store says of itself in numbers, for humans and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ebbtide.tiers.ledger import DISK_COUNTS
from ebbtide.tiers.memory import State

if TYPE_CHECKING:
    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.index import StoredNamespace
    from ebbtide.tiers.mover import Mover
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.store import Store


def report_of(store: Store) -> dict[str, object]:
    """See `Store.stats`."""
    report: dict[str, object] = {
        "memory": _memory(store),
        "counts": dict(store.ledger.counts),
        "loads": len(store.loads),
        "reservations": store.reservations,
        "ghosts": len(store.ledger.ghosts),
        "events": store.ledger.event_sequence,
        "namespaces": {
            namespace.digest.hex(): store.shares(namespace) for namespace in store.namespaces
        },
    }
    if store.disk is not None and store.mover is not None:
        report["disk"] = _disk(store, store.disk, store.mover)
    return report


def shares_of(store: Store, namespace: Namespace | StoredNamespace) -> dict[str, Any]:
    """See `Store.shares`."""
    epoch = namespace.epoch
    quota = store.quotas.of(namespace.digest, namespace.descriptor)
    disk_bytes = store.disk.space.shares.used_of[epoch] if store.disk is not None else 0
    return {
        "memory_slot_bytes": store.memory.space.shares.used_of[epoch],
        "disk_slot_bytes": disk_bytes,
        "floor": quota.floor,
        "cap": quota.cap,
        **store.ledger.tallies.of(epoch).quota_labels(),
    }


def _memory(store: Store) -> dict[str, object]:
    memory, space = store.memory, store.memory.space
    return {
        "capacity_bytes": space.capacity_bytes,
        "used_bytes": space.used_bytes,
        "payload_bytes": space.payload_bytes,
        "padding_bytes": space.used_bytes - space.payload_bytes,
        "records": memory.in_state[State.WHOLE],
        "dirty_bytes": memory.dirty_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "pinned_bytes": memory.pinned_bytes,
        "kept_bytes": store.pins.kept_bytes,
        "kept_max_bytes": store.bounds.pinned_max_bytes,
        "huge_pages": store.arena.huge_pages,
    }


def _disk(store: Store, disk: DiskTier, mover: Mover) -> dict[str, object]:
    return {
        "capacity_bytes": disk.space.capacity_bytes,
        "used_bytes": disk.space.used_bytes,
        "payload_bytes": disk.space.payload_bytes,
        "records": disk.index.whole,
        **{name: store.ledger.disk_count(name) for name in DISK_COUNTS},
        "quarantined_bytes": disk.quarantined_bytes,
        "down": disk.down or "",
        "direct_io": disk.slab.direct,
        "demoted_bytes": mover.moved_bytes,
    }
