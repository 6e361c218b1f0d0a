"""Bytes at rest and in motion: segments, arena, disk, policies, mover, store.

| module | what |
|---|---|
| `reasons` | where a block is, or why it is missed: the closed vocabulary |
| `namespace` | the digest of everything that changes a block's bytes or meaning |
| `digest` | the checksum that binds bytes to key and namespace |
| `segments`, `policy` | slots of any medium; which of them goes first |
| `runtime` | clock, timers and I/O threads under the store's one control thread |
| `arena`, `memory` | pinned host memory: the bytes; the index over them |
| `slab`, `index`, `disk` | NVMe: the bytes; the durable index; the tier |
| `planner` | which device blocks ebb in a step (pure) |
| `mover` | which memory records ebb to disk, and when |
| `load` | a lease that streams records upwards |
| `store` | the verbs, and the only thing that connectors talk to |
"""
