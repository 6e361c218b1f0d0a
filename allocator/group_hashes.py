"""The names of a group's blocks where a block holds several hash blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

from ebbtide.errors import MisuseError


def group_hashes(block_hashes: Sequence[bytes], ratio: int) -> Sequence[bytes]:
    """The names of blocks that are `ratio` hash blocks long, as vLLM 0.32 names them.

    A request is hashed once, at the hash block size; block j of a group takes the last of its hash
    blocks' names, number `(j + 1) * ratio - 1`, which stands for all tokens before its end. What is
    returned is a view: it grows with `block_hashes` and copies nothing, O(1) an item. With ratio 1
    it is `block_hashes`. Raises MisuseError for a ratio that is not a positive int.
    """
    if type(ratio) is not int or ratio < 1:
        raise MisuseError("a block is a whole number of hash blocks, at least 1", ratio=ratio)
    return block_hashes if ratio == 1 else _GroupHashes(block_hashes, ratio)


class _GroupHashes(Sequence[bytes]):
    """Every `ratio`-th hash. A slice is a copy of what it selects and of nothing else."""

    __slots__ = ("_hashes", "_ratio")

    def __init__(self, hashes: Sequence[bytes], ratio: int) -> None:
        self._hashes = hashes
        self._ratio = ratio

    def __len__(self) -> int:
        return len(self._hashes) // self._ratio

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self._hashes[at] for at in self._places()[index]]
        return self._hashes[self._places()[index]]

    def __iter__(self) -> Iterator[bytes]:
        return islice(self._hashes, self._ratio - 1, None, self._ratio)

    def _places(self) -> range:
        """Where the names of the blocks that are whole now stand."""
        return range(self._ratio - 1, len(self) * self._ratio, self._ratio)
