"""The compiled copier, where it was built: blocks of a device that is host memory, in one call.

`host_copy.c` is compiled when the package is installed and a C compiler is there; without one, and
with `EBBTIDE_PURE=1`, `copy` moves the same bytes by torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ebbtide.compiled import compiled_module
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ebbtide.kernels.layout import PagedLayout

    Int64s = NDArray[np.int64]

MODULE = "ebbtide.kernels._host_copy"

STREAM_BYTES_MIN = 2 << 20
"""A call that copies fewer may find them in a core's cache, and so may who reads them next."""
STREAM_FRAGMENT_MIN = 1 << 10
"""Below, most of a fragment is lines of which it has only a part."""
THREAD_BYTES_MIN = 1 << 20
"""What a thread must copy to be worth its start, some 50 us."""
THREADS_MAX = 64
NEVER = 1 << 62


class Copier(Protocol):
    """The compiled module. Its one function, as `host_copy.c` describes it."""

    def copy_blocks(
        self,
        fragments: Int64s,
        num_blocks: int,
        block_ids: Int64s,
        arena: int,
        arena_bytes: int,
        offsets: Int64s,
        record_bytes: int,
        to_blocks: bool,
        stream_from: int,
        threads: int,
    ) -> None:
        """Blocks into the records at `offsets`, or back with `to_blocks`.

        `fragments`: int64 [4, fragments], address in block 0, distance of the next block, length
        and place in the record, which must hold for `num_blocks` blocks. `arena`: the address that
        offsets count from. Fragments of `stream_from` bytes and more are stored past the caches.
        Raises ValueError before the first byte moves for ids and offsets that do not fit.
        """
        ...


def copy_on_host(
    layout: PagedLayout,
    block_ids: Int64s,
    flat: torch.Tensor,
    offsets: Int64s,
    *,
    to_blocks: bool,
) -> bool:
    """Copy records at `offsets` in `flat`, a 1-D uint8 host tensor. False: nothing was copied,
    torch has to.

    Ids and offsets must have been checked. The interpreter lock is free meanwhile. Raises
    MisuseError when a storage has become shorter than its blocks.

    Runs in as many threads as torch uses. Those may be bound to cores of their own, as vLLM's are
    on a CPU; threads that are made here share the cores of their maker. Where these are fewer,
    torch is left to it.
    """
    found = copier()
    if found is None:
        return False
    total = len(block_ids) * layout.record_bytes
    threads = max(1, min(torch.get_num_threads(), total // THREAD_BYTES_MIN, THREADS_MAX))
    if threads > 1 and threads > len(os.sched_getaffinity(0)):
        return False
    found.copy_blocks(
        _addresses(layout),
        layout.num_blocks,
        block_ids,
        flat.data_ptr(),
        flat.numel(),
        offsets,
        layout.record_bytes,
        to_blocks,
        STREAM_FRAGMENT_MIN if total >= STREAM_BYTES_MIN else NEVER,
        threads,
    )
    return True


def _addresses(layout: PagedLayout) -> Int64s:
    """The fragments as `copy_blocks` takes them, wherever the storages are by now. O(fragments)."""
    tensors, bases, strides, lengths, places = layout.columns
    starts, sizes = np.array(
        [(storage.data_ptr(), storage.untyped_storage().nbytes()) for storage in layout.storages],
        dtype=np.int64,
    ).T
    short = bases + (layout.num_blocks - 1) * strides + lengths > sizes[tensors]
    if short.any():
        raise MisuseError(
            "A registered tensor has lost memory",
            next_step="Register the tensors again after they are allocated anew",
            tensor=int(tensors[short.argmax()]),
        )
    return np.stack([starts[tensors] + bases, strides, lengths, places])


def is_right(found: Copier) -> bool:
    """Whether it moves the bytes that numpy moves, and no others: fragments of all alignments,
    through caches and past them, by one thread and by several whose shares are uneven.
    """
    lengths = np.array([1, 15, 16, 63, 64, 65, 127, 128, 200, 4096, 5000], dtype=np.int64)
    places = np.cumsum(lengths) - lengths
    strides = lengths + np.arange(len(lengths)) * 7
    num_blocks, record_bytes = 5, int(lengths.sum())
    bases = np.cumsum(strides * num_blocks) - strides * num_blocks + 3
    draw = np.random.default_rng(0)
    sources = [
        draw.integers(0, 256, size, dtype=np.uint8)
        for size in (int(bases[-1] + strides[-1] * num_blocks), 4 * record_bytes)
    ]
    ids = np.array([4, 0, 2], dtype=np.int64)
    offsets = np.array([2 * record_bytes + 5, 0, record_bytes + 1], dtype=np.int64)
    for to_blocks in (False, True):
        expected = [source.copy() for source in sources]
        for number, offset in zip(ids, offsets, strict=True):
            for base, stride, length, place in zip(bases, strides, lengths, places, strict=True):
                paged = slice(base + number * stride, base + number * stride + length)
                flat = slice(offset + place, offset + place + length)
                if to_blocks:
                    expected[0][paged] = sources[1][flat]
                else:
                    expected[1][flat] = sources[0][paged]
        for stream_from, threads in ((NEVER, 1), (0, 1), (64, 4)):
            pages, arena = (source.copy() for source in sources)
            table = np.stack([bases + pages.ctypes.data, strides, lengths, places])
            found.copy_blocks(
                table,
                num_blocks,
                ids,
                arena.ctypes.data,
                len(arena),
                offsets,
                record_bytes,
                to_blocks,
                stream_from,
                threads,
            )
            if not all(map(np.array_equal, (pages, arena), expected)):
                return False
    return True


copier = compiled_module(MODULE, is_right, "compiled copier")
"""The compiled copier, or None; see `compiled_module`. The first call takes a millisecond."""
