"""A real engine over a real store in this process, and what it must answer whatever happens."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Protocol

import torch

from ebbtide.allocator import Request, pack_key
from ebbtide.config import load_config
from ebbtide.connectors.offload.scheduler import SchedulerBounds
from ebbtide.connectors.reference import Engine, ModelConfig
from ebbtide.connectors.reference.connect import attach_local
from ebbtide.connectors.reference.device_pool import GROUP
from ebbtide.kernels.copy import gather
from ebbtide.kernels.layout import PagedLayout
from ebbtide.sizes import exact_size
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import ThreadRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ebbtide.config_schema import Layerwise
    from ebbtide.connectors.reference import RequestOutput
    from ebbtide.tiers.disk_record import DiskRecord
    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.slab import Slab

TINY = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128
)
BLOCK = 16
RECORD_BYTES = 8192
NEW_TOKENS = 12
PATIENT = SchedulerBounds(lookup_timeout_s=10.0)  # no miss because a machine is busy
HANG_S = 30.0


@contextmanager
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from threads, and lose much where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(length: int, seed: int) -> list[int]:
    """A text of its own for every seed."""
    draw = Random(seed)
    return [draw.randrange(97, 123) for _ in range(length)]


def conversations(seed: int, users: int, turns: int, *, opening: int = 60) -> list[list[int]]:
    """Prompts of users who come back, in a mixed order that keeps each user's turns in theirs.

    Each prompt is the one before it, continued; all begin alike.
    """
    draw = Random(seed)
    common = tokens(40, seed)
    texts = [common + tokens(opening, 1000 * seed + user) for user in range(users)]
    order = [user for user in range(users) for _ in range(turns)]
    draw.shuffle(order)
    prompts = []
    for number, user in enumerate(order):
        texts[user] = texts[user] + tokens(draw.randrange(5, 70), 7919 * seed + number)
        prompts.append(texts[user])
    return prompts


class HasTokens(Protocol):
    """An answer."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...


def answers(outputs: Iterable[HasTokens]) -> list[tuple[int, ...]]:
    """Only the tokens."""
    return [output.token_ids for output in outputs]


