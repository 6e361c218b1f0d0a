"""An arena that the device knows: registered in pieces, and given back in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ebbtide.errors import TierUnavailableError
from ebbtide.kernels.fragments import Copies

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ebbtide.kernels.driver import Driver

PIECE_BYTES_MAX = 64 << 30
"""Larger ranges fail to register on some systems, however much memory there is."""


class Registration:
    """Host memory `[address, address + size_bytes)`, registered with CUDA until `close`.

    Raises TierUnavailableError when a piece cannot be registered; those before it are given back.
    `piece_bytes` a multiple of the page size. One thread at a time.
    """

    def __init__(
        self,
        driver: Driver,
        address: int,
        size_bytes: int,
        *,
        piece_bytes: int = PIECE_BYTES_MAX,
    ) -> None:
        self._driver = driver
        self._pieces: list[int] = []
        try:
            for start in range(address, address + size_bytes, piece_bytes):
                driver.register(start, min(piece_bytes, address + size_bytes - start))
                self._pieces.append(start)
        except TierUnavailableError:
            self.close()
            raise

    @property
    def edges(self) -> NDArray[np.int64]:
        """Addresses that no copy may cross, ascending."""
        return np.array(self._pieces[1:], dtype=np.int64)

    def cut(self, copies: Copies) -> Copies:
        """The same copies, each within one piece. O(copies) a piece."""
        for edge in self.edges.tolist():
            crossing = (copies.records < edge) & (edge < copies.records + copies.lengths)
            if crossing.any():
                copies = _cut_at(copies, crossing, edge)
        return copies

    def close(self) -> None:
        """Give every piece back. Again: nothing. Copies must have ended."""
        while self._pieces:
            self._driver.unregister(self._pieces.pop())


def _cut_at(copies: Copies, crossing: NDArray[np.bool_], edge: int) -> Copies:
    before = np.where(crossing, edge - copies.records, copies.lengths)
    rest = before[crossing]
    tail = Copies(
        copies.blocks[crossing] + rest,
        copies.records[crossing] + rest,
        copies.lengths[crossing] - rest,
    )
    head = Copies(copies.blocks, copies.records, before)
    return Copies(*(np.concatenate(pair) for pair in zip(head, tail, strict=True)))
