"""Whoever comes to the store: the protocol, the server and the client, and the engines.

| module | what |
|---|---|
| `seam` | what an engine calls, on which half, and when |
| `protocol` | frames: encode and feed, no I/O |
| `session` | one client's messages against the store, over a socket or in-process |
| `server`, `serve` | the store's process |
| `client` | submit and poll: the same interface over a socket and in-process |
| `process` | starting a private store |
| `offload` | the two halves that every engine shares |
| `reference` | a small engine that uses all of it |
"""
