"""Several ranks with device tensors of their own over one real store. No engine."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from ebbtide.config import load_config
from ebbtide.connectors.local_client import LocalClient
from ebbtide.connectors.offload.groups import KVGroup, KVGroups
from ebbtide.connectors.offload.scheduler import OffloadScheduler, SchedulerBounds
from ebbtide.connectors.offload.worker import OffloadWorker
from ebbtide.connectors.seam import BlockRef
from ebbtide.kernels.copy import gather
from ebbtide.kernels.layout import PagedLayout
from ebbtide.sizes import exact_size
from ebbtide.tiers.device import device_copies
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ebbtide.connectors.seam import LoadResult, StepMetadata
    from ebbtide.tiers.device import DeviceCopies

HANG_S = 20.0
NUM_BLOCKS = 64
PATIENT = SchedulerBounds(lookup_timeout_s=10.0, pin_timeout_s=10.0, reserve_timeout_s=10.0)
ONE_GROUP = ((16, None),)
TWO_GROUPS = ((16, None), (32, 64))
SHAPES = ((2, 8), (1, 24), (3, 8), (4, 4))  # heads and their width per rank: shards differ


class PlainPool:
    """Device blocks whose content and order of eviction the test sets."""

    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        self.free: list[int] = []  # next to go first
        self.pins: list[int] = []

    def content(self, block_id: int) -> bytes | None:
        return self.contents.get(block_id)

    def free_mark(self) -> object:
        return object()  # always looked at

    def next_to_go(self, limit: int) -> list[BlockRef]:
        free = [block_id for block_id in self.free if block_id not in self.pins][:limit]
        return [BlockRef(b, self.contents[b]) for b in free if b in self.contents]

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pins.extend(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pins.remove(block_id)

    def hand_out(self, block_id: int) -> None:
        """Its content is nobody's any more: the next step writes to it."""
        assert block_id not in self.pins
        self.contents.pop(block_id, None)


class RankRig:
    """One scheduler half, `ranks` worker halves, their tensors, and the store."""

    def __init__(
        self,
        ranks: int = 1,
        groups: Sequence[tuple[int, int | None]] = ONE_GROUP,
        *,
        memory_bytes: int = 16 << 20,  # a segment for each size of records
        bounds: SchedulerBounds = PATIENT,
        copies: Callable[[Mapping[int, PagedLayout]], DeviceCopies] = device_copies,
    ) -> None:
        self.draw = torch.Generator().manual_seed(ranks)
        self.layouts = [
            {number: self._layout(rank, size) for number, (size, _) in enumerate(groups)}
            for rank in range(ranks)
        ]
        lengths = [
            [layouts[n].record_bytes for n in range(len(groups))] for layouts in self.layouts
        ]
        offsets = tuple(
            tuple(sum(row[n] for row in lengths[:rank]) for n in range(len(groups)))
            for rank in range(ranks)
        )
        self.groups = KVGroups(
            [
                KVGroup(n, size, sum(row[n] for row in lengths), window)
                for n, (size, window) in enumerate(groups)
            ],
            groups[0][0],
        )
        self.runtime = ThreadRuntime()
        config = load_config({"memory": {"capacity": exact_size(memory_bytes)}}).config
        self.opened = OpenStore(config, self.runtime)
        self.store = self.opened.store
        name = os.urandom(16)
        self.pool = PlainPool()
        self.control = LocalClient(self.store, self.runtime, name)
        self.scheduler = OffloadScheduler(
            self.control,
            self.pool,
            descriptor=[["model", "m"]],
            groups=self.groups,
            ranks=ranks,
            writers=dict.fromkeys(range(len(groups)), ranks),
            shard_offsets=offsets,
            bounds=bounds,
        )
        self.workers = [
            OffloadWorker(
                LocalClient(self.store, self.runtime, name),
                copies(layouts),
                rank=rank,
                load_timeout_s=HANG_S,
            )
            for rank, layouts in enumerate(self.layouts)
        ]
        self.ended: list[LoadResult] = []
        self.steps: list[StepMetadata] = []
        assert self.scheduler.ready

    def __enter__(self) -> RankRig:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
        self.runtime.run_ready()
        self.runtime.close()
        self.opened.close(clean=False)
        assert self.runtime.faults == 0

    def _layout(self, rank: int, block_size: int) -> PagedLayout:
        heads, width = SHAPES[rank]
        shape = (2, NUM_BLOCKS, block_size, heads, width)
        layers = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
        return PagedLayout.from_tensors(layers, block_dim=1)

    # -- device blocks --------------------------------------------------------------------------

    def write(self, group: int, block_id: int) -> list[bytes]:
        """New content in a block, on every rank. Returns it."""
        for layouts in self.layouts:
            for tensor in layouts[group].tensors:
                part = tensor[:, block_id]
                part.copy_(
                    torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=self.draw)
                )
        return self.read(group, block_id)

    def read(self, group: int, block_id: int) -> list[bytes]:
        """What a block holds, per rank."""
        found = []
        for layouts in self.layouts:
            record = torch.zeros(layouts[group].record_bytes, dtype=torch.uint8)
            gather(layouts[group], [block_id], [record])
            found.append(record.numpy().tobytes())
        return found

    def fill(
        self, keys: Sequence[bytes], first_block: int
    ) -> tuple[list[BlockRef], list[list[bytes]]]:
        """Computed blocks of these keys from `first_block` on, and what is in them."""
        refs = [BlockRef(first_block + n, key) for n, key in enumerate(keys)]
        written = [self.write(self.groups.of_key(ref.key).number, ref.block_id) for ref in refs]
        self.pool.contents.update((ref.block_id, ref.key) for ref in refs)
        return refs, written

    # -- steps ----------------------------------------------------------------------------------

    def step(
        self,
        newly_full: Sequence[BlockRef] = (),
        forward: Callable[[], object] = lambda: None,
        order: Sequence[int] | None = None,
    ) -> StepMetadata:
        """One engine step; `forward` writes to the device; ranks report in `order`."""
        metadata = self.scheduler.build_step(newly_full)
        self.steps.append(metadata)
        for worker in self.workers:
            worker.start_step(metadata)
        forward()
        for rank in order or range(len(self.workers)):
            self.ended += self.scheduler.on_report(self.workers[rank].finish_step())
        return metadata

    def step_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come to be"
            self.step()
            time.sleep(0.001)

    def settle(self) -> None:
        """Until nothing is under way."""
        self.step()
        self.step_until(lambda: not self.scheduler.has_pending_work())
        assert self.pool.pins == []

    @property
    def faults(self) -> int:
        """Hooks that raised."""
        return self.scheduler.faults.count + sum(worker.faults.count for worker in self.workers)
