"""The store: the verbs of ebbtide, over a memory tier and an optional disk tier.

One object, one control thread, no I/O of its own: blocking work goes to the runtime's threads and
comes back as calls. Everything that engines need is a public method here; what each may cost and
who may call it stands with it. All of them are called on the control thread and none waits. What
commands ask for is in `care`, what was counted in `ledger`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ebbtide.errors import MisuseError
from ebbtide.tiers.care import Care
from ebbtide.tiers.drain import Drain
from ebbtide.tiers.ledger import Ledger
from ebbtide.tiers.loads import Loads
from ebbtide.tiers.lookups import Lookups
from ebbtide.tiers.memory import MemoryTier, State
from ebbtide.tiers.mover import Mover
from ebbtide.tiers.namespaces import Namespaces
from ebbtide.tiers.pins import Pins
from ebbtide.tiers.placement import Placement
from ebbtide.tiers.quotas import Quotas
from ebbtide.tiers.reasons import Miss
from ebbtide.tiers.report import report_of, shares_of
from ebbtide.tiers.reservations import Reservations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ebbtide.tiers.admission import Admission
    from ebbtide.tiers.arena import Arena
    from ebbtide.tiers.bounds import Bounds
    from ebbtide.tiers.disk import DiskTier
    from ebbtide.tiers.index import StoredNamespace
    from ebbtide.tiers.load import Load, Sink
    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.reservations import Grant
    from ebbtide.tiers.runtime import Runtime, Timer


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
        quotas: Quotas | None = None,
    ) -> None:
        self.runtime = runtime
        self.arena = arena
        self.disk = disk
        self.bounds = bounds
        self.memory = MemoryTier(arena.capacity_bytes, alignment)
        self.ledger = Ledger(self.memory, bounds)
        self.namespaces = Namespaces(stored_namespaces, bounds.namespaces_max)
        self.quotas = quotas or Quotas()
        self.pins = Pins(self.memory, bounds.pinned_max_bytes)
        self.lookups = Lookups(self)
        self.placement = Placement(self)
        self._reservations = Reservations(self)
        self.loads = Loads(self)
        self.care = Care(self)
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
                on_progress=self.loads.slots_freed,
                on_refused=self.ledger.not_admitted,
            )
            self._listen(disk)
            self._save_later()

    # -- namespaces -----------------------------------------------------------------------------

    def open_namespace(
        self, pairs: list[list[object]], *, pending: bool = False, for_engine: bool = True
    ) -> Namespace:
        """The namespace of a descriptor; the same object for the same descriptor.

        `pending`: the engine does not know its content for sure yet; every key is a miss
        `namespace_pending` and nothing is stored until it opens the final descriptor. Only one that
        is opened `for_engine`, and not pending, is given its floor. Raises MisuseError, and
        NoSpaceError for one too many.
        """
        namespace = self.namespaces.open(pairs, pending=pending)
        if for_engine and not namespace.pending:
            self.quotas.give(namespace.digest, pairs)
        self._assign_quota(namespace)
        if self.disk is not None and not namespace.pending:
            stored = self.namespaces.to_store(namespace)
            if stored is not None:
                self.disk.adopt_namespace(stored)
        return namespace

    def namespace(self, handle: int) -> Namespace | None:
        """The namespace that `open_namespace` gave this handle to."""
        return self.namespaces.by_handle(handle)

    def find_namespace(self, digest: bytes) -> Namespace:
        """A namespace that an engine has opened, or that the directory knows. Raises MisuseError
        when there is none.
        """
        known = self.namespaces.by_digest(digest)
        if known is None:
            raise MisuseError(
                "The namespace is unknown to this store",
                next_step="`ebbtide stats` lists them.",
                namespace=digest.hex(),
            )
        opened = self.namespaces.by_epoch(known.epoch)
        return opened if opened is not None else self.open_namespace(known.descriptor)

    def held(self, namespace: Namespace) -> tuple[int, int]:
        """(records, payload bytes) that a new engine of this namespace finds. O(records held)."""
        return self.lookups.held(namespace)

    # -- lookup ---------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """One byte per key: a `Place` that holds it, or a `Miss` reason. Pure: changes nothing.

        A chain is of use up to its first gap: only so many missing keys as `REASONS_MAX` are
        looked into, the rest are `behind_miss`. O(keys); a millisecond or two for 8,192.
        """
        return self.lookups.states(namespace, keys)

    def miss_reason(self, namespace: Namespace, key: bytes) -> Miss:
        """Why a key that no tier holds is missing. Up to 0.1 ms: it is looked for in others too."""
        return self.lookups.reason(namespace, key)

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Recency, in every tier that holds them: once per admitted request, with its whole chain.

        From the last key to the first, so that a chain loses its tail first. O(keys).
        """
        self.lookups.touch(namespace, keys)

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
            self.ledger.tallies.of(namespace.epoch).refused[Miss.NAMESPACE_PENDING] += 1
            return [], Miss.NAMESPACE_PENDING
        return self._reservations.reserve(engine, namespace, keys, length)

    def commit(
        self, engine: bytes, sequences: Sequence[int], reply: Callable[[bytes], None]
    ) -> None:
        """The slots are whole and will not be written again: take digests, then publish them.

        `reply(codes)`: per sequence 0 when the record can be read from now on, else why not. A
        sequence that the engine does not hold is UNKNOWN. The digest is taken in an I/O thread.
        """
        self._reservations.commit(engine, sequences, reply)

    def commit_digests(self, engine: bytes, digests: Iterable[tuple[int, bytes]]) -> bytes:
        """The same for (sequence, digest) of whoever has taken them of what it copied.

        At once, and the store reads none of the bytes. One that is wrong is a miss at its first
        use. Returns the codes.
        """
        return self._reservations.commit_digests(engine, digests)

    def abort(self, engine: bytes, sequences: Sequence[int]) -> bytes:
        """The slots will not be written any more and were never published. Codes as `commit`'s."""
        codes = self._reservations.abort(engine, sequences)
        self.loads.slots_freed()
        return codes

    # -- load -----------------------------------------------------------------------------------

    def load(
        self,
        engine: bytes,
        namespace: Namespace,
        keys: Sequence[bytes],
        sink: Sink,
        *,
        to_verify: bool = False,
    ) -> Load:
        """Start to stream verified records to the sink, in roughly this order; see `Load`.

        May call the sink before it returns. Each key is named once. `to_verify`: the holder
        verifies what it has copied, before anybody uses it, and disputes what is wrong; so records
        in memory are granted at once. What comes from disk is verified here all the same.
        """
        return self.loads.start(engine, namespace, keys, sink, to_verify=to_verify)

    # -- leaving, reset, pins -------------------------------------------------------------------

    def engine_gone(self, engine: bytes) -> None:
        """Every process of the engine that mapped the arena has exited: free what it had.

        Nobody can write or read its slots any more. Its reserved slots are freed, its loads and its
        pins end.
        """
        self.ledger.counts["reclaimed_slots"] += self._reservations.engine_gone(engine)
        self.loads.engine_gone(engine)
        self.pins.engine_gone(engine)
        self.loads.slots_freed()

    def reset(self, namespace: Namespace | None, reply: Callable[[bool], None]) -> None:
        """Forget a namespace, or all.

        After `reply(True)` no old key is served again, ever: not by work that is under way now, and
        not after a kill right behind the answer.
        """
        if namespace is None:  # also what only the directory knows
            for closed in self.namespaces.closed():
                self.open_namespace(closed.descriptor, for_engine=False)
        targets = [namespace] if namespace is not None else list(self.namespaces)
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
        self.loads.slots_freed()

    def pin(self, engine: bytes, namespace: Namespace, keys: Iterable[bytes]) -> int:
        """Keep records in memory until `unpin`, or until the engine is gone. Returns how many are
        pinned by this call.

        Only records that memory holds whole; never more than `pinned_max_bytes` in all.
        """
        return self.pins.pin(engine, namespace.epoch, keys)

    def unpin(self, engine: bytes, namespace: Namespace, keys: Iterable[bytes]) -> int:
        """Undo one `pin` of the engine's own per key. Returns how many pins were given back."""
        given_back = self.pins.unpin(engine, namespace.epoch, keys)
        self.loads.slots_freed()
        return given_back

    # -- looking at it --------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Numbers for humans and metrics. O(open namespaces)."""
        return report_of(self)

    def view(self, record: MemoryRecord, length: int) -> memoryview:
        """The first `length` bytes of the record's slot."""
        return self.arena.view(record.offset, length)

    @property
    def reservations(self) -> int:
        """Records that engines are writing, and those whose digest is being taken."""
        return self.memory.in_state[State.RESERVED]

    def shares(self, namespace: Namespace | StoredNamespace) -> dict[str, Any]:
        """What a namespace holds of the tiers and may hold, for humans and metrics. O(1)."""
        return shares_of(self, namespace)

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
        else:
            Drain(self.runtime, self.memory, self.disk, self.mover, deadline_s, done)

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

    def replace_disk(self, disk: DiskTier, known: Sequence[StoredNamespace]) -> None:
        """Put a tier over newly opened files in the place of one that was down and is quiet.

        `known`: the namespaces in its index. What was reset or opened meanwhile is told to it. What
        the old tier lost is dirty in memory again, and is written. O(namespaces).
        """
        assert self.mover is not None
        assert self.disk is not None
        self.disk = disk
        self._listen(disk)
        self.mover.replace_disk(disk)
        epochs = {namespace.digest: namespace.epoch for namespace in known}
        for namespace in self.namespaces.stored():
            epoch = epochs.get(namespace.digest)
            if epoch is None:
                disk.adopt_namespace(namespace)
            elif epoch != namespace.epoch:
                disk.reset(epoch, namespace, lambda ok: None)
        for open_one in self.namespaces:
            self._assign_quota(open_one)
        self.mover.run()
        self.loads.slots_freed()

    # -- inside ---------------------------------------------------------------------------------

    def _assign_quota(self, namespace: Namespace) -> None:
        epoch, digest, pairs = namespace.epoch, namespace.digest, namespace.descriptor
        self.quotas.assign(self.memory.space.shares, epoch, digest, pairs)
        if self.disk is not None and not namespace.pending:
            self.quotas.assign(self.disk.space.shares, epoch, digest, pairs)

    def _reset_one(self, namespace: Namespace, settled: Callable[[bool], None]) -> None:
        old_epoch = namespace.epoch
        self.pins.drop_epoch(old_epoch)
        gone = list(self.memory.index(old_epoch).values())
        self.memory.forget(old_epoch)
        self.memory.space.shares.retire(old_epoch)
        stored = self.namespaces.renew(namespace)
        self._assign_quota(namespace)
        self.ledger.reset(old_epoch, namespace.epoch, gone)
        if self.disk is None:
            settled(True)
        else:
            self.disk.reset(old_epoch, stored, settled)

    def _listen(self, disk: DiskTier) -> None:
        disk.on_lost = self._disk_lost
        self.ledger.listen(disk, self.namespaces)

    def _disk_lost(self, epoch: int, key: bytes) -> None:
        """Memory may have it still: that copy is to be written again."""
        record = self.memory.find(epoch, key)
        if record is not None:
            self.memory.soil(record, self.runtime.now())
        self.ledger.lost(epoch, key)

    def _save_later(self) -> None:
        def save() -> None:
            assert self.disk is not None
            self.disk.save_recency(lambda ok: None)
            self._save_later()

        self._save_timer = self.runtime.call_later(self.bounds.lru_save_interval_s, save)
