"""Tensors: paged layouts, copies between blocks and records, attention over pages.

| module | what |
|---|---|
| `layout`, `layout_checks` | where a block's bytes lie in registered tensors; what is refused |
| `layers` | the same, one layer at a time |
| `fragments` | the same as addresses, and as lists of single copies |
| `copy`, `arena_records` | gather and scatter between paged blocks and flat records, by torch |
| `host_copy` | the same on a device that is host memory, compiled |
| `driver`, `streams`, `registration` | the CUDA driver: copies, order, registered memory |
| `copy_engine` | copies by the device's copy engines |
| `staged_copy`, `triton_copy` | copies of small fragments, by a kernel and a staging buffer |
| `methods`, `choice` | the ways to copy by name, measured, and which of them to take |
| `attention` | attention over paged keys and values, by torch |
| `paged_attention`, `triton_attention` | the same for a batch in one launch, by a kernel |

This file imports nothing: whoever needs tensors imports the module.
"""
