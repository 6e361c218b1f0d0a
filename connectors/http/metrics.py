"""The metrics of a store: one table, read at each scrape. `docs/metrics.md` is the same table.

Counters never fall while a store lives. Nothing is counted here: the parts of the store count, and
a scrape reads them on the control thread.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ebbtide import __version__
from ebbtide.tiers.memory import State
from ebbtide.tiers.reasons import label

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ebbtide.connectors.server import StoreServer
    from ebbtide.tiers.segments import SegmentSpace

PREFIX = "ebbtide_store_"  # an engine has metrics of its own, by shorter names


class Metric(NamedTuple):
    """One metric. `read` gives label values and a number per series; `total` is in no name here."""

    name: str  # without prefix, and a counter without _total
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    labels: tuple[str, ...]
    help: str
    read: Callable[[StoreServer], Iterable[tuple[tuple[str, ...], float]]]


def _one(read: Callable[[StoreServer], float]) -> Callable[[StoreServer], Any]:
    return lambda server: [((), read(server))]


def _count(name: str) -> Callable[[StoreServer], Any]:
    return _one(lambda server: server.store.ledger.counts[name])


def _by(counts: Callable[[StoreServer], Mapping[str, int]]) -> Callable[[StoreServer], Any]:
    return lambda server: [((word,), value) for word, value in sorted(counts(server).items())]


def _tally(name: str) -> Callable[[StoreServer], Any]:
    """Of all namespaces together: how many there are is not for a metric's labels."""

    def read(server: StoreServer) -> Any:
        sums = server.store.ledger.tallies.sums(name)
        return [((label(code),), value) for code, value in sorted(sums.items())]

    return read


def _total(name: str) -> Callable[[StoreServer], Any]:
    return _one(lambda server: server.store.ledger.tallies.total(name))


def _left(server: StoreServer) -> Iterator[tuple[tuple[str, ...], float]]:
    tallies = server.store.ledger.tallies
    for tier in ("memory", "disk"):
        for code, value in sorted(tallies.sums(f"left_{tier}").items()):
            yield (tier, label(code)), value


def _tiers(
    memory: Callable[[StoreServer], float], disk: Callable[[Any], float]
) -> Callable[[StoreServer], Any]:
    def read(server: StoreServer) -> Iterator[tuple[tuple[str, ...], float]]:
        yield ("memory",), memory(server)
        if server.store.disk is not None:
            yield ("disk",), disk(server.store.disk)

    return read


def _spaces(read: Callable[[SegmentSpace[Any]], float]) -> Callable[[StoreServer], Any]:
    return _tiers(lambda server: read(server.store.memory.space), lambda disk: read(disk.space))


def _disk(read: Callable[[Any], float]) -> Callable[[StoreServer], Any]:
    def found(server: StoreServer) -> Any:
        return [] if server.store.disk is None else [((), read(server.store.disk))]

    return found


def _counted(memory: str, disk: str) -> Callable[[StoreServer], Any]:
    def read(server: StoreServer) -> Iterator[tuple[tuple[str, ...], float]]:
        yield ("memory",), server.store.ledger.counts[memory]
        if server.store.disk is not None:
            yield ("disk",), server.store.ledger.disk_count(disk)

    return read


def _edges(server: StoreServer) -> Iterator[tuple[tuple[str, ...], float]]:
    store = server.store
    yield ("device_to_memory",), store.ledger.counts["stored_bytes"]
    yield ("memory_to_device",), store.ledger.counts["granted_bytes"]
    if store.disk is not None and store.mover is not None:
        yield ("memory_to_disk",), store.mover.moved_bytes
        yield ("disk_to_memory",), store.ledger.counts["promoted_bytes"]


C, G = CounterMetricFamily, GaugeMetricFamily

