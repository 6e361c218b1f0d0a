"""ebbtide: a tiered cache for the KV blocks of LLM engines.

Blocks that the device pool gives up *ebb* to pinned host memory and then to NVMe; a later request
with the same prefix lets them *flow* back before paged attention runs. `docs/architecture.md` draws
the house. Importing this package pulls in neither torch nor an HTTP stack; `Client` and
`AsyncClient` are read when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide.connectors.async_client import AsyncClient
    from ebbtide.connectors.record_client import Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from ebbtide.connectors.record_client import Client

        return Client
    if name == "AsyncClient":
        from ebbtide.connectors.async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
