"""The two halves of a connector, the same for every engine.

| module | what |
|---|---|
| `scheduler` | control: lookups, demotion plans, pins, counters |
| `worker` | copies: loads and stores between device blocks and the arena |
| `tally` | every block counted once, by source or by reason |
| `namespace_link` | keeping a namespace open across stores |
"""
