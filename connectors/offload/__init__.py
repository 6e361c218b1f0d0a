"""The two halves of a connector, the same for every engine.

| module | what |
|---|---|
| `scheduler` | control: lookups, loads, counters |
| `demotions` | control: what ebbs, and the pins that it needs |
| `worker` | copies: loads and stores between device blocks and the arena |
| `tally` | every block counted once, by source or by reason |
| `namespace_link` | keeping a namespace open across stores |
"""
