"""The seam between an engine and ebbtide: what an engine calls, on which half, and when.

Any engine plugs in here: the reference engine directly, vLLM through a thin adapter. The seam has
two halves, as engines do. The *scheduler half* lives beside the scheduler, decides and never
touches a tensor; the *worker half* lives beside the device tensors and copies. They talk through
`StepMetadata` (down) and `WorkerReport` (up) alone, so that they may live in different processes.

One engine step:

1. scheduler half: `matched_tokens` per waiting request, `on_allocated` per admitted one;
2. scheduler half: `build_step` once, also when nothing is scheduled;
3. worker half: `start_step` with that metadata, before the forward pass;
4. the forward pass;
5. worker half: `finish_step`, after the forward pass;
6. scheduler half: `on_report` with what the worker returned.

No method of either half waits for a socket, a disk or another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockRef(NamedTuple):
    """A device block and the hash of its content (the hash chain's bytes, no group suffix)."""

    block_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy device block `block_id` into the arena at `offset`, then commit `sequence`."""

    block_id: int
    offset: int
    sequence: int


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fetch the records named `block_hashes` into the device blocks `block_ids`, pairwise."""

    request_id: str
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What the scheduler half asks of the worker half in one step. Picklable."""

    arena_generation: int = 0
    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    cancelled: tuple[
        str, ...
    ] = ()  # requests whose loads should end early; they are still reported


class LoadResult(NamedTuple):
    """The end of one `LoadJob`: per block where its bytes came from, or why it failed.

    `sources[i]` is "memory" or "disk" for a block whose verified bytes are in the device block, and
    a miss reason (see `ebbtide.tiers.reasons`) otherwise. `loaded_blocks` counts the unbroken run
    of loaded blocks at the start: blocks behind the first failure must be recomputed.
    """

    request_id: str
    loaded_blocks: int
    sources: tuple[str, ...]


@dataclass(slots=True)
class WorkerReport:
    """What the worker half finished since the last report. Picklable."""

    stored: list[int] = field(default_factory=list)  # sequences whose commit was acknowledged
    dropped: list[int] = field(default_factory=list)  # sequences that were aborted or failed
    loads: list[LoadResult] = field(default_factory=list)
    bytes_by_edge: dict[str, int] = field(
        default_factory=dict
    )  # "device_to_memory", "memory_to_device"


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
        block_ids: Sequence[int],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """The request was admitted: `block_ids` are all its device blocks, in order.

        With `external_tokens` > 0 the load of the blocks behind `local_tokens` starts with the next
        `build_step`; the engine runs the request only after its `LoadResult` has come back. This is
        the moment at which the request's blocks are counted by source.
        """
        ...

    def build_step(self, newly_full: Sequence[BlockRef]) -> StepMetadata:
        """Plan this step's copies. `newly_full`: blocks whose last token was computed before it."""
        ...

    def on_report(self, report: WorkerReport) -> list[LoadResult]:
        """Settle what the worker finished. Returns the loads that ended, for the engine."""
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

    def finish_step(self) -> WorkerReport:
        """Everything that ended since the last call."""
        ...

    def close(self) -> None:
        """Wait for copies under way (bounded), give back slots, unmap the arena. Idempotent."""
        ...
