"""One device block and the queue of the blocks that nobody references."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Block:
    """One block of the device pool. Only its pool and the free queue write to it.

    `block_id` is its index in the device tensors. `ref_count` counts the tables that list it and
    the holders that pinned it. `key` is its name while a lookup can find it, else None;
    `num_tokens` of its request lie before the end of what the key names. `is_null` marks the
    placeholder, which is never free, cached or counted. The links belong to `FreeBlockQueue`; a
    block outside the queue points at itself.
    """

    __slots__ = ("block_id", "is_null", "key", "next_free", "num_tokens", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        self.num_tokens = 0
        self.is_null = False
        self.prev_free: Block = self
        self.next_free: Block = self

    def __repr__(self) -> str:
        name = "-" if self.key is None else self.key.hex()[:8]
        return f"Block({self.block_id}, refs={self.ref_count}, key={name})"


class FreeBlockQueue:
    """The unreferenced blocks, next to be handed out first.

    A ring of links through the blocks themselves, closed by an anchor that is no block of the pool.
    Not a deque: a hit takes a block out of the middle, which must not cost a search, and nothing is
    allocated when a block joins.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._anchor = Block(-1)
        self._length = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """From the head. The queue must not change meanwhile."""
        block = self._anchor.next_free
        while block is not self._anchor:
            yield block
            block = block.next_free

    def peek(self, count: int) -> list[Block]:
        """Up to `count` blocks from the head, in order. Changes nothing. O(count)."""
        return list(islice(self, count))

    def pop(self, count: int) -> list[Block]:
        """Take `count` blocks off the head, in order. O(count).

        Raises MisuseError, and takes none, when there are fewer.
        """
        if not 0 <= count <= self._length:
            raise MisuseError("not enough free blocks", wanted=count, free=self._length)
        anchor = self._anchor
        block = anchor.next_free
        taken = []
        for _ in range(count):
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = block
            block = following
        anchor.next_free = block
        block.prev_free = anchor
        self._length -= count
        return taken

    def remove(self, block: Block) -> None:
        """Take one block out, wherever it stands. O(1). Raises MisuseError if it is not queued."""
        if block.next_free is block:
            raise MisuseError("the block is not in the free queue", block=block)
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = block
        self._length -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Join the tail, keeping the order given. O(1) each. MisuseError for a queued block."""
        self._insert(blocks, before=self._anchor)

    def prepend(self, blocks: Iterable[Block]) -> None:
        """Join the head; the first block given becomes the head. O(1) each. Raises likewise."""
        self._insert(blocks, before=self._anchor.next_free)

    def release(self, uncached: Sequence[Block], cached: Sequence[Block]) -> None:
        """Least recently used first: cached blocks join the tail. Nothing is lost by reusing the
        others, so they join the head (as vLLM 0.32).
        """
        if uncached:
            self._insert(uncached, before=self._anchor.next_free)
        if cached:
            self._insert(cached, before=self._anchor)

    def check_integrity(self) -> None:
        """Raise MisuseError when the links disagree. For tests. O(blocks)."""
        before = self._anchor
        for block in self:
            if block.prev_free is not before:
                raise MisuseError("the free queue's links disagree", before=before, after=block)
            before = block
        if self._anchor.prev_free is not before:
            raise MisuseError("the free queue's links disagree", before=before, after=self._anchor)

    def _insert(self, blocks: Iterable[Block], before: Block) -> None:
        last = before.prev_free
        for block in blocks:
            if block.next_free is not block:
                raise MisuseError("the block is already in the free queue", block=block)
            # Linked whole at every step, so that the error above leaves a sound queue.
            block.prev_free = last
            block.next_free = before
            last.next_free = before.prev_free = block
            last = block
            self._length += 1