METRICS = (
    Metric("records_stored", C, (), "Records that became readable in memory: put by an engine.",
           _count("stored")),
    Metric("records_asked", C, (), "Records that loads asked for.", _total("asked")),
    Metric("records_restored", C, ("tier",), "Records granted to loads, by the tier that had them.",
           _tally("hits")),
    Metric("records_promoted", C, (), "Records that were read from disk into memory.",
           _count("promoted")),
    Metric("records_written", C, (), "Records that became readable on disk.", _total("written")),
    Metric("records_found", C, (), "Records that were on disk when it was opened.",
           _total("found")),
    Metric("records_left", C, ("tier", "reason"), "Records that are in a tier no more, by why.",
           _left),
    Metric("records_evicted", C, ("tier",), "Records that made room for others.",
           _counted("memory_evicted", "evicted")),
    Metric("records_missed", C, ("reason",),
           "Records that were computed and came to be stored, by why they were not held.",
           _tally("misses")),
    Metric("records_abandoned", C, ("reason",),
           "Records that missed and got a slot, but were never stored, by why.",
           _tally("abandoned")),
    Metric("records_dropped", C, ("reason",),
           "Records that left the store or were not let in, by why.", _tally("drops")),
    Metric("records_corrupt", C, ("tier",), "Records whose bytes did not match their digest.",
           _counted("memory_corrupt", "corrupt")),
    Metric("records_disputed", C, (),
           "Records whose copies did not verify where a client had copied them to.",
           _count("disputed")),
    Metric("load_failures", C, ("reason",), "Records that a load did not bring, by why.",
           _tally("failed_loads")),
    Metric("moved_bytes", C, ("edge",),
           "Bytes moved down and up: payload from and to the device, whole slots from and to disk.",
           _edges),
    Metric("reserves_refused", C, ("reason",),
           "Reservations that got fewer slots than they asked for, by why.", _tally("refused")),
    Metric("slots_reclaimed", C, (), "Slots that engines held when their last process ended.",
           _count("reclaimed_slots")),
    Metric("resets", C, (), "Namespaces that were reset.", _count("resets")),
    Metric("disk_lost_batches", C, (), "Commit batches of the disk tier that failed.",
           _one(lambda s: s.store.ledger.disk_count("lost_batches"))),
    Metric("disk_reopened", C, (), "Times that the disk tier came back into service.",
           _count("disk_reopened")),
    Metric("faults", C, (), "Faults of the store's own, each logged with its trace: a bug.",
           _one(lambda s: s.store.ledger.counts["faults"] + s.runtime_faults)),
    Metric("connections_accepted", C, (), "Connections that were let in.",
           _one(lambda s: s.traffic.connections)),
    Metric("connections_refused", C, ("reason",),
           "Connections that were turned away (user, full) or ended (protocol).",
           _by(lambda s: s.traffic.refused)),
    Metric("requests", C, ("verb",), "Requests by verb.", _by(lambda s: s.traffic.requests)),
    Metric("tier_up", G, ("tier",), "1: in service. 0: down.",
           _tiers(lambda s: 1, lambda disk: disk.down is None)),
    Metric("tier_capacity_bytes", G, ("tier",), "Bytes of slots that the tier has.",
           _spaces(lambda space: space.capacity_bytes)),
    Metric("tier_used_bytes", G, ("tier",), "Bytes of slots in use, padding included.",
           _spaces(lambda space: space.used_bytes)),
    Metric("tier_payload_bytes", G, ("tier",), "Bytes of records in those slots.",
           _spaces(lambda space: space.payload_bytes)),
    Metric("tier_records", G, ("tier",), "Records that can be read.",
           _tiers(lambda s: s.store.memory.in_state[State.WHOLE], lambda disk: disk.index.whole)),
    Metric("memory_dirty_bytes", G, (), "Slots in memory that no disk tier holds yet.",
           _one(lambda s: s.store.memory.dirty_bytes)),
    Metric("memory_reserved_bytes", G, (), "Slots that engines are writing.",
           _one(lambda s: s.store.memory.reserved_bytes)),
    Metric("memory_pinned_bytes", G, (), "Slots that somebody copies from or to, or wants kept.",
           _one(lambda s: s.store.memory.pinned_bytes)),
    Metric("memory_kept_bytes", G, (), "Slots that pins keep from eviction.",
           _one(lambda s: s.store.pins.kept_bytes)),
    Metric("disk_quarantined_bytes", G, (), "Slots that have shown wrong bytes and are not used.",
           _disk(lambda disk: disk.quarantined_bytes)),
    Metric("connections", G, (), "Open connections.", _one(lambda s: s.connections)),
    Metric("engines", G, (), "Engines with a connection or a process that maps the arena.",
           _one(lambda s: s.engines)),
    Metric("namespaces", G, (), "Namespaces that engines have opened.",
           _one(lambda s: len(list(s.store.namespaces)))),
    Metric("loads", G, (), "Loads that have not ended.", _one(lambda s: len(s.store.loads))),
    Metric("reservations", G, (), "Records that engines are writing.",
           _one(lambda s: s.store.reservations)),
    Metric("build_info", G, ("version",), "Always 1.", lambda s: [((__version__,), 1)]),
)  # fmt: skip
LOOKUP = "lookup_latency_seconds"
LOOKUP_HELP = "Time of a lookup in the store's process: from its bytes being read to its answer."


class StoreCollector(Collector):
    """Reads one store. On its control thread only."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Any]:
        """All metrics, with every series that has a number."""
        for metric in METRICS:
            family = metric.kind(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(self._server):
                family.add_metric(labels, float(value))
            yield family
        latency = self._server.traffic.lookup_s
        histogram = HistogramMetricFamily(PREFIX + LOOKUP, LOOKUP_HELP)
        names = [*map(str, latency.bounds), "+Inf"]
        counts = accumulate(latency.counts)
        histogram.add_metric((), list(zip(names, counts, strict=True)), latency.total)
        yield histogram

    def describe(self) -> list[Any]:
        """Nothing: a store is not to be read when it is registered."""
        return []
