"""Opening and closing a store's parts, in order. Blocks: call it before anybody is served."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import lmdb

from ebbtide.errors import ConfigError, TierUnavailableError
from ebbtide.machine import free_disk_bytes
from ebbtide.tiers.admission import AdmitSecondUse
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.disk import DiskTier
from ebbtide.tiers.disk_health import DiskHealth, Reopened
from ebbtide.tiers.index import DurableIndex, StoredNamespace
from ebbtide.tiers.index_probe import index_is_sound
from ebbtide.tiers.quotas import Quotas, Rule
from ebbtide.tiers.restore import probe, restore
from ebbtide.tiers.shares import Quota
from ebbtide.tiers.slab import SlabFile
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.config import Config, FairnessConfig
    from ebbtide.tiers.directory import Geometry
    from ebbtide.tiers.runtime import Runtime
    from ebbtide.tiers.slab import Slab

_log = logging.getLogger("ebbtide.tiers")

COMMIT_BATCH_BYTES_MAX = 64 << 20
COMMIT_BATCH_SHARE = 32  # one batch gathers and one is committed: both fit what is kept spare
REOPENING_PATIENCE_S = 5.0


def quotas_of(fairness: FairnessConfig) -> Quotas:
    """The operator's rules, as the tiers read them."""
    rules = [
        Rule(
            rule.match,
            Quota(
                fairness.floor if rule.floor is None else rule.floor,
                fairness.cap if rule.cap is None else rule.cap,
            ),
        )
        for rule in fairness.namespace
    ]
    return Quotas(Quota(fairness.floor, fairness.cap), rules)


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
        quotas: Quotas | None = None,
        wrap_slab: Callable[[Slab], Slab] = lambda slab: slab,
        probe_index: Callable[[str], bool] = index_is_sound,
    ) -> None:
        """Raises ConfigError when the directory cannot be used, OSError when the device fails.

        `wrap_slab` puts a fault injector between the tier and the file, for tests; `probe_index`
        tells whether an index can be opened that was not closed in order.
        """
        self.directory = Directory(path, capacity_bytes)
        self._runtime = runtime
        self._wrap_slab = wrap_slab
        self._commit_batch_bytes = commit_batch_bytes or min(
            COMMIT_BATCH_BYTES_MAX, capacity_bytes // COMMIT_BATCH_SHARE
        )
        self._commit_interval_s = commit_interval_s
        self._records_max = records_max
        self._quotas = quotas
        self._reopening = threading.Lock()  # held by who opens: the directory is not given up then
        self._closed = False
        with ExitStack() as on_failure:
            on_failure.callback(self.directory.close)
            self._probe_index(probe_index)
            self._shrink_index(self.directory.geometry)
            try:
                self._open()
            except lmdb.DiskError as error:  # a full drive must not cost what it holds
                raise ConfigError(
                    "The file system has no room for the index",
                    next_step="Free space, or use another [disk] path.",
                    path=self.directory.index_path,
                    index_bytes=self.directory.geometry.index_bytes,
                    free_bytes=free_disk_bytes(path),
                    reason=str(error),
                ) from error
            except lmdb.Error as error:
                # A damaged index is never repaired: this is a cache.
                _log.error("The index cannot be used (%s): the disk tier starts empty", error)
                self.directory.forget_index()
                self._open()
            on_failure.pop_all()
        if self.dropped:
            _log.warning("%d index entries were unusable and were dropped", self.dropped)

    def reopen(self) -> Reopened:
        """Open everything but the lock anew, after the tier was abandoned. Blocks, in a thread.

        Raises what stands in the way: nothing is started over here, because a drive that is not
        well yet must not cost what it holds.
        """
        with self._reopening:
            if self._closed:
                raise TierUnavailableError("The store is closing", path=self.directory.path)
            self.directory.check_unchanged()
            self._open()
            with ExitStack() as on_failure:
                on_failure.callback(self.tier.abandon)
                probe(self.tier.space, self.tier.slab)
                on_failure.pop_all()
            return Reopened(self.tier, self.namespaces)

    def _probe_index(self, is_sound: Callable[[str], bool]) -> None:
        """Before this process maps it: see `index_probe`."""
        path = self.directory.index_path
        if not os.path.exists(os.path.join(path, "data.mdb")) or self.directory.index_is_untouched:
            return
        if not is_sound(path):
            _log.error("The disk tier starts empty")
            self.directory.forget_index()

    def check_drive(self) -> None:
        """One record's way to the drive and back. Blocks; before the tier serves.

        A drive that does not do that leaves memory alone to work, and is tried again later.
        """
        try:
            probe(self.tier.space, self.tier.slab)
        except OSError as error:
            self.tier.go_down(f"it did not take and give back a first record: {error}")

    def watch(self, store: Store) -> DiskHealth:
        """Keep an eye on the tier, and bring it back to its store."""
        return DiskHealth(
            self._runtime,
            self.tier,
            self.reopen,
            lambda reopened: store.replace_disk(reopened.tier, reopened.namespaces),
        )

    def _open(self) -> None:
        """Open slab and index and fill a tier from them."""
        geometry = self.directory.geometry
        with ExitStack() as on_failure:
            slab = self._wrap_slab(SlabFile(self.directory.slab_path, geometry.slab_bytes))
            on_failure.callback(slab.close)
            index = DurableIndex(
                self.directory.index_path, geometry.index_bytes, geometry.segment_bytes
            )
            on_failure.callback(index.close)
            tier = DiskTier(
                self._runtime,
                slab,
                index,
                geometry=geometry,
                commit_batch_bytes=self._commit_batch_bytes,
                commit_interval_s=self._commit_interval_s,
                records_max=self._records_max,
                quotas=self._quotas,
            )
            self.was_clean = self.directory.is_new or index.was_clean()
            self.namespaces: list[StoredNamespace] = index.namespaces()
            self.dropped = restore(tier, self.namespaces, index)
            index.mark_clean(False)
            on_failure.pop_all()
        self.tier, self.direct = tier, slab.direct

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
        segment_bytes = geometry.segment_bytes
        with (
            closing(DurableIndex(path, os.path.getsize(data), segment_bytes)) as large,
            closing(DurableIndex(smaller, geometry.index_bytes, segment_bytes)) as small,
        ):
            large.copy_to(small, geometry.slab_bytes, geometry.records_max)
        self.directory.replace_index(smaller)

    def close(self) -> None:
        """After `DiskTier.close`. While a thread hangs in an opening, the lock is left to the
        process's end: nobody else may write to the directory before that.
        """
        self._closed = True
        if not self._reopening.acquire(timeout=REOPENING_PATIENCE_S):
            return
        if self.tier.down is None:
            self.directory.say_goodbye()
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
        quotas = quotas_of(config.fairness)
        self.open_disk: OpenDisk | None = None
        if disk is not None:
            self.open_disk = OpenDisk(
                runtime,
                disk.path,
                disk.capacity_bytes,
                commit_batch_bytes=disk.commit_batch_bytes,
                commit_interval_s=disk.commit_interval_s,
                records_max=disk_records_max,
                quotas=quotas,
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
            store_window_bytes=config.limits.store_window_bytes,
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
            admission=AdmitSecondUse() if disk and disk.admission == "second_use" else None,
            quotas=quotas,
        )
        self.health: DiskHealth | None = None
        if self.open_disk is not None:
            self.open_disk.check_drive()
            self.health = self.open_disk.watch(self.store)

    def close(self, clean: bool) -> None:
        """Close everything, in order. `clean`: a drain said that all is durable."""
        if self.health is not None:
            self.health.close()
        self.store.close(clean)
        if self.open_disk is not None:
            self.open_disk.close()
