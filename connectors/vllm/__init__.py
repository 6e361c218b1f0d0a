"""ebbtide as a KV connector of vLLM: `--kv-transfer-config` names this package.

Importing it starts nothing and opens nothing, and imports vLLM only when the class is asked for.

| module | what |
|---|---|
| `connector` | the class that vLLM builds, once per role |
| `scheduler_side`, `worker_side` | its two halves: vLLM's hooks on `ebbtide.connectors.offload` |
| `device_pool` | vLLM's block pool, as the halves see it |
| `cache_groups`, `geometry`, `layout` | KV-cache groups, ranks and shards, bytes of a block |
| `identity`, `weights` | the namespace of the live engine |
| `settings` | the configuration that vLLM hands over, and what is refused |
| `metadata`, `stats` | what travels between the halves, and to `/metrics` |
| `plugin` | registration by name, vLLM's `vllm.general_plugins` |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.connectors.vllm.connector import EbbtideConnector

__all__ = ["EbbtideConnector"]


def __getattr__(name: str) -> Any:
    if name == "EbbtideConnector":
        return import_module("ebbtide.connectors.vllm.connector").EbbtideConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
