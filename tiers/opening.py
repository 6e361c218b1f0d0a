"""Opening and closing a store's parts, in order. Blocks: call it before anybody is served."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import lmdb

from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.disk import DiskTier
from ebbtide.tiers.index import DurableIndex, StoredNamespace
from ebbtide.tiers.slab import SlabFile
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.config import Config
    from ebbtide.tiers.runtime import Runtime
    from ebbtide.tiers.slab import Slab

_log = logging.getLogger("ebbtide.tiers")

COMMIT_BATCH_BYTES_MAX = 64 << 20


class OpenDisk:
    """An open directory and the tier over it. `close` gives the lock back last."""

    def __init__(
        self,
        runtime: Runtime,
        path: str,
        capacity_bytes: int,
        *,
        commit_batch_bytes: int | None = None,
        commit_interval_s: float = 0.05,
        records_max: int | None = None,
        wrap_slab: Callable[[Slab], Slab] = lambda slab: slab,
    ) -> None:
        """Raises ConfigError when the directory cannot be used, OSError when the device fails.

        `wrap_slab` puts a fault injector between the tier and the file, for tests.
        """
        self.directory = Directory(path, capacity_bytes)
        geometry = self.directory.geometry
        try:
            slab = wrap_slab(SlabFile(self.directory.slab_path, geometry.slab_bytes))
            index = self._open_index()
            self.tier = DiskTier(
                runtime,
                slab,
                index,
                geometry,
                commit_batch_bytes=commit_batch_bytes
                or min(COMMIT_BATCH_BYTES_MAX, capacity_bytes // 64),
                commit_interval_s=commit_interval_s,
                records_max=records_max,
            )
            self.was_clean = self.directory.is_new or index.was_clean()
            self.namespaces: list[StoredNamespace] = index.namespaces()
            self.dropped = self.tier.restore(self.namespaces, index)
            index.mark_clean(False)
        except BaseException:
            self.directory.close()
            raise
        self.direct = slab.direct
        if self.dropped:
            _log.warning("%d index entries were unusable and were dropped", self.dropped)

    def _open_index(self) -> DurableIndex:
        """A damaged index is set aside: the tier starts empty rather than from a repair."""
        map_bytes = self.directory.geometry.index_bytes
        try:
            index = DurableIndex(self.directory.index_path, map_bytes)
            for _ in index.entries():
                pass
            return index
        except lmdb.Error as error:
            _log.error("The index cannot be read (%s): the disk tier starts empty", error)
            self.directory.forget_index()
            return DurableIndex(self.directory.index_path, map_bytes)

    def close(self) -> None:
        """After `DiskTier.close`."""
        self.directory.close()


class OpenStore:
    """A store with everything it stands on, from a configuration."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        *,
        disk_records_max: int | None = None,
        wrap_slab: Callable[[Slab], Slab] = lambda slab: slab,
    ) -> None:
        """Raises ConfigError for what a human has to change."""
        memory, disk = config.memory, config.disk
        self.open_disk: OpenDisk | None = None
        if disk is not None:
            self.open_disk = OpenDisk(
                runtime,
                disk.path,
                disk.capacity_bytes,
                commit_batch_bytes=disk.commit_batch_bytes,
                commit_interval_s=disk.commit_interval_s,
                records_max=disk_records_max,
                wrap_slab=wrap_slab,
            )
        try:
            arena = Arena.create(memory.capacity_bytes)
        except BaseException:
            if self.open_disk is not None:
                self.open_disk.tier.close(clean=False)
                self.open_disk.close()
            raise
        bounds = Bounds.for_capacity(
            memory.capacity_bytes,
            load_window_bytes=memory.load_window_bytes,
            load_reserve_ratio=memory.load_reserve_ratio,
            dirty_max_bytes=disk.dirty_max_bytes if disk else None,
            write_after_s=disk.write_after_s if disk else 30.0,
            write_queue_bytes=config.limits.write_queue_bytes,
            ghost_entries=config.limits.ghost_entries,
            lru_save_interval_s=disk.lru_save_interval_s if disk else 60.0,
            verify_memory=memory.verify == "all",
        )
        self.store = Store(
            runtime,
            arena,
            self.open_disk.tier if self.open_disk else None,
            bounds,
            stored_namespaces=self.open_disk.namespaces if self.open_disk else (),
        )

    def close(self, clean: bool) -> None:
        """Close everything, in order. `clean`: a drain said that all is durable."""
        self.store.close(clean)
        if self.open_disk is not None:
            self.open_disk.close()
