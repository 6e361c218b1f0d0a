"""What one seed is about, and what its engines have in hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ebbtide.testing import Fault
from ebbtide.testing.faults import UNTOLD
from ebbtide.tiers.bounds import Bounds

if TYPE_CHECKING:
    from random import Random

    from ebbtide.testing import RecordingSink
    from ebbtide.tiers.load import Load

ALIGNMENT = 4096
LENGTHS = (1000, 4096, 10_496, 18_432, 41_984)
SLOW_S = (0.02, 2.0, 20.0)
TOLD = tuple(fault for fault in Fault if fault not in UNTOLD)


@dataclass(frozen=True)
class Plan:
    """What one seed is about."""

    memory_bytes: int
    slab_bytes: int  # 0: no disk tier
    lengths: tuple[int, ...]
    keys: int  # per length and namespace
    flips: bool  # bits that turn, at rest and on the way
    read_faults: float
    device_faults: tuple[Fault, ...]  # of writes and syncs; they take the tier down
    bounds: Bounds
    slow_s: tuple[float, ...] = ()  # how much later a slow device answers
    sync_fault: Fault | None = None  # how syncs lie; a power cut may spoil any record then

    @classmethod
    def draw(cls, random: Random) -> Plan:
        lengths = tuple(random.sample(LENGTHS, random.randint(1, 3)))
        largest = max(-(-length // ALIGNMENT) for length in lengths) * ALIGNMENT
        memory = largest * random.choice([4, 6, 10, 20])
        usual = Bounds.for_capacity(
            memory,
            write_after_s=random.choice([0.0, 0.05, 1.0]),
            load_window_bytes=random.choice([None, largest]),
            dirty_max_bytes=random.choice([None, memory // 8]),
            write_queue_bytes=random.choice([largest, 128 << 20]),
            ghost_entries=random.choice([0, 10, 10_000]),
            lru_save_interval_s=random.choice([0.05, 60.0]),
        )
        wide = replace(usual, load_window_bytes=memory)
        return cls(
            memory_bytes=memory,
            slab_bytes=random.choice([0, 1, 1, 1, 1]) * largest * random.choice([6, 20, 40]),
            lengths=lengths,
            keys=random.choice([8, 20, 60]),
            flips=random.random() < 0.5,
            read_faults=random.choice([0.0, 0.0, 0.05]),
            device_faults=random.choice([(), (), tuple(random.sample(TOLD, 2))]),
            bounds=random.choice([usual, usual, wide]),
            slow_s=random.choice([(), SLOW_S]),
        )


@dataclass
class Slot:
    """A slot that an engine may write."""

    name: str
    key: bytes
    epoch: int
    offset: int
    length: int

    @property
    def span(self) -> tuple[int, int]:
        return self.offset, self.offset + -(-self.length // ALIGNMENT) * ALIGNMENT


@dataclass
class Reading:
    """A load that an engine follows."""

    name: str
    keys: list[bytes]
    sink: RecordingSink
    to_verify: bool  # by the engine, of what it has copied
    load: Load | None = None
    gone: bool = False


@dataclass
class Engine:
    name: bytes
    slots: dict[int, Slot] = field(default_factory=dict)  # by record sequence
    readings: list[Reading] = field(default_factory=list)
