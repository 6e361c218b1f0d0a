"""Opening and closing a store's parts, in order. Blocks: call it before anybody is served."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import ExitStack, closing
from functools import partial
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
    from ebbtide.tiers.directory import Geometry
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
        with ExitStack() as on_failure:
            on_failure.callback(self.directory.close)
            slab = wrap_slab(SlabFile(self.directory.slab_path, geometry.slab_bytes))
            on_failure.callback(slab.close)
            build = partial(
                DiskTier,
                runtime,
                slab,
                geometry=geometry,
                commit_batch_bytes=commit_batch_bytes
                or min(COMMIT_BATCH_BYTES_MAX, capacity_bytes // 64),
                commit_interval_s=commit_interval_s,
                records_max=records_max,
            )
            try:
                self._restore(build)
            except lmdb.Error as error:
                # A damaged index is never repaired: this is a cache.
                _log.error("The index cannot be used (%s): the disk tier starts empty", error)
                self.directory.forget_index()
                self._restore(build)
            on_failure.pop_all()
        self.direct = slab.direct
        if self.dropped:
            _log.warning("%d index entries were unusable and were dropped", self.dropped)

    def _restore(self, build: Callable[..., DiskTier]) -> None:
        """Open the index and fill a tier from it."""
        geometry = self.directory.geometry
        self._shrink_index(geometry)
        index = DurableIndex(self.directory.index_path, geometry.index_bytes)
        with ExitStack() as on_failure:
            on_failure.callback(index.close)
            self.tier = build(index=index)
            self.was_clean = self.directory.is_new or index.was_clean()
            self.namespaces: list[StoredNamespace] = index.namespaces()
            self.dropped = self.tier.restore(self.namespaces, index)
            index.mark_clean(False)
            on_failure.pop_all()

    def _shrink_index(self, geometry: Geometry) -> None:
        """After a cut of the capacity: LMDB gives no file space back, so the index is rewritten."""
        path = self.directory.index_path
        smaller = path + ".new"
        shutil.rmtree(smaller, ignore_errors=True)  # of an opening that crashed
        os.makedirs(path, mode=0o700, exist_ok=True)
        data = os.path.join(path, "data.mdb")
        if not os.path.exists(data) or os.path.getsize(data) <= geometry.index_bytes:
            return
        os.mkdir(smaller, 0o700)
        with (
            closing(DurableIndex(path, os.path.getsize(data))) as large,
            closing(DurableIndex(smaller, geometry.index_bytes)) as small,
        ):
            large.copy_to(small, geometry.slab_bytes, geometry.records_max)
        self.directory.replace_index(smaller)

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
        with ExitStack() as on_failure:
            if self.open_disk is not None:
                on_failure.callback(self.open_disk.close)
                on_failure.callback(self.open_disk.tier.close, clean=False)
            arena = Arena.create(memory.capacity_bytes)
            on_failure.pop_all()
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
