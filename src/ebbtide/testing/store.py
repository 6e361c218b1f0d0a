"""A whole store in a simulated world: real tiers, real durable index, simulated device and time."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from ebbtide.testing.faults import Fault, FaultSlab, MemorySlab
from ebbtide.testing.payload import keyed_bytes
from ebbtide.testing.runtime import SimRuntime
from ebbtide.testing.sinks import RecordingSink
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.directory import INDEX_BYTES_MIN, SMALL_FILES_BYTES
from ebbtide.tiers.namespace import Descriptor
from ebbtide.tiers.opening import OpenDisk
from ebbtide.tiers.quotas import Quotas, Rule
from ebbtide.tiers.shares import NO_QUOTA, Quota
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.admission import Admission
    from ebbtide.tiers.disk_health import DiskHealth
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.reasons import Miss
    from ebbtide.tiers.slab import Slab

ENGINE = b"engine"


def descriptor(weights: str = "seed:0") -> Descriptor:
    """A made-up namespace; different weights, different namespace."""
    return Descriptor(
        format=1,
        engine="testing/1",
        model="made-up",
        weights=weights,
        kv_dtype="float16",
        block_size=16,
        layers=("0",),
        layout="flat",
        tensor_parallel=1,
        pipeline_parallel=1,
        shard_rule="none",
        attention_isa="",
        hash_algorithm="sha256_cbor",
        hash_root="00",
    )


def disk_bytes_for(slab_bytes: int) -> int:
    """The disk capacity that leaves `slab_bytes` to payload (up to 16 MiB, multiples of 4096)."""
    return slab_bytes + INDEX_BYTES_MIN + SMALL_FILES_BYTES


class SimStore:
    """A `Store` on a `SimRuntime`; with `disk_path` also a disk tier over a `FaultSlab`.

    The directory and its LMDB are real, commits sync; only the payload's device is simulated.
    `restart` and `lose_power` replace `store`, `runtime` and `slab` by new ones over the same
    device: keep no reference to the old ones. A context manager; `close` when done.
    """

    def __init__(
        self,
        seed: int,
        memory_bytes: int,
        *,
        disk_path: str | None = None,
        slab_bytes: int = 0,
        records_max: int | None = None,
        admission: Admission | None = None,
        commit_batch_bytes: int | None = None,
        bounds: Bounds | None = None,
        reopens: bool = False,
        fairness: tuple[Quota, Sequence[Rule]] = (NO_QUOTA, ()),
    ) -> None:
        """`fairness`: the default quota of a namespace, and rules (`tiers.quotas`).

        `reopens`: a tier that is down comes back by itself, and a drive that hangs goes down.
        """
        self.reopens = reopens
        self.fairness = fairness
        self.random = Random(seed)
        self.memory_bytes = memory_bytes
        self.disk_path = disk_path
        self.slab_bytes = slab_bytes
        self.records_max = records_max
        self.admission = admission
        self.commit_batch_bytes = commit_batch_bytes
        self.bounds = bounds or Bounds.for_capacity(memory_bytes, write_after_s=1.0)
        self.device = MemorySlab(0)
        self.rates: dict[tuple[str, Fault], float] = {}  # of the device's faults: see FaultSlab
        self._open()

    def __enter__(self) -> SimStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- life and death -------------------------------------------------------------------------

    def restart(
        self,
        *,
        clean: bool = True,
        slab_bytes: int | None = None,
        memory_bytes: int | None = None,
    ) -> bool:
        """Drain (if `clean`), close, open again. Returns whether the drain made all durable."""
        durable = self.drain() if clean else False
        self.close(clean=durable)
        if slab_bytes is not None:
            self.slab_bytes = slab_bytes
        if memory_bytes is not None:
            self.memory_bytes = memory_bytes
            self.bounds = replace(
                Bounds.for_capacity(memory_bytes), write_after_s=self.bounds.write_after_s
            )
        self._open()
        return durable

    def lose_power(self) -> None:
        """Everything not durable is gone, or torn; then open again."""
        self.close(clean=False)
        self.device.lose_power(self.random)
        self._open()

    def drain(self) -> bool:
        """Write out all that is dirty. True when everything is durable."""
        answers: list[bool] = []
        self.store.drain(600.0, answers.append)
        self.runtime.run_until(lambda: bool(answers), 200_000)
        return answers[0]

    def flush(self) -> bool:
        """True when everything written to disk before this call is durable."""
        answers: list[bool] = []
        self.store.flush(answers.append)
        self.runtime.run_until(lambda: bool(answers))
        return answers[0]

    def close(self, *, clean: bool = False) -> None:
        """Close files and arena. What is under way is lost, with all that it kept alive."""
        if self.health is not None:
            health = self.health
            health.close()
            self.runtime.run_until(lambda: not health.busy)
        self.runtime.close()
        self.store.close(clean)
        if self.open_disk is not None:
            self.open_disk.close()
        del self.store, self.open_disk, self.health

    # -- the verbs, run to their end ------------------------------------------------------------

    def namespace(self, weights: str = "seed:0") -> Namespace:
        return self.store.open_namespace(descriptor(weights).pairs())

    def content(self, namespace: Namespace, key: bytes, length: int) -> bytes:
        """What `put` stores under the key."""
        return keyed_bytes(namespace.digest + key, length)

    def put(
        self, namespace: Namespace, keys: Sequence[bytes], length: int, engine: bytes = ENGINE
    ) -> bytes:
        """Reserve, write and commit all keys, waiting for slots. One commit code per key, 0 also
        for keys that were held already."""
        codes = bytearray()
        while len(codes) < len(keys):
            todo = keys[len(codes) :]
            grants, reason = self.store.reserve(engine, namespace, todo, length)
            if not grants and reason is not None:
                self.runtime.run_until(lambda: self.could_reserve(length, namespace))
            codes += self.fill(namespace, todo, grants, length, engine)
        return bytes(codes)

    def fill(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        grants: Sequence[tuple[int, int]],
        length: int,
        engine: bytes = ENGINE,
    ) -> bytes:
        """Write and commit what `reserve` granted. One code per grant."""
        mine = [(key, *grant) for key, grant in zip(keys, grants, strict=False) if grant[1]]
        for key, offset, _ in mine:
            self.store.arena.view(offset, length)[:] = self.content(namespace, key, length)
        replies: list[bytes] = []
        self.store.commit(engine, [sequence for _, _, sequence in mine], replies.append)
        self.runtime.run_until(lambda: bool(replies))
        answers = iter(replies[0])
        return bytes(next(answers) if sequence else 0 for _, sequence in grants)

    def could_reserve(self, length: int, sake: Namespace) -> bool:
        """A try with a key of its own, taken back at once; where there are quotas within `sake`."""
        quoted = self.fairness != (NO_QUOTA, ())
        namespace = sake if quoted else self.namespace("probe")
        grants, _ = self.store.reserve(b"probe", namespace, [b"probe" * 8], length)
        self.store.abort(b"probe", [grant.sequence for grant in grants])
        return bool(grants)

    def get(
        self, namespace: Namespace, keys: Sequence[bytes], engine: bytes = ENGINE
    ) -> list[bytes | Miss]:
        """Load all keys, acknowledging each batch when it is read. Bytes or a reason per key."""
        found: dict[int, bytes | Miss] = {}
        sink = RecordingSink(len(keys), on_failed=found.update)
        load = self.store.load(engine, namespace, keys, sink)
        while not sink.is_over:
            self.runtime.run_until(lambda: bool(sink.open_batches) or sink.is_over)
            for batch in list(sink.open_batches):
                for granted in sink.open_batches[batch]:
                    view = self.store.arena.view(granted.offset, granted.length)
                    found[granted.position] = bytes(view)
                sink.acked(batch)
                load.ack(batch)
        return [found[position] for position in range(len(keys))]

    # -- inside ---------------------------------------------------------------------------------

    def _open(self) -> None:
        self.runtime = SimRuntime(self.random.getrandbits(32))
        self.slab: FaultSlab | None = None
        self.health: DiskHealth | None
        self.open_disk: OpenDisk | None = None
        quotas = Quotas(*self.fairness)
        if self.disk_path is not None:
            self.open_disk = OpenDisk(
                self.runtime,
                self.disk_path,
                disk_bytes_for(self.slab_bytes),
                commit_batch_bytes=self.commit_batch_bytes,
                records_max=self.records_max,
                quotas=quotas,
                wrap_slab=self._on_device,
                probe_index=lambda path: True,  # a child at every power cut would take too long
            )
        self.store = Store(
            self.runtime,
            Arena.create(self.memory_bytes),
            self.open_disk.tier if self.open_disk else None,
            self.bounds,
            stored_namespaces=self.open_disk.namespaces if self.open_disk else (),
            admission=self.admission,
            quotas=quotas,
        )
        self.health = None
        if self.reopens and self.open_disk is not None:
            self.health = self.open_disk.watch(self.store)

    def _on_device(self, file: Slab) -> Slab:
        file.close()
        if len(self.device.image) != self.slab_bytes:
            self.device.resize(self.slab_bytes)
        self.slab = FaultSlab(self.device, seed=self.random.getrandbits(32), rates=self.rates)
        return self.slab
