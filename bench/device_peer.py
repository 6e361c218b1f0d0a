"""A worker of `ebbtide bench device` that is to be killed: it copies blocks into an arena for ever.

Arguments: the arena's descriptor, and `cpu` or `cuda`. It says `copying` when it has begun.
"""

from __future__ import annotations

import sys

import torch

from ebbtide.bench.device_rig import DeviceRig, table_of
from ebbtide.bench.paged_forms import FORMS, Shape, make_pages
from ebbtide.kernels.arena_records import ArenaRecords
from ebbtide.kernels.copy_engine import EngineCopies
from ebbtide.kernels.registration import Registration
from ebbtide.tiers.arena import Arena

SHAPE = Shape(layers=4, blocks=64, tokens=16, heads=4, dim=64)


def main() -> None:
    """Copy until killed."""
    descriptor, dry = int(sys.argv[1]), sys.argv[2] == "cpu"
    rig = DeviceRig(dry=dry, budget_s=60.0, as_json=True)
    arena = Arena.attach(descriptor)
    whole = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    registration = None
    if not dry:
        registration = Registration(rig.queue, whole.data_ptr(), whole.numel())
    pages = make_pages(FORMS["kv_first_nhd"], SHAPE, torch.bfloat16, device=rig.device.type)
    table = table_of(pages)
    copies = EngineCopies(rig.queue, table)
    count = min(SHAPE.blocks, whole.numel() // table.record_bytes)
    offsets = [number * table.record_bytes for number in range(count)]
    records = ArenaRecords(range(count), whole, offsets, registration)
    begun = False
    while True:
        copies.gather(records, stream=rig.stream)
        rig.synchronize()
        if not begun:
            begun = True
            print("copying", flush=True)


if __name__ == "__main__":
    main()
