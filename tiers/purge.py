"""A namespace forgotten and its bytes overwritten, by a store that runs.

The order, so that no slot is overwritten that holds anything else:

1. every slot that has the namespace's bytes gets a pin: it is not handed out before that is back;
2. the namespace is reset: no record is found any more, and a commit makes that durable;
3. each slot is overwritten with zeros as soon as nobody else holds it (a load that copies from it,
   an engine that writes to it, a write to disk that is under way);
4. the slab is synced;
5. the pins are given back: arena slots are free at once, slab slots after the next commit.

Records that left before the purge are not in any index: what their slots held lies there until the
slots are used again.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.errors import EbbtideError, MisuseError, NoSpaceError, TierUnavailableError
from ebbtide.tiers.runs import RUN_BYTES_MAX, merge
from ebbtide.tiers.runtime import VERIFY, WRITE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.runs import Outcomes
    from ebbtide.tiers.store import Store

    Reply = Callable[[dict[str, Any] | EbbtideError], None]

RUNNING_MAX = 8
PIECE_RECORDS = 64  # overwritten by one batch for the threads, or one record
PIECE_BYTES = 8 << 20
LOOK_ROWS = 4096  # looked at in one call
LOOK_AGAIN_S = (0.005, 1.0)  # at first, and at the most
HELD_PATIENCE_S = 5.0  # for engines that hold arena slots, until the answer says so

_ZEROS = bytes(1 << 20)


class Purges:
    """The store's part for purging. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running = 0

    def purge(self, digest: bytes, reply: Reply) -> None:
        """Forget a namespace and overwrite what it held; `reply` once, when that is durable.

        O(records in memory) on the control thread, as a reset, and then pieces. Slots that an
        engine does not let go of are overwritten when it does, after the reply, which counts them.
        """
        known = self._store.namespaces.by_digest(digest)
        if known is None:
            raise MisuseError("The namespace is unknown to this store", digest=digest.hex())
        if self._running >= RUNNING_MAX:
            raise NoSpaceError("Too many purges are under way", next_step="Wait until one ends.")
        self._running += 1

        def ended(found: dict[str, Any] | EbbtideError) -> None:
            self._running -= 1
            reply(found)

        _Purge(self._store, self._store.open_namespace(known.descriptor, for_engine=False), ended)


