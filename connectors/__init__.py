"""Whoever comes to the store: the protocol, the server and the client, and the engines.

| module | what |
|---|---|
| `seam` | what an engine calls, on which half, and when |
| `protocol` | frames: encode and feed, no I/O |
| `message`, `requests`, `replies` | what the frames carry |
| `strict_cbor` | the CBOR that control messages may use, and no more |
| `session` | one client's messages against the store, over a socket or in-process |
| `endpoint` | the socket path and its owner, and who is at the other end |
| `connection`, `server`, `serve` | the store's process |
| `announce`, `systemd`, `traffic` | what it says of itself, and what it counts of its socket |
| `http` | probes and numbers over HTTP |
| `client_interface` | submit and poll |
| `client`, `local_client` | the same over a socket and in-process |
| `record_client`, `async_client`, `record_steps` | records from plain Python |
| `owner` | commands to a store that runs |
| `process` | starting a private store |
| `offload` | the two halves that every engine shares |
| `reference` | a small engine that uses all of it |
"""
