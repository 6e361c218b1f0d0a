"""What it costs: traces replayed against the real store, and measurements of every part.

| module | what |
|---|---|
| `trace` | request traces as files: kvtrace-1 and Mooncake's JSON lines |
| `records` | record contents that follow from the key alone, written and checked in the arena |
| `rig` | a store in this process, of a size or of an exact number of records |
| `progress` | how far a run is: a bar, or lines |
| `replay` | `ebbtide replay`: a trace against that store |
| `conversations` | multi-turn conversations over text that every Python ships |
| `phase` | one phase of the demo, in a process of its own |
| `demo`, `report` | `ebbtide demo`: the phases, and what they showed |
| `pairs` | statistics of interleaved pairs, and the benchmark line |
| `cli` | `ebbtide bench`: the benchmarks by name |
| `copy_bench`, `paged_forms` | `ebbtide bench copy`, and every form of paged memory as tensors |
| `device_bench`, `device_*` | `ebbtide bench device`: one prepared run for a machine with a GPU |
| `offload`, `contestant`, `working_set`, `offload_report` | `ebbtide bench offload` |
"""
