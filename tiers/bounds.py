"""The store's named bounds: every queue, buffer, share and timeout, in bytes, seconds or counts."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Built from the configuration by whoever opens the store; `for_capacity` has the defaults."""

    load_window_bytes: int  # what one load may hold unacknowledged
    load_reserve_bytes: int  # memory that only loads may take
    dirty_max_bytes: int  # memory records that no disk tier holds yet
    write_after_s: float  # how long a memory record may stay without a disk copy
    write_queue_bytes: int  # memory pinned for disk writes under way
    pinned_max_bytes: int  # memory that `pin` may hold
    store_window_bytes: int  # what one engine may have reserved and not committed
    job_bytes: int = 16 * MIB  # one batch for the I/O threads
    ghost_entries: int = 1_000_000
    event_entries: int = 65_536
    namespaces_max: int = 4096  # open or on disk; more are refused
    lru_save_interval_s: float = 60.0
    verify_memory: bool = True  # check a record in memory before each grant

    @classmethod
    def for_capacity(
        cls,
        memory_bytes: int,
        *,
        load_window_bytes: int | None = None,
        load_reserve_ratio: float = 0.05,
        dirty_max_bytes: int | None = None,
        write_after_s: float = 30.0,
        write_queue_bytes: int = 128 * MIB,
        store_window_bytes: int | None = None,
        ghost_entries: int = 1_000_000,
        lru_save_interval_s: float = 60.0,
        verify_memory: bool = True,
    ) -> Bounds:
        """The design's defaults for an arena of `memory_bytes`."""
        quarter = memory_bytes // 4
        return cls(
            load_window_bytes=min(load_window_bytes or 256 * MIB, quarter),
            load_reserve_bytes=int(memory_bytes * load_reserve_ratio),
            dirty_max_bytes=min(dirty_max_bytes or 1024 * MIB, memory_bytes // 2),
            write_after_s=write_after_s,
            write_queue_bytes=min(write_queue_bytes, quarter),
            pinned_max_bytes=memory_bytes // 2,
            store_window_bytes=min(store_window_bytes or memory_bytes, memory_bytes),
            ghost_entries=ghost_entries,
            lru_save_interval_s=lru_save_interval_s,
            verify_memory=verify_memory,
        )
