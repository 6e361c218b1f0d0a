"""The loads of one store that have not ended, and which of them gets the next memory slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.tiers.digest import record_digest
from ebbtide.tiers.load import Load, Sink
from ebbtide.tiers.memory import State
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.runtime import VERIFY
from ebbtide.tiers.slot_queue import SlotQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.store import Store


class Loads:
    """The store's part for loads. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[bytes, dict[Load, None]] = {}  # by engine, in the order in which they came
        self._engine_of: dict[Load, bytes] = {}
        self._queue = SlotQueue()
        self._woken = False

    def __len__(self) -> int:
        return len(self._engine_of)

    def start(
        self,
        engine: bytes,
        namespace: Namespace,
        keys: Sequence[bytes],
        sink: Sink,
        *,
        to_verify: bool,
    ) -> Load:
        """See `Store.load`."""
        load = Load(self._store, namespace, keys, sink, to_verify=to_verify)
        self._of.setdefault(engine, {})[load] = None
        self._engine_of[load] = engine
        load.advance()
        return load

    def refused(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Nothing of it was begun: its client has too many loads open."""
        tally = self._store.ledger.tallies.of(namespace.epoch)
        tally.asked += len(keys)
        tally.failed_loads[Miss.BUSY] += len(keys)

    def ended(self, load: Load) -> None:
        """Called by the load itself when it is `done`, perhaps also `over`."""
        if load.over:
            engine = self._engine_of.pop(load, b"")
            self._of.get(engine, {}).pop(load, None)

    def engine_gone(self, engine: bytes) -> None:
        """Nobody reads for it any more: its loads end."""
        for load in list(self._of.pop(engine, ())):
            self._engine_of.pop(load, None)
            load.abandon()

    # -- what does not verify --------------------------------------------------------------------

    def doubt(self, records: Sequence[MemoryRecord]) -> None:
        """Copies of these records did not verify: verify the records themselves.

        A holder's word alone takes nothing from others: its copy may be what is wrong.
        """
        store = self._store
        for record in records:
            store.memory.pin(record)
        store.ledger.counts["disputed"] += len(records)

        def check(record: MemoryRecord) -> None:
            if record_digest(store.view(record, record.length), record.seed) != record.digest:
                wrong.append(record)

        def checked(outcomes: list[BaseException | None]) -> None:
            for record in wrong:
                self.found_corrupt(record)
            for record in records:
                store.memory.unpin(record)
            self.slots_freed()

        wrong: list[MemoryRecord] = []
        store.runtime.start(VERIFY, check, records, checked)

    def found_corrupt(self, record: MemoryRecord) -> None:
        """Its bytes in the arena do not verify any more: a miss from now on."""
        store = self._store
        if not record.doomed:
            store.memory.discard(record)
            store.pins.drop(record)
            store.ledger.corrupt(record)

    # -- slots ----------------------------------------------------------------------------------

    def place(
        self, load: Load, namespace: Namespace, key: bytes, length: int
    ) -> MemoryRecord | None:
        """A slot to read into, or None: the load is in the queue and will be advanced."""
        store, head = self._store, self._queue.head
        may = head is None or head is load
        record = store.placement.place(namespace, key, length, State.READING) if may else None
        if record is None:
            if not load.queued:
                load.queued = True
                self._queue.add(self._engine_of[load], load)
                self.slots_freed()  # the one at the head may wait for its own namespace only
            if store.mover is not None:
                store.mover.press()
        elif load.queued:
            self.leave_queue(load)
        return record

    def leave_queue(self, load: Load) -> None:
        """The load has its slot, or wants none any more: let the next one try."""
        load.queued = False
        self._queue.remove(load)
        self.slots_freed()

    def slots_freed(self) -> None:
        """Something may fit now: advance the loads that wait for slots, once, soon."""
        if self._queue and not self._woken:
            self._woken = True
            self._store.runtime.call_later(0.0, self._advance_waiting)

    def _advance_waiting(self) -> None:
        self._woken = False
        passed = 0  # engines whose namespace is at its cap: they hold nobody up
        while passed < max(1, self._queue.engines):
            head = self._queue.head
            if head is None:
                return
            head.advance()
            if self._queue.head is not head:
                passed = 0
            elif self._is_full(head):
                self._queue.pass_turn()
                passed += 1
            else:
                return

    def _is_full(self, load: Load) -> bool:
        """What the load waits for is room below its namespace's cap."""
        space = self._store.memory.space
        return space.shares.excess(load.epoch, space.stride(load.wanted_bytes)) > 0
