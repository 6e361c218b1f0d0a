"""The store: the verbs of ebbtide, over a memory tier and an optional disk tier.

One object, one control thread, no I/O of its own: blocking work goes to the runtime's threads and
comes back as calls. Everything that connectors need is a public method here; what each may cost
and who may call it stands with it. All of them are called on the control thread and none waits.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.digest import record_digest
from ebbtide.tiers.ghosts import Ghosts
from ebbtide.tiers.index import StoredNamespace
from ebbtide.tiers.load import Load, Sink
from ebbtide.tiers.memory import MemoryRecord, MemoryTier, State
from ebbtide.tiers.mover import Admission, Mover
from ebbtide.tiers.namespace import Namespace, namespace_digest
from ebbtide.tiers.reasons import Miss, Place, label
from ebbtide.tiers.runtime import VERIFY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ebbtide.tiers.arena import Arena
    from ebbtide.tiers.bounds import Bounds
    from ebbtide.tiers.disk import DiskRecord, DiskTier
    from ebbtide.tiers.runtime import Runtime, Timer

EPOCH_MAX = 2**32 - 1


class Grant(NamedTuple):
    """A slot to write, or `sequence` 0: the key is held or being put, there is nothing to do."""

    offset: int
    sequence: int


NOTHING_TO_DO = Grant(0, 0)


class Event(NamedTuple):
    """Something that became true of a key. `kind` is "stored", "evicted", "lost" or "reset"."""

    sequence: int
    kind: str
    epoch: int
    key: bytes
    place: Place


class Store:
    """All tiers of one host. Owns its parts: `close` closes them.

    `alignment` of arena slots and slab slots must agree, so that one view serves both media.
    """

    def __init__(
        self,
        runtime: Runtime,
        arena: Arena,
        disk: DiskTier | None,
        bounds: Bounds,
        *,
        stored_namespaces: Sequence[StoredNamespace] = (),
        alignment: int = 4096,
        admission: Admission | None = None,
    ) -> None:
        self.runtime = runtime
        self.arena = arena
        self.disk = disk
        self.bounds = bounds
        self.memory = MemoryTier(arena.capacity_bytes, alignment)
        self.ghosts = Ghosts(bounds.ghost_entries)
        self.counts: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=bounds.event_entries)
        self.event_sequence = 0
        self._stored = {namespace.digest: namespace for namespace in stored_namespaces}
        self._last_epoch = max((n.epoch for n in stored_namespaces), default=0)
        self._namespaces: dict[bytes, Namespace] = {}
        self._by_handle: list[Namespace] = []
        self._by_epoch: dict[int, Namespace] = {}
        self._sequence = 0
        self._reserved: dict[int, MemoryRecord] = {}
        self._holdings: dict[bytes, set[int]] = {}  # engine -> sequences that it may still write
        self._loads: dict[bytes, set[Load]] = {}
        self._load_engine: dict[Load, bytes] = {}
        self._slot_queue: deque[Load] = deque()
        self._woken = False
        self._user_pins: dict[MemoryRecord, int] = {}
        self._save_timer: Timer | None = None
        self.mover: Mover | None = None
        if disk is not None:
            self.mover = Mover(
                runtime,
                arena,
                self.memory,
                disk,
                bounds,
                admission=admission,
                on_progress=self.slots_freed,
                on_refused=self._not_admitted,
            )
            disk.on_evict = self._disk_evicted
            disk.on_lost = self._disk_lost
            self._save_later()

    # -- namespaces -----------------------------------------------------------------------------

    def open_namespace(self, pairs: list[list[object]], *, pending: bool = False) -> Namespace:
        """The namespace of a descriptor; the same object for the same descriptor.

        `pending`: the engine does not know its content for sure yet; every key is a miss
        `namespace_pending` and nothing is stored until it opens the final descriptor. Raises
        MisuseError.
        """
        digest = namespace_digest(pairs)
        namespace = self._namespaces.get(digest)
        if namespace is not None:
            if namespace.pending and not pending:
                namespace.pending = False
                self._keep_on_disk(namespace)
            return namespace
        known = self._stored.get(digest)
        epoch = known.epoch if known else self._new_epoch()
        namespace = Namespace(len(self._by_handle), digest, pairs, epoch, pending)
        if not pending:
            self._keep_on_disk(namespace)
        self._namespaces[digest] = namespace
        self._by_handle.append(namespace)
        self._by_epoch[epoch] = namespace
        return namespace

    def namespace(self, handle: int) -> Namespace | None:
        """The namespace that `open_namespace` gave this handle to."""
        return self._by_handle[handle] if 0 <= handle < len(self._by_handle) else None

    def held(self, namespace: Namespace) -> tuple[int, int]:
        """(records, payload bytes) that a new engine of this namespace finds. O(records held)."""
        lengths = {key: r.length for key, r in self._disk_index(namespace).items()}
        lengths.update({key: r.length for key, r in self.memory.index(namespace.epoch).items()})
        return len(lengths), sum(lengths.values())

    # -- lookup ---------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """One byte per key: a `Place` that holds it, or a `Miss` reason. Pure: changes nothing.

        O(keys), two dictionary lookups each.
        """
        if namespace.pending:
            return bytes([Miss.NAMESPACE_PENDING]) * len(keys)
        in_memory = self.memory.index(namespace.epoch)
        on_disk = self._disk_index(namespace)
        states = bytearray(len(keys))
        for number, key in enumerate(keys):
            record = in_memory.get(key)
            if record is not None and record.state is State.WHOLE:
                states[number] = Place.MEMORY
            elif key in on_disk:
                states[number] = Place.DISK
            elif record is not None:
                states[number] = Place.PENDING
            else:
                states[number] = self.miss_reason(namespace, key)
        return bytes(states)

    def miss_reason(self, namespace: Namespace, key: bytes) -> Miss:
        """Why a key that no tier holds is missing. O(open namespaces)."""
        reason = self.ghosts.reason(namespace.epoch, key)
        if reason is not Miss.NEVER_SEEN:
            return reason
        for other in self._by_handle:
            if other is not namespace and (
                key in self.memory.index(other.epoch) or key in self._disk_index(other)
            ):
                return Miss.OTHER_NAMESPACE
        return Miss.NEVER_SEEN

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Recency, in every tier that holds them: once per admitted request, with its whole chain.

        From the last key to the first, so that a chain loses its tail first. O(keys).
        """
        in_memory = self.memory.index(namespace.epoch)
        on_disk = self._disk_index(namespace)
        for key in reversed(keys):
            record = in_memory.get(key)
            if record is not None:
                self.memory.touch(record)
            below = on_disk.get(key)
            if below is not None and self.disk is not None:
                self.disk.touch(below)

    # -- reserve, commit, abort -----------------------------------------------------------------

    def reserve(
        self, engine: bytes, namespace: Namespace, keys: Sequence[bytes], length: int
    ) -> tuple[list[Grant], Miss | None]:
        """Slots for the first keys, in order, that nobody holds or is putting.

        Returns one `Grant` per key dealt with, never with a hole: fewer grants than keys means that
        the next one could not be had now, and the reason. The engine owns the slots until `commit`,
        `abort`, or until `engine_gone`. O(keys), plus evictions. Raises ConfigError for a record no
        tier can hold.
        """
        if namespace.pending:
            return [], Miss.NAMESPACE_PENDING
        stride = self.memory.space.stride(length)
        on_disk = self._disk_index(namespace)
        grants: list[Grant] = []
        for key in keys:
            if self.memory.find(namespace.epoch, key) is not None or key in on_disk:
                grants.append(NOTHING_TO_DO)
                continue
            record = None
            if self.memory.reserved_bytes + stride <= self._reservable_bytes(stride):
                record = self._place(namespace, key, length, State.RESERVED)
            if record is None:
                self.counts["reserve_busy"] += 1
                if self.mover is not None:
                    self.mover.press()
                return grants, Miss.BUSY
            self._reserved[record.sequence] = record
            self._holdings.setdefault(engine, set()).add(record.sequence)
            grants.append(Grant(self.memory.space.offset(record), record.sequence))
        return grants, None

    def commit(
        self, engine: bytes, sequences: Sequence[int], reply: Callable[[bytes], None]
    ) -> None:
        """The slots are whole and will not be written again: take digests, then publish.

        `reply(codes)`: per sequence 0 when the record can be read from now on, else why not. A
        sequence that the engine does not hold is UNKNOWN. The digest is taken in an I/O thread.
        """
        records = [self._take_back(engine, sequence) for sequence in sequences]
        mine = [record for record in records if record is not None]
        digests: dict[int, bytes] = {}

        def take(record: MemoryRecord) -> None:
            slot = self.view(record, record.slot_class.stride)
            slot[record.length :] = bytes(record.slot_class.stride - record.length)
            digests[record.sequence] = record_digest(slot[: record.length], record.seed)

        def taken(outcomes: list[BaseException | None]) -> None:
            codes = [self._publish(record, digests) for record in records]
            if self.mover is not None:
                self.mover.run()
            self.slots_freed()
            reply(bytes(codes))

        self.runtime.start(VERIFY, take, mine, taken)

    def abort(self, engine: bytes, sequences: Sequence[int]) -> bytes:
        """The slots will not be written any more and were never published. Codes as `commit`'s."""
        codes = bytearray()
        for sequence in sequences:
            record = self._take_back(engine, sequence)
            codes.append(Miss.UNKNOWN if record is None else 0)
            if record is not None:
                self._drop_reserved(record)
        self.slots_freed()
        return bytes(codes)

    # -- load -----------------------------------------------------------------------------------

    def load(self, engine: bytes, namespace: Namespace, keys: Sequence[bytes], sink: Sink) -> Load:
        """Start to stream verified records to the sink, in roughly this order; see `Load`.

        May call the sink before it returns. Each key is named once.
        """
        load = Load(self, namespace, keys, sink)
        self._loads.setdefault(engine, set()).add(load)
        self._load_engine[load] = engine
        load.advance()
        return load

    def load_ended(self, load: Load) -> None:
        """Called by the load itself when it is `done` or `over`, perhaps."""
        if load.done and load in self._slot_queue:
            self._slot_queue.remove(load)
            self.slots_freed()
        if load.over:
            engine = self._load_engine.pop(load, b"")
            self._loads.get(engine, set()).discard(load)

    # -- leaving, reset, pins -------------------------------------------------------------------

    def engine_gone(self, engine: bytes) -> None:
        """Every process of the engine that mapped the arena has exited: free what it had.

        Nobody can write or read its slots any more. Its reserved slots are freed, its loads end.
        """
        for sequence in list(self._holdings.pop(engine, ())):
            self._drop_reserved(self._reserved.pop(sequence))
            self.counts["reclaimed_slots"] += 1
        for load in list(self._loads.pop(engine, ())):
            self._load_engine.pop(load, None)
            load.abandon()
        self.slots_freed()

    def reset(self, namespace: Namespace | None, reply: Callable[[bool], None]) -> None:
        """Forget a namespace, or all.

        After `reply(True)` no old key is served again, ever: not by work that is under way now, and
        not after a kill right behind the answer.
        """
        targets = [namespace] if namespace is not None else list(self._by_handle)
        if namespace is None:
            targets += self._adopt_stored()
        outstanding = len(targets)
        all_ok = True

        def settled(ok: bool) -> None:
            nonlocal outstanding, all_ok
            outstanding -= 1
            all_ok = all_ok and ok
            if outstanding <= 0:
                reply(all_ok)

        if not targets:
            settled(True)
        for target in targets:
            self._reset_one(target, settled)
        self.slots_freed()

    def pin(self, namespace: Namespace, keys: Iterable[bytes]) -> int:
        """Keep records in memory until `unpin`. Returns how many are pinned by this call.

        Only records that memory holds whole; never more than `pinned_max_bytes` in all.
        """
        pinned = 0
        for key in keys:
            record = self.memory.find(namespace.epoch, key)
            if record is None or record.state is not State.WHOLE:
                continue
            room = self.bounds.pinned_max_bytes - self._user_pinned_bytes()
            if record not in self._user_pins and record.slot_class.stride > room:
                break
            self._user_pins[record] = self._user_pins.get(record, 0) + 1
            self.memory.pin(record)
            pinned += 1
        return pinned

    def unpin(self, namespace: Namespace, keys: Iterable[bytes]) -> int:
        """Undo one `pin` per key. Returns how many pins were given back."""
        given_back = 0
        for key in keys:
            record = self.memory.find(namespace.epoch, key)
            if record is not None and record in self._user_pins:
                self._unpin_once(record)
                given_back += 1
        self.slots_freed()
        return given_back

    # -- looking at it --------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Numbers for humans and metrics. O(1)."""
        memory, disk = self.memory, self.disk
        report: dict[str, object] = {
            "memory": {
                "capacity_bytes": memory.space.capacity_bytes,
                "used_bytes": memory.space.used_bytes,
                "payload_bytes": memory.space.payload_bytes,
                "padding_bytes": memory.space.used_bytes - memory.space.payload_bytes,
                "records": memory.records,
                "dirty_bytes": memory.dirty_bytes,
                "reserved_bytes": memory.reserved_bytes,
                "pinned_bytes": memory.pinned_bytes,
                "huge_pages": self.arena.huge_pages,
            },
            "counts": dict(self.counts),
            "loads": len(self._load_engine),
            "ghosts": len(self.ghosts),
        }
        if disk is not None and self.mover is not None:
            report["disk"] = {
                "capacity_bytes": disk.space.capacity_bytes,
                "used_bytes": disk.space.used_bytes,
                "payload_bytes": disk.space.payload_bytes,
                "records": disk.records,
                "write_bytes": disk.write_bytes,
                "read_bytes": disk.read_bytes,
                "corrupt": disk.corrupt,
                "evicted": disk.evicted,
                "lost_batches": disk.lost_batches,
                "down": disk.down or "",
                "demoted_bytes": self.mover.moved_bytes,
            }
        return report

    def events_since(self, sequence: int) -> list[Event]:
        """Events after `sequence`, oldest first; a gap at the start: some were dropped."""
        return [event for event in self.events if event.sequence > sequence]

    def check_integrity(self) -> None:
        """Raise MisuseError when any tier contradicts itself. O(slots); for tests and `fsck`."""
        self.memory.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()

    # -- draining, closing ----------------------------------------------------------------------

    def drain(self, deadline_s: float, done: Callable[[bool], None]) -> None:
        """Write to disk what only memory holds. `done(everything is durable)`, by the deadline."""
        if self.disk is None or self.mover is None:
            done(not self.memory.dirty)
            return
        disk, mover = self.disk, self.mover
        until = self.runtime.now() + deadline_s

        def flushed(ok: bool) -> None:
            if not ok or (not self.memory.dirty and mover.idle):
                disk.save_recency(lambda saved: done(ok and saved))
            else:
                look()

        def look() -> None:
            if disk.down or self.runtime.now() > until:
                done(False)
            elif self.memory.dirty or not mover.idle:
                mover.drain()
                self.runtime.call_later(0.005, look)
            else:
                disk.flush(flushed)

        look()

    def flush(self, done: Callable[[bool], None]) -> None:
        """`done(True)` when every disk write and reset before this call is durable."""
        if self.disk is None:
            done(True)
        else:
            self.disk.flush(done)

    def close(self, clean: bool) -> None:
        """Close the tiers' files and unmap the arena. `clean`: `drain` said that all is durable."""
        if self._save_timer is not None:
            self._save_timer.cancel()
        if self.disk is not None:
            self.disk.close(clean)
        self.arena.close()

    # -- for Load -------------------------------------------------------------------------------

    def view(self, record: MemoryRecord, length: int) -> memoryview:
        """The first `length` bytes of the record's slot."""
        return self.arena.view(self.memory.space.offset(record), length)

    def place_for_load(
        self, load: Load, namespace: Namespace, key: bytes, length: int
    ) -> MemoryRecord | None:
        """A slot to read into, or None: the load is in the FIFO queue and will be advanced."""
        head = not self._slot_queue or self._slot_queue[0] is load
        record = self._place(namespace, key, length, State.READING) if head else None
        if record is None:
            if load not in self._slot_queue:
                self._slot_queue.append(load)
            if self.mover is not None:
                self.mover.press()
        elif self._slot_queue and self._slot_queue[0] is load:
            self._slot_queue.popleft()
            self.slots_freed()
        return record

    def promoted(self, record: MemoryRecord, on_disk: DiskRecord) -> None:
        """A verified record arrived from disk; the disk copy stays."""
        self.memory.publish(record, on_disk.digest, None)
        self.counts["promoted"] += 1
        self._event("stored", record.epoch, record.key, Place.MEMORY)

    def promotion_failed(self, record: MemoryRecord, reason: Miss) -> None:
        """The slot never became a record."""
        if not record.doomed:
            self.memory.discard(record)
            self.ghosts.remember(record.epoch, record.key, reason)
        self.counts[label(reason)] += 1

    def memory_corrupt(self, record: MemoryRecord) -> None:
        """The record's bytes in the arena no longer verify: a miss from now on."""
        self.counts["memory_corrupt"] += 1
        if not record.doomed:
            self.memory.discard(record)
            self.ghosts.remember(record.epoch, record.key, Miss.CORRUPT)
            self._event("lost", record.epoch, record.key, Place.MEMORY)

    def slots_freed(self) -> None:
        """Something may fit now: advance the loads that wait for slots, once, soon."""
        if self._slot_queue and not self._woken:
            self._woken = True
            self.runtime.call_later(0.0, self._advance_waiting)

    def _advance_waiting(self) -> None:
        self._woken = False
        while self._slot_queue:
            head = self._slot_queue[0]
            head.advance()
            if self._slot_queue and self._slot_queue[0] is head:
                return

    # -- inside ---------------------------------------------------------------------------------

    def _disk_index(self, namespace: Namespace) -> dict[bytes, DiskRecord]:
        if self.disk is None or self.disk.down:
            return {}
        return self.disk.index(namespace.epoch)

    def _reservable_bytes(self, stride: int) -> int:
        """Stores leave at least one slot, and `load_reserve_bytes`, to loads."""
        return self.memory.space.capacity_bytes - max(stride, self.bounds.load_reserve_bytes)

    def _place(
        self, namespace: Namespace, key: bytes, length: int, state: State
    ) -> MemoryRecord | None:
        self._sequence += 1
        record = MemoryRecord(namespace, key, self._sequence, state)
        while not self.memory.place(record, length):
            victims = self.memory.space.victims(length, self._evictable)
            if not victims:
                return None
            for victim in victims:
                self._evict(victim)
        return record

    def _evictable(self, record: MemoryRecord) -> bool:
        """Whoever leaves memory has ebbed, as long as there is a disk to ebb to."""
        written = not record.dirty or self.disk is None or self.disk.down is not None
        return written and record.pins == 0

    def _evict(self, record: MemoryRecord) -> None:
        self.counts["memory_evicted"] += 1
        namespace = self._by_epoch.get(record.epoch)
        if namespace is None or record.key not in self._disk_index(namespace):
            self.ghosts.remember(record.epoch, record.key, Miss.EVICTED)
        self.memory.discard(record)
        self._event("evicted", record.epoch, record.key, Place.MEMORY)

    def _take_back(self, engine: bytes, sequence: int) -> MemoryRecord | None:
        holdings = self._holdings.get(engine)
        if holdings is None or sequence not in holdings:
            return None
        holdings.discard(sequence)
        return self._reserved.pop(sequence)

    def _drop_reserved(self, record: MemoryRecord) -> None:
        if not record.doomed:
            self.memory.discard(record)
        self.memory.unpin(record)

    def _publish(self, record: MemoryRecord | None, digests: dict[int, bytes]) -> int:
        if record is None:
            return Miss.UNKNOWN
        if record.doomed or record.sequence not in digests:
            reason = Miss.RESET if record.doomed else Miss.IO_ERROR
            self._drop_reserved(record)
            return reason
        since = None if self.disk is None else self.runtime.now()
        self.memory.publish(record, digests[record.sequence], since)
        self.memory.unpin(record)
        self.ghosts.forget(record.epoch, record.key)
        self.counts["stored"] += 1
        self._event("stored", record.epoch, record.key, Place.MEMORY)
        return 0

    def _reset_one(self, namespace: Namespace, settled: Callable[[bool], None]) -> None:
        old_epoch = namespace.epoch
        for record in [r for r in self._user_pins if r.epoch == old_epoch]:
            del self._user_pins[record]
            self.memory.unpin(record)
        gone = [*self.memory.index(old_epoch), *self._disk_index(namespace)]
        self.memory.forget(old_epoch)
        namespace.epoch = self._new_epoch()
        for key in gone:
            self.ghosts.remember(namespace.epoch, key, Miss.RESET)
        del self._by_epoch[old_epoch]
        self._by_epoch[namespace.epoch] = namespace
        stored = StoredNamespace(namespace.digest, namespace.epoch, namespace.descriptor)
        self._stored[namespace.digest] = stored
        self.counts["resets"] += 1
        self._event("reset", old_epoch, b"", Place.MEMORY)
        if self.disk is None:
            settled(True)
        else:
            self.disk.reset(old_epoch, stored, settled)

    def _keep_on_disk(self, namespace: Namespace) -> None:
        if namespace.digest not in self._stored and self.disk is not None:
            stored = StoredNamespace(namespace.digest, namespace.epoch, namespace.descriptor)
            self._stored[namespace.digest] = stored
            self.disk.adopt_namespace(stored)

    def _adopt_stored(self) -> list[Namespace]:
        """Namespaces that only the directory knows, for a reset of everything."""
        unknown = [s for s in self._stored.values() if s.digest not in self._namespaces]
        return [self.open_namespace(stored.descriptor) for stored in unknown]

    def _new_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    def _unpin_once(self, record: MemoryRecord) -> None:
        self._user_pins[record] -= 1
        if self._user_pins[record] == 0:
            del self._user_pins[record]
        self.memory.unpin(record)

    def _user_pinned_bytes(self) -> int:
        return sum(record.slot_class.stride for record in self._user_pins)

    def _disk_evicted(self, epoch: int, key: bytes) -> None:
        if self.memory.find(epoch, key) is None:
            self.ghosts.remember(epoch, key, Miss.EVICTED)
        self._event("evicted", epoch, key, Place.DISK)

    def _disk_lost(self, epoch: int, key: bytes) -> None:
        record = self.memory.find(epoch, key)
        if record is not None:
            self.memory.soil(record, self.runtime.now())
        self._event("lost", epoch, key, Place.DISK)

    def _not_admitted(self, record: MemoryRecord) -> None:
        self.ghosts.remember(record.epoch, record.key, Miss.NOT_ADMITTED)

    def _event(self, kind: str, epoch: int, key: bytes, place: Place) -> None:
        self.event_sequence += 1
        self.events.append(Event(self.event_sequence, kind, epoch, key, place))

    def _save_later(self) -> None:
        def save() -> None:
            assert self.disk is not None
            self.disk.save_recency(lambda ok: None)
            self._save_later()

        self._save_timer = self.runtime.call_later(self.bounds.lru_save_interval_s, save)
