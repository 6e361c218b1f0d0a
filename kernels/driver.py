"""The CUDA driver, reached through ctypes: many copies in one call, and memory made known to it.

Nothing is compiled: `libcuda.so.1` comes with every NVIDIA driver.

Facts (CUDA 12.8 to 13.x): `cuMemcpyBatchAsync` came with 12.8, in a form with `failIdx` that later
drivers still hand out to whoever asks for version 12080; the 13.0 form dropped that argument. It
refuses the legacy default stream. A copy may not cross the edge between two registered ranges.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import threading
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.errors import MisuseError, TierUnavailableError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
BATCH_VERSION = 12080
COPIES_PER_CALL_MAX = 1 << 16
LEGACY_STREAMS = (0, 1)  # NULL and CU_STREAM_LEGACY: they wait for, and hold up, all others

_SUCCESS, _NOT_SUPPORTED = 0, 801
_REGISTER_PORTABLE = 1  # known to every context of the process


class Order(IntEnum):
    """When the source may be read (`CUmemcpySrcAccessOrder`).

    STREAM: after what the stream holds, needed where the source is still being written. ANY: at
    once; for memory that nobody writes until the copy has ended.
    """

    STREAM = 1
    ANY = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_uint), ("id", c_int))


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes` of cuda.h."""

    _fields_ = (
        ("srcAccessOrder", c_uint),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", c_uint),
    )


_Batch = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p
)


_FUNCTIONS = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetProcAddress_v2": (c_char_p, c_void_p, c_int, c_uint64, c_void_p),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuGetErrorName": (c_int, c_void_p),
}


class Driver:
    """One loaded driver. Any thread, after `use` in that thread.

    Raises TierUnavailableError when there is no driver, or none that works.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise TierUnavailableError(
                "The CUDA driver cannot be loaded", library=library, reason=error
            ) from error
        for name, types in _FUNCTIONS.items():
            try:
                function = getattr(self._cuda, name)
            except AttributeError as error:
                raise TierUnavailableError(
                    "The CUDA driver is too old", next_step="Install CUDA 12.0 or newer", lacks=name
                ) from error
            function.argtypes, function.restype = types, c_int
        self.call("cuInit", 0)
        self._batch = self._find_batch()
        self._contexts: dict[int, c_void_p] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver, the interpreter lock free meanwhile.

        Raises TierUnavailableError with the driver's reason when it fails.
        """
        code = getattr(self._cuda, name)(*arguments)
        if code != _SUCCESS:
            raise TierUnavailableError("A CUDA call failed", call=name, reason=self._name(code))

    @property
    def batches(self) -> bool:
        """Many copies go in one call; else each is a call of its own."""
        return self._batch is not None

    def use(self, ordinal: int) -> None:
        """Make the device's primary context, the one that torch uses, current in this thread.

        Raises TierUnavailableError when the driver refuses.
        """
        with self._lock:
            context = self._contexts.get(ordinal)
            if context is None:
                device, context = c_int(), c_void_p()
                self.call("cuDeviceGet", ctypes.byref(device), ordinal)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = context
        self.call("cuCtxSetCurrent", context)

    def copy(
        self, targets: Int64s, sources: Int64s, lengths: Int64s, *, stream: int, order: Order
    ) -> None:
        """Queue copies of `lengths` bytes between addresses on `stream`; returns before they end.

        All three are contiguous int64 [copies] arrays. Raises MisuseError for a legacy default
        stream or arrays that do not fit, TierUnavailableError when the driver refuses; some of the
        copies may then be under way. Cost: expected to be some 0.5 us a copy on the
        calling thread, lock free; not measured yet.
        """
        if stream in LEGACY_STREAMS:
            raise MisuseError("Copies need a stream of their own", stream=stream)
        for column in (targets, sources, lengths):
            if column.dtype != np.int64 or column.shape != lengths.shape:
                raise MisuseError(
                    "Addresses and lengths must be int64 arrays of one length",
                    dtype=column.dtype,
                    shape=column.shape,
                )
        for start in range(0, len(lengths), COPIES_PER_CALL_MAX):
            part = slice(start, start + COPIES_PER_CALL_MAX)
            to, of, size = (np.ascontiguousarray(one[part]) for one in (targets, sources, lengths))
            if self._batch is None or not self._copy_batch(to, of, size, stream, order):
                self._copy_each(to, of, size, stream)

    def register(self, address: int, size_bytes: int) -> None:
        """Lock host memory and make it known to the device, so that copies from it are direct.

        Raises TierUnavailableError, with the limit of locked memory where that may be the reason.
        Cost: about 0.1 to 0.3 s a GiB.
        """
        code = self._cuda.cuMemHostRegister_v2(address, size_bytes, _REGISTER_PORTABLE)
        if code == _SUCCESS:
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise TierUnavailableError(
            "CUDA cannot lock this much system RAM (it is not GPU memory that lacks)",
            next_step="Lower memory.capacity, or let the process lock that much: "
            "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 "
            "for a container",
            reason=self._name(code),
            size_bytes=size_bytes,
            memlock_limit="unlimited" if soft == resource.RLIM_INFINITY else soft,
        )

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins at `address`. Waits for its copies."""
        self.call("cuMemHostUnregister", address)

    def _find_batch(self) -> ctypes._CFunctionType | None:
        found, status = c_void_p(), c_int(-1)
        code = self._cuda.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(found), BATCH_VERSION, 0, ctypes.byref(status)
        )
        if code != _SUCCESS or not found.value:
            _log.info("This CUDA driver has no batched copies: each copy is a call of its own")
            return None
        return _Batch(found.value)

    def _copy_batch(
        self, targets: Int64s, sources: Int64s, lengths: Int64s, stream: int, order: Order
    ) -> bool:
        """False: this device does not take batches."""
        assert self._batch is not None
        attributes, first, failed = Attributes(srcAccessOrder=order), c_size_t(0), c_size_t(0)
        code = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code == _NOT_SUPPORTED:
            _log.warning("The device takes no batched copies: each copy is a call of its own")
            self._batch = None
            return False
        if code != _SUCCESS:
            place = failed.value if failed.value < len(lengths) else -1
            raise TierUnavailableError(
                "The copy engine refused a batch",
                reason=self._name(code),
                copies=len(lengths),
                failed=place,
                length=int(lengths[place]),
            )
        return True

    def _copy_each(self, targets: Int64s, sources: Int64s, lengths: Int64s, stream: int) -> None:
        columns = (targets.tolist(), sources.tolist(), lengths.tolist())
        for target, source, length in zip(*columns, strict=True):
            self.call("cuMemcpyAsync", target, source, length, stream)

    def _name(self, code: int) -> str:
        name = c_char_p()
        if self._cuda.cuGetErrorName(code, ctypes.byref(name)) == _SUCCESS and name.value:
            return f"{name.value.decode()} ({code})"
        return str(code)
