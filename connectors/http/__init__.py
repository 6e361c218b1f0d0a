"""The store's HTTP: probes and numbers, nothing that changes anything. Needs `ebbtide[http]`.

| module | what |
|---|---|
| `token` | who may read: loopback, or whoever has the token |
| `metrics` | the table of metrics, and the collector that reads them from a store |
| `app` | the routes |
| `listener` | the server, on the store's own loop |
"""
