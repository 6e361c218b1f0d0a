"""Tensors: paged layouts, copies between blocks and records, attention over pages.

| module | what |
|---|---|
| `layout` | where a block's bytes lie in registered device tensors |
| `copy` | gather and scatter between paged blocks and flat records |
| `attention` | attention over paged keys and values |

This file imports nothing: whoever needs tensors imports the module.
"""
