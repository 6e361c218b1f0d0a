"""The model of one seed's world: what engines have in hand, and what must hold of it at any time.

A dictionary of sets says which keys of a namespace were committed since its last reset. A cache may
forget any of them at any time, but what it serves must be one of them, byte for byte.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, TypeVar

from tests.books import assert_adds_up, survey_of
from tests.sim.plan import ALIGNMENT, Engine, Plan, Reading

from ebbtide.testing import FAULTS, Fault, SimStore
from ebbtide.tiers.digest import record_digest, record_seed
from ebbtide.tiers.memory import State

if TYPE_CHECKING:
    from ebbtide.tiers.load import Granted
    from ebbtide.tiers.namespace import Namespace

T = TypeVar("T")

NAMES = ("a", "b")
ENGINES = (b"engine-0", b"engine-1", b"engine-2")
HISTORY = 60
LIES = 0.7  # of the syncs of a device that lies


class Model:
    """Engines, store and what may be served. `check` raises AssertionError."""

    def __init__(self, seed: int, directory: str, plan: Plan | None = None) -> None:
        self.random = Random(seed)
        self.plan = plan or Plan.draw(self.random)
        self.sim = SimStore(
            self.random.getrandbits(32),
            self.plan.memory_bytes,
            disk_path=directory if self.plan.slab_bytes else None,
            slab_bytes=self.plan.slab_bytes,
            bounds=self.plan.bounds,
            reopens=True,
        )
        self.engines = [Engine(name) for name in ENGINES]
        self.served = self.spoilt = 0
        self.cut_now = False
        self.history: deque[str] = deque(maxlen=HISTORY)
        self.may_hold: dict[str, set[bytes]] = {name: set() for name in NAMES}
        self.unsure: dict[str, set[bytes]] = {name: set() for name in NAMES}  # reset, no answer yet
        self.damaged: set[tuple[str, bytes]] = set()  # may be wrong in the slab by our own doing
        self.pins: list[tuple[bytes, str, bytes]] = []  # engine, namespace and key
        self._contents: dict[tuple[str, bytes], bytes] = {}
        self._names: dict[int, str] = {}  # by reset epoch, old ones too
        self._reopened()

    # -- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        store = self.sim.store
        store.check_integrity()
        assert_adds_up(survey_of(store), at_rest=False)
        memory = store.memory
        assert memory.space.used_bytes <= memory.space.capacity_bytes
        written = [slot.span for engine in self.engines for slot in engine.slots.values()]
        held = sum(end - start for start, end in written)
        reserved = [r for r in memory.space.owners() if r.state is State.RESERVED]
        assert held <= sum(r.stride for r in reserved) == memory.reserved_bytes
        assert memory.reserved_bytes <= memory.space.capacity_bytes - ALIGNMENT
        if not self.plan.flips:
            assert store.ledger.counts["memory_corrupt"] == 0, "bytes changed by themselves"
            corrupt = store.disk.corrupt if store.disk else 0
            assert corrupt <= len(self.damaged), "bytes changed by themselves"
        for engine in self.engines:
            for reading in engine.readings:
                shown = [r for rs in reading.sink.open_batches.values() for r in rs]
                strides = [memory.space.stride(record.length) for record in shown]
                assert len(shown) <= 1 or sum(strides) <= store.bounds.load_window_bytes
                for record in shown:
                    self._bytes_are_right(reading, record)

    # -- inside ---------------------------------------------------------------------------------

    def namespace(self, name: str) -> Namespace:
        space = self.sim.namespace(name)
        self._names[space.epoch] = name
        return space

    def _arm_faults(self) -> None:
        rates = self.sim.rates  # of the device: a tier that comes back meets them too
        rates.clear()
        for fault in FAULTS["read"] if self.plan.read_faults else ():
            if self.plan.flips or fault is not Fault.FLIP:
                rates["read", fault] = self.plan.read_faults
        if self.plan.sync_fault is not None:
            rates["sync", self.plan.sync_fault] = LIES

    def _some(self, things: list[T]) -> list[T]:
        return self.random.sample(things, self.random.randint(0, len(things)))

    def _content(self, name: str, key: bytes, length: int) -> bytes:
        found = self._contents.get((name, key))
        if found is None:
            found = self.sim.content(self.namespace(name), key, length)
            self._contents[name, key] = found
        return found

    def _bytes_are_right(self, reading: Reading, record: Granted) -> bool:
        """False: they are wrong, and who verifies them sees it."""
        view = self.sim.store.arena.view(record.offset, record.length)
        key = reading.keys[record.position]
        if reading.to_verify and self._digest(reading.name, key, view) != record.digest:
            assert self.plan.flips, "bytes changed by themselves"
            return False
        assert view == self._content(reading.name, key, record.length), f"wrong bytes for {key!r}"
        return True

    def _digest(self, name: str, key: bytes, payload: bytes | memoryview) -> bytes:
        return record_digest(payload, record_seed(self.namespace(name).digest, key))

    def _nobody_else_has(self, span: tuple[int, int], *, readers_too: bool) -> None:
        taken = [slot.span for engine in self.engines for slot in engine.slots.values()]
        for engine in self.engines if readers_too else ():
            for reading in engine.readings:
                for granted in reading.sink.open_batches.values():
                    taken += [(r.offset, r.offset + r.length) for r in granted]
        overlaps = [other for other in taken if span[0] < other[1] and other[0] < span[1]]
        assert not overlaps, f"slot {span} has two holders: {overlaps}"

    def _foreign(self, engine: Engine) -> list[int]:
        other = self.random.choice(self.engines)
        return self._some(list(other.slots)) if other is not engine else []

    def _damage(self, epoch: int, key: bytes) -> None:
        # Also of an epoch that was reset: while no commit says so, a crash brings it back.
        self.damaged.add((self._names[epoch], key))

    def _all_engines_go(self) -> None:
        for engine in self.engines:
            for reading in engine.readings:
                reading.sink.open_batches.clear()
                reading.gone = True
            self.sim.store.engine_gone(engine.name)

    def _on_disk(self) -> set[tuple[int, bytes]]:
        disk = self.sim.store.disk
        return {(e, key) for e in disk.digests for key in disk.keys(e)} if disk else set()

    def _cut_power(self) -> None:
        self.sim.lose_power()
        if self.plan.sync_fault is not None:
            spoilt = self._records_in(self.sim.device.lost)
            self.damaged |= spoilt
            self.spoilt += len(spoilt)
        self._reopened()

    def _records_in(self, pieces: set[int]) -> set[tuple[str, bytes]]:
        """The records that lie in any of these pieces of the slab."""
        disk = self.sim.store.disk
        found = set[tuple[str, bytes]]()
        for name in NAMES if disk else ():
            for record in disk.index.records_of(self.namespace(name).epoch) if disk else ():
                if pieces.intersection(
                    range(record.offset, record.offset + record.length, ALIGNMENT)
                ):
                    found.add((name, record.key))
        return found

    def _reopened(self) -> None:
        """A new process over the old device: engines start anew, and no entry names bad bytes."""
        self.engines = [Engine(name) for name in ENGINES]
        self.pins.clear()
        for name in NAMES:
            self.may_hold[name] |= self.unsure[name]
            self.unsure[name].clear()
            self.namespace(name)
        self._arm_faults()
        disk, bad = self.sim.store.disk, set[tuple[str, bytes]]()
        for name in NAMES if disk else ():
            space = self.namespace(name)
            for record in disk.index.records_of(space.epoch) if disk else ():
                assert record.key in self.may_hold[name], "a key that was reset is back"
                payload = self.sim.device.image[record.offset : record.offset + record.length]
                if record_digest(payload, record_seed(space.digest, record.key)) != record.digest:
                    bad.add((name, record.key))
        assert bad <= self.damaged, f"entries that name bytes of something else: {bad}"
        self.damaged = bad
