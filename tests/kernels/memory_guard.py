"""Memory checks for kernels that run in Triton's interpreter.

The interpreter itself checks nothing: a wild address ends the process, a small one too far goes
unseen. It also runs programs one after the other, so that races never show.

It replaces private methods of the interpreter, which have been the same from Triton 3.4 to 3.9.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray


class MemoryFault(AssertionError):
    """A kernel touched memory that it was not given, or that another program writes."""


class Traffic:
    """What kernels moved under a guard."""

    def __init__(self) -> None:
        self.load_bytes = 0
        self.store_bytes = 0


class _Ranges(NamedTuple):
    """Byte runs that may be touched, ascending and disjoint."""

    start: NDArray[np.uint64]
    end: NDArray[np.uint64]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Ranges:
        spans = sorted(span for tensor in tensors for span in _spans(tensor))
        merged: list[list[int]] = []
        for start, end in spans:
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        columns = np.array(merged, dtype=np.uint64).reshape(-1, 2)
        return cls(columns[:, 0].copy(), columns[:, 1].copy())

    def hold(self, addresses: NDArray[np.uint64], size: int) -> NDArray[np.bool_]:
        if not len(self.start):
            return np.zeros(addresses.shape, dtype=bool)
        after = np.searchsorted(self.start, addresses, side="right").astype(np.int64)
        inside = addresses + np.uint64(size) <= self.end[np.maximum(after - 1, 0)]
        return (after > 0) & inside


def _spans(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Where a tensor's elements lie: runs of bytes without a gap."""
    if not tensor.numel():
        return []
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if reach == tensor.numel():
        return [(tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size())]
    outer = max((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=tensor.stride)
    return [span for part in tensor.unbind(outer) for span in _spans(part)]


@contextlib.contextmanager
def memory_guard(
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    forbidden: Sequence[torch.Tensor] = (),
) -> Iterator[Traffic]:
    """Every load must fall inside `reads`, `writes` or a tensor that was passed to the launch,
    every store inside `writes` or a passed one, and none may begin inside `forbidden`. Raises
    MemoryFault otherwise, and when a program touches what another one of the same launch has
    stored.

    Tensors that a kernel reaches through a table of addresses must be listed.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    kind: Any = type(builder)
    executor: Any = interpreter.GridExecutor
    load, store, launch = kind.create_masked_load, kind.create_masked_store, executor.__call__
    traffic = Traffic()
    owners: dict[tuple[int, int], tuple[int, ...]] = {}  # (access size, place) to program
    readable = writable = _Ranges.of([])
    closed = _Ranges.of(forbidden)

    def touched(pointers: Any, mask: Any) -> tuple[NDArray[np.uint64], int]:
        addresses = np.atleast_1d(pointers.data).ravel()
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if mask is None:
            return addresses.astype(np.uint64), size
        chosen = np.broadcast_to(np.atleast_1d(mask.data).astype(bool).ravel(), addresses.shape)
        return addresses[chosen].astype(np.uint64), size

    def check(what: str, ranges: _Ranges, addresses: NDArray[np.uint64], size: int) -> None:
        program = tuple(builder.grid_idx)
        wrong = ~ranges.hold(addresses, size) | closed.hold(addresses, 1)
        if wrong.any():
            place = int(addresses[wrong][0])
            raise MemoryFault(f"{what} of {size} bytes at {place:#x} by program {program}")
        for word in np.unique(addresses // np.uint64(size)).tolist():
            owner = owners.get((size, word))
            if owner not in (None, program):
                raise MemoryFault(f"{what} at {word * size:#x}: program {owner} stored there")
            if what == "store":
                owners[size, word] = program

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        addresses, size = touched(pointers, mask)
        check("load", readable, addresses, size)
        traffic.load_bytes += len(addresses) * size
        return load(self, pointers, mask, *rest, **named)

    def checked_store(
        self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        addresses, size = touched(pointers, mask)
        check("store", writable, addresses, size)
        traffic.store_bytes += len(addresses) * size
        return store(self, pointers, value, mask, *rest, **named)

    def checked_launch(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal readable, writable
        passed = [one for one in (*arguments, *named.values()) if hasattr(one, "untyped_storage")]
        readable = _Ranges.of([*reads, *writes, *passed])
        writable = _Ranges.of([*writes, *passed])
        owners.clear()  # launches on one stream come one after the other
        return launch(self, *arguments, **named)

    kind.create_masked_load, kind.create_masked_store = checked_load, checked_store
    executor.__call__ = checked_launch
    try:
        yield traffic
    finally:
        kind.create_masked_load, kind.create_masked_store = load, store
        executor.__call__ = launch
