"""The reference engine: a small Llama behind a real scheduler, for tests and benchmarks."""

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
