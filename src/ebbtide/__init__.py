"""ebbtide: a tiered cache for the KV blocks of LLM engines.

Blocks that the device pool gives up *ebb* to pinned host memory and then to NVMe; a later request
with the same prefix lets them *flow* back before paged attention runs. `docs/architecture.md` draws
the house. Importing this package pulls in neither torch nor an HTTP stack.
"""

__version__ = "0.1.0"
