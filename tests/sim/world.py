"""What engines, operators and fate do to a store. Everything is drawn from the seed."""

from __future__ import annotations

from tests.books import assert_adds_up, survey_of
from tests.sim.model import NAMES, Model
from tests.sim.plan import Reading, Slot

from ebbtide.testing import FAULTS, RecordingSink
from ebbtide.tiers.digest import DIGEST_BYTES
from ebbtide.tiers.memory import State
from ebbtide.tiers.reasons import Miss, Place
from ebbtide.tiers.runtime import COMMIT, DIGEST, READ, VERIFY, WRITE

CHAIN_MAX = 8


class World(Model):
    """`act` does one random thing; `finish` ends it all and looks for what is left over."""

    # -- what happens ---------------------------------------------------------------------------

    ACTIONS: tuple[tuple[str, int], ...] = (
        ("reserve", 120),
        ("commit", 200),
        ("abort", 10),
        ("scribble", 20),
        ("load", 200),
        ("ack", 250),
        ("release", 15),
        ("engine_gone", 3),
        ("reset", 6),
        ("touch", 40),
        ("pin", 15),
        ("unpin", 20),
        ("look_up", 30),
        ("flip_memory", 10),
        ("flip_disk", 20),
        ("break_device", 15),
        ("mend_device", 15),
        ("restart", 3),
        ("lose_power", 4),
        ("stall", 5),
        ("let_go", 30),
        ("pass_time", 30),
    )

    def act(self) -> None:
        """One action of somebody, then a few steps of the runtime."""
        names, weights = zip(*self.ACTIONS, strict=True)
        action = self.random.choices(names, weights)[0]
        self.history.append(action)
        getattr(self, action)()
        for _ in range(self.random.choice([0, 3, 10, 30])):
            if self.cut_now:  # right behind the answer to a reset
                self.cut_now = False
                self._cut_power()
            self.sim.runtime.step(jump=False)

    def chain(self) -> tuple[str, list[bytes], int]:
        """Keys of one namespace and one length, in chain order."""
        kind = self.random.randrange(len(self.plan.lengths))
        start = self.random.randrange(self.plan.keys) if self.random.random() < 0.7 else 0
        count = self.random.randint(0, CHAIN_MAX)
        numbers = range(start, min(start + count, self.plan.keys))
        keys = [n.to_bytes(32, "big") + kind.to_bytes(4, "big") for n in numbers]
        return self.random.choice(NAMES), keys, self.plan.lengths[kind]

    def reserve(self) -> None:
        engine, (name, keys, length) = self.random.choice(self.engines), self.chain()
        space = self.namespace(name)
        grants, reason = self.sim.store.reserve(engine.name, space, keys, length)
        assert len(grants) == len(keys) or reason is not None
        for key, (offset, sequence) in zip(keys, grants, strict=False):
            if sequence:
                slot = Slot(name, key, space.epoch, offset, length)
                self._nobody_else_has(slot.span, readers_too=True)
                engine.slots[sequence] = slot
                self.sim.store.arena.view(offset, length)[:] = b"\xab" * length

    def commit(self) -> None:
        engine = self.random.choice(self.engines)
        some = self._some(list(engine.slots))
        slots = [engine.slots.pop(sequence) for sequence in some]
        for slot in slots:
            view = self.sim.store.arena.view(slot.offset, slot.length)
            view[:] = self._content(slot.name, slot.key, slot.length)
            if slot.epoch == self.namespace(slot.name).epoch:
                self.may_hold[slot.name].add(slot.key)
        unknown = [2**40, *self._foreign(engine)]

        def answered(codes: bytes) -> None:
            assert all(code in (0, Miss.RESET) for code in codes[: len(some)])
            assert set(codes[len(some) :]) == {Miss.UNKNOWN}

        if self.random.random() < 0.5:
            self.sim.store.commit(engine.name, [*some, *unknown], answered)
            return
        digests = [self._digest_of(slot) for slot in slots] + [bytes(DIGEST_BYTES)] * len(unknown)
        rows = zip([*some, *unknown], digests, strict=True)
        answered(self.sim.store.commit_digests(engine.name, rows))

    def _digest_of(self, slot: Slot) -> bytes:
        """As an engine takes it, which is wrong now and then."""
        if self.plan.flips and self.random.random() < 0.05:
            self._damage(slot.epoch, slot.key)
            return self.random.randbytes(DIGEST_BYTES)
        return self._digest(slot.name, slot.key, self._content(slot.name, slot.key, slot.length))

    def abort(self) -> None:
        engine = self.random.choice(self.engines)
        some = self._some(list(engine.slots))
        codes = self.sim.store.abort(engine.name, [*some, *self._foreign(engine)])
        assert codes[: len(some)] == bytes(len(some))
        assert set(codes[len(some) :]) <= {Miss.UNKNOWN}
        for sequence in some:
            del engine.slots[sequence]

    def scribble(self) -> None:
        """A worker writes into what it has reserved, whatever became of the key meanwhile."""
        for engine in self.engines:
            for slot in engine.slots.values():
                self.sim.store.arena.view(slot.offset, slot.length)[:] = b"\xcd" * slot.length

    def load(self) -> None:
        engine, (name, keys, _) = self.random.choice(self.engines), self.chain()
        if self.random.random() < 0.1:
            keys = keys * 2  # a key asked for twice is named twice
        sink = RecordingSink(len(keys), on_batch=lambda batch, granted: self._granted(reading))
        reading = Reading(name, keys, sink, to_verify=self.random.random() < 0.5)
        engine.readings.append(reading)
        reading.load = self.sim.store.load(
            engine.name, self.namespace(name), keys, sink, to_verify=reading.to_verify
        )

    def _granted(self, reading: Reading) -> None:
        assert not reading.gone, "a batch for an engine that is gone"
        granted = reading.sink.open_batches[reading.sink.batches - 1]
        for record in granted:
            self.served += 1
            assert reading.keys[record.position] in self.may_hold[reading.name]
            self._bytes_are_right(reading, record)
            start, length = record.offset, record.length
            self._nobody_else_has((start, start + length), readers_too=False)

    def ack(self) -> None:
        engine = self.random.choice(self.engines)
        for reading in list(engine.readings):
            for batch in self._some(list(reading.sink.open_batches)):
                granted = reading.sink.acked(batch)
                right = [self._bytes_are_right(reading, record) for record in granted]
                assert reading.load is not None
                if all(right) and self.random.random() < 0.95:
                    assert reading.load.ack(batch)
                else:  # also of what is right, now and then
                    wrong = [row for row, is_right in enumerate(right) if not is_right]
                    assert reading.load.dispute(batch, wrong or [0])
                assert not reading.load.ack(batch)
            if reading.sink.is_over:
                engine.readings.remove(reading)

    def release(self) -> None:
        engine = self.random.choice(self.engines)
        for reading in self._some(engine.readings):
            assert reading.load is not None
            reading.load.release()

    def engine_gone(self) -> None:
        """Its sequences and batches are nobody's any more, and it starts anew."""
        engine = self.random.choice(self.engines)
        for reading in engine.readings:
            reading.sink.open_batches.clear()
            reading.gone = True
        engine.slots.clear()
        engine.readings.clear()
        self.pins = [pin for pin in self.pins if pin[0] != engine.name]
        self.sim.store.engine_gone(engine.name)

    def reset(self) -> None:
        names = [*NAMES] if self.random.random() < 0.3 else [self.random.choice(NAMES)]
        answers: list[bool] = []
        before = {name: set(self.may_hold[name]) for name in names}
        for name in names:
            self.namespace(name)
            self.unsure[name] |= before[name]
            self.may_hold[name].clear()
        target = self.namespace(names[0]) if len(names) == 1 else None
        self.pins = [pin for pin in self.pins if pin[1] not in names]

        def answered(ok: bool) -> None:
            answers.append(ok)
            assert len(answers) == 1
            for name in names if ok else ():
                self.unsure[name] -= before[name]
            self.cut_now = ok and self.random.random() < 0.5

        self.sim.store.reset(target, answered)

    def touch(self) -> None:
        name, keys, _ = self.chain()
        self.sim.store.touch(self.namespace(name), keys)

    def pin(self) -> None:
        engine, (name, keys, _) = self.random.choice(self.engines), self.chain()
        for key in keys:
            if self.sim.store.pin(engine.name, self.namespace(name), [key]):
                self.pins.append((engine.name, name, key))

    def unpin(self) -> None:
        for pin in self._some(self.pins):
            self.pins.remove(pin)
            engine, name, key = pin
            self.sim.store.unpin(engine, self.namespace(name), [key])

    def look_up(self) -> None:
        name, keys, _ = self.chain()
        states = self.sim.store.lookup(self.namespace(name), keys)
        assert states == self.sim.store.lookup(self.namespace(name), keys)
        for key, state in zip(keys, states, strict=True):
            if state in (Place.MEMORY, Place.DISK):
                assert key in self.may_hold[name], f"{key!r} is said to be held"

    # -- what breaks ----------------------------------------------------------------------------

    def flip_memory(self) -> None:
        """A bit turns in a whole record that nobody has been given."""
        memory = self.sim.store.memory
        resting = [r for r in memory.space.owners() if r.state is State.WHOLE and not r.pins]
        if resting and self.plan.flips:
            record = self.random.choice(resting)
            self.sim.store.view(record, record.length)[self.random.randrange(record.length)] ^= 1
            self._damage(record.epoch, record.key)

    def flip_disk(self) -> None:
        disk, slab = self.sim.store.disk, self.sim.slab
        rows = list(disk.space.owners()) if disk is not None else []
        if rows and self.plan.flips and disk is not None and slab is not None:
            record = disk.index.record(self.random.choice(rows))
            offset = record.offset + self.random.randrange(record.length)
            slab.flip_at_rest(offset, self.random.randrange(8))
            self._damage(record.epoch, record.key)

    def break_device(self) -> None:
        """Once, or until it is mended: a drive stays full, or read-only, for a while."""
        operation = self.random.choice(["write", "sync"])
        faults = [fault for fault in self.plan.device_faults if fault in FAULTS[operation]]
        if self.sim.slab is None or not faults:
            return
        fault = self.random.choice(faults)
        if self.random.random() < 0.5:
            self.sim.slab.fail_next(operation, fault)
        else:
            self.sim.rates[operation, fault] = 1.0

    def mend_device(self) -> None:
        self._arm_faults()

    def stall(self) -> None:
        """A device or a pool of threads is slow, or hangs, for a while."""
        pool = self.random.choice([READ, WRITE, COMMIT, VERIFY, DIGEST])
        if self.plan.slow_s and self.random.random() < 0.5:
            self.sim.runtime.slow(pool, self.random.choice(self.plan.slow_s))
        else:
            self.sim.runtime.hold(pool)

    def let_go(self) -> None:
        for pool in (READ, WRITE, COMMIT, VERIFY, DIGEST):
            self.sim.runtime.let_go(pool)
            self.sim.runtime.slow(pool, 0.0)

    def restart(self) -> None:
        """A clean stop: engines are gone first, then everything is written out."""
        self.let_go()
        self._all_engines_go()
        # A record whose digest is being taken in a slow pool is not known to a drain yet.
        self.sim.runtime.pass_time(max(self.plan.slow_s, default=0.0))
        durable = self.sim.drain()
        disk = self.sim.store.disk
        assert durable or disk is None or disk.down, "a drain without a fault left something behind"
        held = self._on_disk()
        self.sim.restart(clean=durable)
        assert not durable or held == self._on_disk(), held ^ self._on_disk()
        self._reopened()

    def lose_power(self) -> None:
        """At any moment; half of the time within a commit, instead of its sync."""
        if self.sim.slab is not None and self.random.random() < 0.5:
            self.sim.slab.fail_next("sync")
            for _ in range(self.random.randrange(100)):
                self.sim.runtime.step(jump=False)
        self._cut_power()

    def pass_time(self) -> None:
        self.sim.runtime.pass_time(self.random.choice([0.01, 0.1, 2.0, 20.0]))

    def finish(self) -> None:
        """Faults end, holders let go, time passes: then nothing may be left over."""
        self.let_go()
        if self.plan.sync_fault is not None:
            self._cut_and_read_everything()
        sim, store = self.sim, self.sim.store
        sim.rates.clear()
        for gone, name, key in self.pins:
            store.unpin(gone, self.namespace(name), [key])
        for engine in self.engines:
            store.abort(engine.name, list(engine.slots))
            engine.slots.clear()

        def all_over() -> bool:
            for engine in self.engines:
                for reading in engine.readings:
                    for batch in list(reading.sink.open_batches):
                        reading.sink.acked(batch)
                        assert reading.load is not None
                        reading.load.ack(batch)
            return all(r.sink.is_over for engine in self.engines for r in engine.readings)

        sim.runtime.run_until(all_over, 20_000)
        self.sim.drain()
        sim.runtime.run_until(lambda: sim.runtime.idle)  # what a slow pool owes
        sim.runtime.settle()
        store.check_integrity()
        assert_adds_up(survey_of(store), at_rest=True)
        memory = store.memory
        assert (memory.reserved_bytes, memory.pinned_bytes) == (0, 0)
        assert store.stats()["loads"] == 0

    def _cut_and_read_everything(self) -> None:
        """After syncs that lied: what the cut has spoilt is a miss, the rest is right."""
        self.sim.drain()
        self._cut_power()
        assert self.sim.store.disk is not None
        records = self.sim.store.disk.index.records_of
        for name in NAMES:
            space = self.namespace(name)
            for key in [record.key for record in records(space.epoch)]:
                (found,) = self.sim.get(space, [key])
                if isinstance(found, bytes):
                    assert (name, key) not in self.damaged
                    assert found == self._content(name, key, len(found))
                else:
                    assert found in (Miss.CORRUPT, Miss.IO_ERROR)
