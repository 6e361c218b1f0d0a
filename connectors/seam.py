"""The seam between an engine and ebbtide: what an engine calls, on which half, and when.

Any engine plugs in here: the reference engine directly, vLLM through a thin adapter. The seam has
two halves, as engines do. The *scheduler half* lives beside the scheduler, decides and never
touches a tensor; the *worker half* lives beside the device tensors and copies. They talk through
`StepMetadata` (down) and `WorkerReport` (up) alone, so that they may live in different processes.

One engine step:

1. scheduler half: `matched_tokens` per waiting request, `on_allocated` per admitted one;
2. scheduler half: `build_step` once, also when nothing is scheduled;
3. worker halves: `start_step` with that metadata, before anything writes to a device block;
4. the forward pass;
5. worker halves: `finish_step`, after the forward pass;
6. scheduler half: `on_report` with what each worker returned.

No method of either half waits for a socket, a disk or another process.

A load layer by layer is used before it has ended, and counts when it has:

1. `finish_step`: a worker half says that a load arrives: the store has verified and granted every
   record, and the copies of all of them have been handed over. None has failed yet.
2. When every rank has said so, or has ended the load well, the scheduler half's `arrives` is true.
3. The engine may now run the request, and gives none of its blocks a name that others could find.
   Its forward pass calls `wait_for_layer` before it touches a layer's blocks.
4. `finish_step` reports the load's end. Behind a whole load the step counts like any other; behind
   any other end, or none, what the step made of that request is thrown away: the request runs
   again from what did come, and its blocks are given back only now, when no copy writes to them.

Steps 1 to 4 hold whatever goes wrong between them. A copy that fails in layer n: layers up to n - 1
are there, `wait_for_layer` returns for all others, the pass reads what happens to lie there, and 4
throws it away. A reset or an expiry in between: the end says that nothing is to be used. A fault in
`wait_for_layer` itself: the load ends as a failure, whatever its copies do. A rank that fails while
others do not: the end is that of the worst. A request that has no place in the step: it waits for
the load's end, as it would without layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockRef(NamedTuple):
    """A device block and the key of its content: block hash and KV group, packed."""

    block_id: int
    key: bytes


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy this rank's shard of device block `block_id` into the slot at `offset`.

    `sequence` is the slot's reservation: the scheduler half commits it when every rank has copied.
    """

    block_id: int
    offset: int
    sequence: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fetch this rank's shard of the records named `keys` into the blocks `block_ids`, pairwise.

    A key's group says whose block the id is. Without keys the load cannot be: it is reported as
    failed, because the engine waits for it.
    """

    request_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What the scheduler half asks of every rank's worker half in one step. Picklable."""

    arena_generation: int = 0
    namespace: int | None = None  # the store's handle; None while no namespace is open
    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    cancelled: tuple[str, ...] = ()  # requests whose loads shall end early; they are still reported
    void_loads: bool = False  # those under way are of a life that a reset has ended: they fail
    # Blocks that are being copied out of were handed out: wait for those copies before any write.
    settle_stores: bool = False
    # Per rank and group where its shard begins in a record. Empty: one rank, whole records.
    shard_offsets: tuple[tuple[int, ...], ...] = ()


class LoadResult(NamedTuple):
    """The end of one `LoadJob`: per block where its bytes came from, or why it failed.

    `sources[i]` is "memory" or "disk" for a block whose verified bytes are in the device block, and
    a miss reason (see `ebbtide.tiers.reasons`) otherwise. `loaded_blocks` counts the unbroken run
    of loaded blocks at the start: with one group, blocks behind the first failure must be
    recomputed; with several, the whole request.
    """

    request_id: str
    loaded_blocks: int
    sources: tuple[str, ...]


@dataclass(slots=True)
class WorkerReport:
    """What the worker half finished since the last report. Picklable."""

    rank: int = 0
    copied: list[int] = field(default_factory=list)  # sequences whose shard is whole in the arena
    dropped: list[int] = field(default_factory=list)  # sequences that will not be copied any more
    loads: list[LoadResult] = field(default_factory=list)
    bytes_by_edge: dict[str, int] = field(
        default_factory=dict
    )  # "device_to_memory", "memory_to_device"
    faults: int = 0  # of the worker half's hooks, since the last report
    pinned: bool | None = None  # copies go through locked memory; None: no GPU, or no copy yet
    arriving: list[str] = field(default_factory=list)  # requests whose loads arrive from now on


class SchedulerHalf(Protocol):
    """Control. Called from the scheduler's thread only; every call is short and never waits."""

    def on_new_request(
        self, request_id: str, block_hashes: Sequence[bytes], prompt_tokens: int
    ) -> None:
        """A request arrived. `block_hashes` cover its full prompt blocks; the keys go out now."""
        ...

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        """Tokens beyond the device's own hit of `local_tokens` that a load would bring.

        A multiple of the block size, and never the prompt's last token. None means: the answer has
        not arrived, ask again next step. Pure as far as the engine can see; asked again after a
        failed allocation.
        """
        ...

    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """The request was admitted: `block_ids` are its device blocks, per group and in order.

        Block 0 is nobody's: it stands where a window has passed.

        With `external_tokens` > 0 the load of the blocks behind `local_tokens` starts with the next
        `build_step`; the engine runs the request only after its `LoadResult` has come back. This is
        the moment at which the request's blocks are counted by source.
        """
        ...

    def build_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        """Plan this step's copies. `newly_full`: blocks whose last token was computed before it."""
        ...

    def on_report(self, report: WorkerReport) -> list[LoadResult]:
        """Settle what one rank finished. Returns the loads that ended on every rank by now."""
        ...

    def arrives(self, request_id: str) -> bool:
        """Whether the request may run already, if its forward pass waits for every layer."""
        ...

    def request_finished(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """The request ended (finished or aborted). Touches its chain, tail first."""
        ...

    def has_pending_work(self) -> bool:
        """True while copies are under way: the engine keeps stepping, also with empty steps."""
        ...

    def close(self) -> None:
        """Give up every pin and connection. Idempotent."""
        ...


class WorkerHalf(Protocol):
    """Copies. Called from the worker's thread only."""

    def start_step(self, metadata: StepMetadata) -> None:
        """Submit this step's loads and stores. Returns without waiting for any."""
        ...

    def wait_for_layer(self, group: int, layer: int) -> None:
        """In the forward pass, before it reads or writes blocks of this layer. As vLLM's
        `wait_for_layer_load`.

        `layer`: number of a tensor of the group's layout. Returns when the arriving loads have that
        layer there for whatever the device is given next, or have failed.
        """
        ...

    def finish_step(self) -> WorkerReport:
        """Everything that ended since the last call; of loads that were waited for, the end."""
        ...

    def close(self) -> None:
        """Wait for copies under way (bounded), give back slots, unmap the arena. Idempotent."""
        ...
