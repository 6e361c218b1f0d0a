"""The arena: host memory for records, one sealed memfd that the store and every worker map.

The memfd has no name: when the last process that holds it exits, the kernel frees it, whatever
killed them. Size seals make truncation under a mapping impossible, so no client can cause SIGBUS in
another.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from ebbtide.errors import ConfigError

HUGE_PAGE_BYTES = 2 << 20
_POPULATE_STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named in Python 3.11
_MFD_HUGE_2MB = 21 << 26

# mmap.madvise holds the GIL while the kernel works; a foreign call does not.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class Arena:
    """A mapped piece of shared memory. `view(offset, length)` is the record's bytes, no copy.

    Created by the store (`create`), attached by a worker with the fd that came over the socket
    (`attach`). Offsets are valid in every process that maps the same arena.
    """

    def __init__(self, fd: int, capacity_bytes: int, huge_pages: bool) -> None:
        self.fd = fd
        self.capacity_bytes = capacity_bytes
        self.huge_pages = huge_pages
        self._map = mmap.mmap(fd, capacity_bytes, flags=mmap.MAP_SHARED)
        # A forked child would keep the mapping alive and could still write into it.
        self._map.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, capacity_bytes: int) -> Arena:
        """A new arena of exactly `capacity_bytes`, in 2 MiB pages where they can be had.

        Raises ConfigError when the kernel does not give the memory.
        """
        fd, huge = _huge_memfd(capacity_bytes), True
        if fd is None:
            fd, huge = (
                os.memfd_create("ebbtide-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),
                False,
            )
        try:
            os.ftruncate(fd, capacity_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, capacity_bytes, huge)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                "The arena could not be mapped",
                next_step="Lower [memory] capacity or free memory.",
                capacity_bytes=capacity_bytes,
                reason=error.strerror,
            ) from error

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena whose fd another process sent. The arena owns the fd from now on."""
        return cls(fd, os.fstat(fd).st_size, huge_pages=False)

    def populate(self, start: int, length: int) -> None:
        """Have the kernel back a range with pages now instead of at first use.

        1-6 s/GiB on a fresh virtual machine, GIL released. From any thread, not after `close`.
        An older kernel refuses (EINVAL): pages then come at first use.
        """
        first_byte = ctypes.c_char.from_buffer(self._map, start)
        _madvise(ctypes.addressof(first_byte), length, _MADV_POPULATE_WRITE)
        del first_byte

    def populate_steps(self) -> list[tuple[int, int]]:
        """Ranges that together cover the arena, for populating it in parallel."""
        step, total = _POPULATE_STEP_BYTES, self.capacity_bytes
        return [(start, min(step, total - start)) for start in range(0, total, step)]

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes at `offset`. Valid until `close`."""
        return self._view[offset : offset + length]

    @property
    def buffer(self) -> memoryview:
        """The whole arena, for tensors that alias it."""
        return self._view

    def close(self) -> None:
        """Unmap. While tensors or views still alias the memory the mapping lives until they are
        gone.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self._view.release()
            self._map.close()
        except BufferError:  # whoever still aliases the memory holds the mapping now
            del self._view, self._map


def _huge_memfd(capacity_bytes: int) -> int | None:
    if capacity_bytes % HUGE_PAGE_BYTES or _free_huge_pages() * HUGE_PAGE_BYTES < capacity_bytes:
        return None
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | _MFD_HUGE_2MB
    try:
        return os.memfd_create("ebbtide-arena", flags)
    except OSError:
        return None


def _free_huge_pages() -> int:
    path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
