"""What the halves need of an engine's pool of device blocks: one adapter an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.connectors.seam import BlockRef


class DevicePool(Protocol):
    """Called from the scheduler's thread, between two schedules. Every call is short."""

    @property
    def num_blocks(self) -> int:
        """How many device blocks there are."""
        ...

    def content(self, block_id: int) -> bytes | None:
        """The key of what the block holds, whole and computed; None once it may be overwritten.

        This is what a copy out of the block relies on: as long as the answer stays the same, nobody
        writes to the block.
        """
        ...

    def free_mark(self) -> object:
        """Changes whenever the head of the free queue does. Cheaper than to look at the blocks."""
        ...

    def next_to_go(self, limit: int) -> list[BlockRef]:
        """At most `limit` blocks that the pool hands out next, first come first."""
        ...

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from being handed out, by one reference each."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo one `pin` each. A chain's last block first, so that the pool evicts it first."""
        ...