class _Purge:
    def __init__(self, store: Store, namespace: Namespace, done: Reply) -> None:
        self._store = store
        self._runtime = store.runtime
        self._done: Reply | None = done
        self._disk = store.disk if store.disk is not None and not store.disk.down else None
        self._memory_left: list[MemoryRecord] = [*store.memory.index(namespace.epoch).values()]
        self._wiping = True  # until a look has found nothing to wipe
        for record in self._memory_left:
            store.memory.pin(record)
        nothing = np.zeros(0, np.int64)
        self._rows = self._disk.hold(namespace.epoch) if self._disk else nothing
        starts = range(0, len(self._rows), LOOK_ROWS)
        self._rows_left = deque(self._rows[at : at + LOOK_ROWS] for at in starts)
        lengths = self._disk.index.table.length[self._rows] if self._disk else nothing
        self._report: dict[str, Any] = {
            "memory_records": len(self._memory_left),
            "memory_bytes": sum(record.length for record in self._memory_left),
            "disk_records": len(self._rows),
            "disk_bytes": int(lengths.sum()),
        }
        self._error: EbbtideError | None = None
        self._disk_is_done = self._disk is None
        self._pause_s = {"memory": LOOK_AGAIN_S[0], "disk": LOOK_AGAIN_S[0]}
        self._since = self._runtime.now()
        store.reset(namespace, self._forgotten)

    def _forgotten(self, ok: bool) -> None:
        if not ok:
            self._fail("The namespace could not be forgotten for good: the disk tier is down")
        self._look_at_memory()
        if not self._disk_is_done:
            self._look_at_disk()

    def _fail(self, problem: str) -> None:
        """The disk's part ends here. Its slots stay pinned: a tier that is down frees none."""
        self._disk_is_done = True
        self._error = self._error or TierUnavailableError(
            problem, next_step="What was stored may still lie in the payload file."
        )

    def _later(self, part: str, look: Callable[[], None]) -> None:
        """Somebody else holds what is left: look again, ever more rarely."""
        self._runtime.call_later(self._pause_s[part], look)
        self._pause_s[part] = min(2 * self._pause_s[part], LOOK_AGAIN_S[1])

    # -- memory ---------------------------------------------------------------------------------

    def _look_at_memory(self) -> None:
        piece: list[MemoryRecord] = []
        size, rest = 0, []
        for number, record in enumerate(self._memory_left):
            if len(piece) == PIECE_RECORDS or size > PIECE_BYTES:
                rest += self._memory_left[number:]
                break
            if record.pins == 1:
                piece.append(record)
                size += record.stride
            else:
                rest.append(record)
        self._memory_left, self._wiping = rest, bool(piece)
        if piece:
            self._runtime.start(VERIFY, self._wipe, piece, lambda _: self._wiped(piece))
        elif rest:
            self._later("memory", self._look_at_memory)
        self._maybe_done()

    def _wipe(self, record: MemoryRecord) -> None:
        """In a thread. In pieces, because the interpreter's lock is held meanwhile."""
        slot = self._store.view(record, record.stride)
        for start in range(0, len(slot), len(_ZEROS)):
            part = slot[start : start + len(_ZEROS)]
            part[:] = _ZEROS[: len(part)]

    def _wiped(self, piece: list[MemoryRecord]) -> None:
        for record in piece:
            self._store.memory.unpin(record)
        self._store.loads.slots_freed()
        self._pause_s["memory"] = LOOK_AGAIN_S[0]
        self._look_at_memory()

    # -- disk -----------------------------------------------------------------------------------

    def _look_at_disk(self) -> None:
        disk = self._disk
        assert disk is not None
        if disk.down:
            self._fail("The disk tier went out of service before all was overwritten")
            self._maybe_done()
            return
        if not self._rows_left:
            disk.calls.start(WRITE, lambda _: disk.slab.sync(), [None], self._synced)
            return
        rows = self._rows_left.popleft()
        ready = np.flatnonzero(disk.index.held_alone(rows))[:PIECE_RECORDS]
        strides = [disk.index.stride(row) for row in rows[ready].tolist()]
        fits = max(1, int((np.cumsum(strides) <= PIECE_BYTES).sum()))
        mine, left = rows[ready[:fits]].tolist(), np.delete(rows, ready[:fits])
        if len(left) and mine:
            self._rows_left.appendleft(left)
        elif len(left):
            self._rows_left.append(left)
        if mine:
            offset_of = disk.index.table.offset_of
            self._overwrite([(offset_of[row], disk.index.stride(row)) for row in mine])
        else:
            self._later("disk", self._look_at_disk)

    def _overwrite(self, slots: list[tuple[int, int]]) -> None:
        disk = self._disk
        assert disk is not None
        zeros = memoryview(mmap.mmap(-1, RUN_BYTES_MAX))  # aligned for direct I/O
        parts = [
            (at, zeros[: min(RUN_BYTES_MAX, offset + stride - at)])
            for offset, stride in slots
            for at in range(offset, offset + stride, RUN_BYTES_MAX)
        ]
        runs, _ = merge(parts)

        def write(share: slice) -> Outcomes:
            return disk.slab.write_runs(runs[share])

        def written(outcomes: Outcomes) -> None:
            error = next((error for error in outcomes if error is not None), None)
            if error is not None:
                disk.go_down(f"a write failed: {error}")
            self._pause_s["disk"] = LOOK_AGAIN_S[0]
            self._look_at_disk()

        disk.calls.start_runs(WRITE, write, runs, written)

    def _synced(self, outcomes: Outcomes) -> None:
        disk = self._disk
        assert disk is not None
        if outcomes[0] is not None:
            disk.go_down(f"a sync failed: {outcomes[0]}")
            self._look_at_disk()
            return
        self._give_back(0)

    def _give_back(self, start: int) -> None:
        """The next few slots may be handed out again; the others later."""
        assert self._disk is not None
        end = start + PIECE_RECORDS
        self._disk.give_back(self._rows[start:end])
        if end < len(self._rows):
            self._runtime.call_later(0.0, lambda: self._give_back(end))
            return
        self._disk_is_done = True
        self._maybe_done()

    # -- the end --------------------------------------------------------------------------------

    def _maybe_done(self) -> None:
        """Answer when all is overwritten, or when only engines keep some of it."""
        if self._done is None or not self._disk_is_done or self._wiping:
            return
        patient = self._runtime.now() < self._since + HELD_PATIENCE_S
        if self._memory_left and patient and self._error is None:
            return
        done, self._done = self._done, None
        done(self._error or {**self._report, "held_slots": len(self._memory_left)})
