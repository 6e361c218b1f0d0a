"""Tools for testing against ebbtide: a seeded world, faulty media, self-describing bytes, a kit.

| name | what |
|---|---|
| `SimRuntime` | the store's runtime without threads or a clock: a seed decides what runs next |
| `MemorySlab`, `FaultSlab` | a slab that can lose power; faults on the way to any slab |
| `keyed_bytes` | bytes that are a function of their key, so that wrong ones are seen |
| `RecordingSink` | a load's holder that checks the contract of `tiers.load.Sink` |
| `SimStore` | a whole store in that world, with restarts and power cuts |
| `TierConformance` | what every set of tiers owes, as test methods to inherit |
"""

from ebbtide.testing.conformance import TierConformance
from ebbtide.testing.faults import FAULTS, Fault, FaultSlab, MemorySlab
from ebbtide.testing.payload import keyed_bytes
from ebbtide.testing.runtime import SimRuntime, StuckError
from ebbtide.testing.sinks import RecordingSink
from ebbtide.testing.store import SimStore, descriptor, disk_bytes_for

__all__ = [
    "FAULTS",
    "Fault",
    "FaultSlab",
    "MemorySlab",
    "RecordingSink",
    "SimRuntime",
    "SimStore",
    "StuckError",
    "TierConformance",
    "descriptor",
    "disk_bytes_for",
    "keyed_bytes",
]
