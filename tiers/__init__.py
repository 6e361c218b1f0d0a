"""Bytes at rest and in motion: segments, arena, disk, policies, mover, store.

| module | what |
|---|---|
| `reasons`, `bounds` | where a block is, or why it is missed; the named bounds |
| `namespace`, `namespaces` | the digest of everything that changes a block's bytes or meaning;
handles and epochs |
| `digest` | the checksum that binds bytes to key and namespace |
| `segments`, `policy` | slots of any medium; which of them goes first |
| `runtime`, `supervisor` | clock, timers and I/O threads under one control thread; what catches
their faults |
| `arena`, `memory` | pinned host memory: the bytes; the index over them |
| `directory`, `slab`, `index` | NVMe: geometry and lock; the bytes; the durable index |
| `disk`, `commit` | the tier over them; its write order |
| `planner`, `device` | which device blocks ebb in a step (pure); copies between device and arena |
| `mover` | which memory records ebb to disk, and when |
| `reservations` | slots being written |
| `load`, `loads` | a lease that streams records upwards; those that are open, and their turns |
| `placement`, `pins` | slots for new records, and who leaves for them; records kept whatever their
recency |
| `ledger`, `ghosts` | what becomes of records, written down; why a key is gone |
| `drain`, `report` | writing all of memory out before an end; a store in numbers |
| `store`, `opening` | the verbs, and the only thing that connectors talk to; opening and closing it
all |
"""
