"""The reference engine: a small Llama behind a real scheduler, for tests and benchmarks.

Names are resolved at first use: whoever wants the tokenizer alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.connectors.reference.engine import Engine
    from ebbtide.connectors.reference.model import Model, ModelConfig
    from ebbtide.connectors.reference.rate import matmul_flops, measure_matmul_rate
    from ebbtide.connectors.reference.sequence import RequestOutput, TokenSources

__all__ = [
    "Engine",
    "Model",
    "ModelConfig",
    "RequestOutput",
    "TokenSources",
    "matmul_flops",
    "measure_matmul_rate",
]

_HOMES = {
    "Engine": "engine",
    "Model": "model",
    "ModelConfig": "model",
    "RequestOutput": "sequence",
    "TokenSources": "sequence",
    "matmul_flops": "rate",
    "measure_matmul_rate": "rate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