class Reference:
    """The answers of an engine without any cache; each is computed once."""

    def __init__(self, config: ModelConfig = TINY, *, seed: int = 0) -> None:
        self._engine = Engine(config, 600, enable_prefix_caching=False, seed=seed)
        self._known: dict[tuple[int, ...], RequestOutput] = {}

    def outputs(self, prompts: Sequence[list[int]]) -> list[RequestOutput]:
        """With logits."""
        new = {tuple(prompt) for prompt in prompts} - self._known.keys()
        for prompt in sorted(new):
            self._known[prompt] = self._engine.generate(
                [list(prompt)], NEW_TOKENS, keep_logits=True
            )[0]
        return [self._known[tuple(prompt)] for prompt in prompts]

    def answers(self, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
        return answers(self.outputs(prompts))


class Rig:
    """An engine, its two halves and their store, all in this process."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        memory_records: int = 256,
        disk: Path | None = None,
        block_size: int = BLOCK,
        budget: int = 512,
        bounds: SchedulerBounds = PATIENT,
        load_timeout_s: float = HANG_S,
        wrap_slab: Callable[[Slab], Slab] = lambda slab: slab,
        model: ModelConfig = TINY,
        layerwise: Layerwise = "auto",
    ) -> None:
        layers = model.num_layers // len(model.windows)
        self.record_bytes = RECORD_BYTES // TINY.num_layers * layers * block_size // BLOCK
        memory = exact_size(memory_records * self.record_bytes)
        settings: dict[str, object] = {"memory": {"capacity": memory}}
        if disk is not None:
            settings["disk"] = {"path": str(disk), "capacity": "32MiB"}
        self.runtime = ThreadRuntime()
        self.opened = OpenStore(load_config(settings).config, self.runtime, wrap_slab=wrap_slab)
        self.store = self.opened.store
        self.engine = Engine(model, blocks, block_size=block_size, max_batched_tokens=budget)
        self.halves = attach_local(
            self.engine,
            self.store,
            self.runtime,
            bounds=bounds,
            load_timeout_s=load_timeout_s,
            layerwise=layerwise,
        )
        self.scheduler, self.worker = self.halves

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- driving --------------------------------------------------------------------------------

    def ask(self, prompts: Sequence[list[int]], *, one_by_one: bool = True) -> list[RequestOutput]:
        """The engine's answers, with logits."""
        groups = [[prompt] for prompt in prompts] if one_by_one else [list(prompts)]
        return [
            output
            for group in groups
            for output in self.engine.generate(group, NEW_TOKENS, keep_logits=True)
        ]

    def settle(self) -> None:
        """Everything that is on its way down from the device has arrived in memory."""
        assert self.engine.drain(HANG_S)

    def forget_device(self) -> None:
        """The device holds nothing any more: no hash, and no byte that could pass for a right one.

        All blocks had to be free for it, so this also says that no pin is left.
        """
        self.settle()
        assert self.engine.reset_prefix_cache()
        for cache in self.engine.runner.kv_caches:
            cache.fill_(1e30)

    def write_out(self) -> None:
        """Everything in memory is on disk, durable."""
        ended: list[bool] = []
        self.settle()
        self.store.drain(HANG_S, ended.append)
        self.wait_for(lambda: bool(ended))
        assert ended == [True]

    def forget_memory(self) -> None:
        """Only the disk holds anything."""
        self.write_out()
        while records := self.memory_records():  # of a hash there is one for each KV group
            for record in records.values():
                self.store.memory.discard(record)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Let the store's threads work until something is true."""
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come to be"
            self.runtime.wait(0.01)
            self.runtime.run_ready()

    def close(self) -> None:
        """Faults inside the store fail the test here."""
        self.engine.close()
        self.runtime.run_ready()
        self.runtime.close()
        self.opened.close(clean=False)
        assert self.runtime.faults == 0

    # -- looking at it --------------------------------------------------------------------------

    @property
    def faults(self) -> int:
        """Hooks that raised."""
        return self.scheduler.faults.count + self.worker.faults.count

    def memory_records(self) -> dict[bytes, MemoryRecord]:
        """By block hash; of all namespaces."""
        found: dict[bytes, MemoryRecord] = {}
        for epoch in [namespace.epoch for namespace in self.store.namespaces]:
            found.update({key[:32]: r for key, r in self.store.memory.index(epoch).items()})
        return found

    def disk_records(self) -> dict[bytes, DiskRecord]:
        """By block hash."""
        assert self.store.disk is not None
        found: dict[bytes, DiskRecord] = {}
        for epoch in [namespace.epoch for namespace in self.store.namespaces]:
            found.update({r.key[:32]: r for r in self.store.disk.index.records_of(epoch)})
        return found

    def hashes(self, prompt: list[int]) -> list[bytes]:
        """Of the prompt's full blocks."""

        block_size = self.engine.block_size
        request = Request("hashes", prompt, hash_block_size=block_size)
        return list(request.block_hashes)

    def device_bytes(self, hashes: Sequence[bytes]) -> list[bytes]:
        """What the device holds under these names, b"" for nothing."""
        layout = self.worker._copies.layouts[GROUP]
        found = []
        for block_hash in hashes:
            block = self.engine.pool.get_cached_block(pack_key(block_hash, GROUP))
            record = torch.zeros(self.record_bytes, dtype=torch.uint8)
            if block is not None:
                gather(layout, [block.block_id], [record])
            found.append(record.numpy().tobytes() if block is not None else b"")
        return found

    def flip_in_memory(self, block_hash: bytes, byte: int = 4321) -> None:
        """One bit of a record in the arena is another from now on."""
        offset = self.memory_records()[block_hash].offset
        self.store.arena.view(offset + byte, 1)[0] ^= 0x10

    def flip_on_disk(self, block_hash: bytes, byte: int = 4321) -> None:
        """One bit of a record in the slab file is another from now on."""
        assert self.store.disk is not None
        assert self.opened.open_disk is not None
        offset = self.disk_records()[block_hash].offset + byte
        slab = os.open(self.opened.open_disk.directory.slab_path, os.O_RDWR)
        try:
            (old,) = os.pread(slab, 1, offset)
            os.pwrite(slab, bytes([old ^ 0x10]), offset)
            os.fsync(slab)
        finally:
            os.close(slab)

    def read_one_by_one(self) -> None:
        """Loads bring every record as a batch of its own, from a read of its own."""
        self.store.bounds = replace(self.store.bounds, job_bytes=self.record_bytes)

    def assert_idle(self) -> None:
        """No request, no copy, no pin is left on either side."""
        self.settle()
        assert self.engine.pool.num_free_blocks == len(self.engine.pool.blocks) - 1
        self.engine.kv.check_integrity()
        self.store.check_integrity()
        assert self.store.memory.reserved_bytes == 0
        self.wait_for(lambda: self.store.memory.pinned_bytes == 0)
        assert self.store.stats()["loads"] == 0

    def assert_adds_up(self, outputs: Sequence[RequestOutput]) -> None:
        """Every token and every block is counted once."""
        for output in outputs:
            assert_request_adds_up(output, self.engine.block_size)
        tally = self.scheduler.tally
        assert sum(tally.tokens_by_source.values()) == tally.prompt_tokens
        assert min([0, *tally.tokens_by_source.values(), *tally.misses.values()]) == 0
        served = sum(
            count // self.engine.block_size
            for source, count in tally.tokens_by_source.items()
            if source != "computed"
        )
        assert served + sum(tally.misses.values()) == tally.prompt_blocks


def assert_request_adds_up(output: RequestOutput, block_size: int = BLOCK) -> None:
    """Sources sum to the prompt's tokens; blocks that were served and missed, to its blocks."""
    sources = output.sources
    restored = sources.device + sources.memory + sources.disk
    assert min(sources.device, sources.memory, sources.disk, sources.computed) >= 0
    assert restored + sources.computed == output.prompt_tokens
    blocks = -(-output.prompt_tokens // block_size)
    assert restored // block_size + sum(output.misses.values()) == blocks


def layout_of(engine: Engine) -> PagedLayout:
    """How an engine's blocks lie in its tensors."""
    return PagedLayout.from_tensors(engine.runner.kv_caches, block_dim=1)
