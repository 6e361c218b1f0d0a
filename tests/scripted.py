"""A scheduler half against a store whose answers the test writes itself. No engine, no tensor."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ebbtide.allocator import BlockPool, Request, pack_key
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import Completion
from ebbtide.connectors.client_interface import LOST
from ebbtide.connectors.offload.groups import KVGroups
from ebbtide.connectors.offload.scheduler import OffloadScheduler, SchedulerBounds
from ebbtide.connectors.reference.device_pool import GROUP, ReferencePool
from ebbtide.connectors.seam import BlockRef, StepMetadata, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ebbtide.connectors.offload.load_or_compute import LoadOrCompute
    from ebbtide.tiers.arena import Arena

RECORD_BYTES = 4096


class ScriptedClient:
    """Keeps what was asked; answers when the test says so."""

    def __init__(self) -> None:
        self.incarnation = 1
        self.arena_generation = 1
        self.arena: Arena | None = None
        self.load_window_bytes = 1 << 20
        self.asked: dict[int, wire.Message] = {}  # by ticket, unanswered
        self.told: list[wire.Message] = []
        self.completions: list[Completion] = []
        self.closed = False
        self._tickets = itertools.count(1)

    def submit(self, message: wire.Message) -> int:
        ticket = next(self._tickets)
        self.asked[ticket] = message
        return ticket

    def notify(self, message: wire.Message) -> None:
        self.told.append(message)

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("the scheduler half waits")

    def close(self) -> None:
        self.closed = True

    def open(self, kind: type[wire.Message]) -> list[wire.Message]:
        """Unanswered requests of a kind."""
        return [message for message in self.asked.values() if isinstance(message, kind)]

    def answer(self, kind: type[wire.Message], message: wire.Message) -> wire.Message:
        """Answer the oldest request of a kind; returns it."""
        ticket = next(t for t, asked in self.asked.items() if isinstance(asked, kind))
        self.completions.append(Completion(ticket, message, True))
        return self.asked.pop(ticket)

    def lose(self) -> None:
        """The store goes away."""
        self.completions += [Completion(ticket, LOST, True) for ticket in self.asked]
        self.asked.clear()

    def reach(self, *, arena_generation: int) -> None:
        """A store answers again; its namespace opens."""
        self.incarnation += 1
        self.arena_generation = arena_generation


class Bench:
    """A scheduler half, its pool, and a clock."""

    def __init__(
        self,
        *,
        blocks: int = 65,
        block_size: int = 16,
        groups: KVGroups | None = None,
        ranks: int = 1,
        writers: Mapping[int, int] | None = None,
        bounds: SchedulerBounds | None = None,
        lazy: bool = False,
        chooser: LoadOrCompute | None = None,
    ) -> None:
        """`blocks` are all of group 0, whatever other `groups` there are."""
        self.client = ScriptedClient()
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.now = 100.0
        self.half = OffloadScheduler(
            self.client,
            ReferencePool(self.pool),
            descriptor=[["model", "m"]],
            groups=groups or KVGroups.single(block_size, RECORD_BYTES),
            ranks=ranks,
            writers=writers,
            bounds=bounds or SchedulerBounds(),
            lazy=lazy,
            chooser=chooser,
            now=lambda: self.now,
        )
        self.open_namespace()

    def open_namespace(self) -> None:
        self.step()
        self.client.answer(wire.OpenNamespace, wire.NamespaceOpened(0, b"d" * 32, 0, 0))
        self.step()

    def step(self, newly_full: Sequence[BlockRef] = ()) -> StepMetadata:
        return self.half.build_step(newly_full)

    def arrive(self, name: str, length: int, seed: int = 0) -> list[bytes]:
        request = Request(name, [seed] * length, hash_block_size=self.block_size)
        self.half.on_new_request(name, request.block_hashes, length)
        return list(request.block_hashes)

    def held(self, codes: Sequence[int]) -> None:
        """Answer the oldest lookup: one code per key, group by group."""
        asked = self.client.answer(wire.Lookup, wire.States(bytes(codes)))
        assert isinstance(asked, wire.Lookup)
        assert len(asked.keys) == len(codes)

    def fill(self, count: int, seed: int = 0) -> list[BlockRef]:
        """`count` device blocks full of content, referenced by a request that is still running."""
        blocks = self.pool.allocate(count)
        for number, block in enumerate(blocks):
            self.pool.cache(block, pack_key(bytes([seed, number]) * 16, GROUP))
        return [BlockRef(block.block_id, block.key or b"") for block in blocks]

    def finish(self, refs: Sequence[BlockRef]) -> None:
        self.pool.free([self.pool.blocks[ref.block_id] for ref in reversed(refs)])

    def grant(self, first_sequence: int, count: int) -> None:
        grants = tuple((n * RECORD_BYTES, first_sequence + n) for n in range(count))
        self.client.answer(wire.Reserve, wire.Grants(0, grants))

    def copied(self, *sequences: int, rank: int = 0) -> None:
        """A rank has copied these."""
        self.half.on_report(WorkerReport(rank, copied=list(sequences)))

    def dropped(self, *sequences: int, rank: int = 0) -> None:
        """A rank will not copy these."""
        self.half.on_report(WorkerReport(rank, dropped=list(sequences)))

    def commit(self) -> tuple[int, ...]:
        """The oldest commit succeeds. Returns its sequences; nothing has heard of it yet."""
        ticket = next(t for t, m in self.client.asked.items() if isinstance(m, wire.Commit))
        asked = self.client.asked[ticket]
        assert isinstance(asked, wire.Commit)
        self.client.answer(wire.Commit, wire.Settled(bytes(len(asked.sequences))))
        return asked.sequences

    @property
    def pinned(self) -> int:
        """Blocks that are not free although nobody but the half holds them."""
        return len(self.pool.blocks) - 1 - self.pool.num_free_blocks
