"""How fast prefill could be, and how much work it is: the two sides of an efficiency."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ebbtide.connectors.reference.model import ModelConfig


def matmul_flops(
    config: ModelConfig, query_len: int, context_len: int | None = None, logit_rows: int = 1
) -> int:
    """Floating-point operations in the matrix products for `query_len` new tokens.

    `context_len` counts all tokens up to the last new one (default: no prefix). Attention's two
    products are counted for the causal pairs alone, the head for the rows it is computed for;
    norms, activations, rotations and softmax not at all.
    """
    context_len = query_len if context_len is None else context_len
    hidden, inner = config.hidden_size, config.num_heads * config.head_dim
    weights = hidden * config.qkv_size + inner * hidden + 3 * hidden * config.ffn_size
    prefix_len = context_len - query_len
    pairs = query_len * prefix_len + query_len * (query_len + 1) // 2
    per_layer = 2 * weights * query_len + 4 * inner * pairs
    return config.num_layers * per_layer + 2 * hidden * config.vocab_size * logit_rows


def measure_matmul_rate(
    *,
    size: int = 2048,
    seconds: float = 0.3,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """Operations per second of a large square matrix product, here and now.

    The median of as many products as fit into `seconds`, at least three: what the machine keeps up,
    not the luckiest product.
    """
    left, right = (torch.randn((size, size), dtype=dtype, device=device) for _ in range(2))
    out = torch.empty((size, size), dtype=dtype, device=device)
    torch.mm(left, right, out=out)  # threads and kernels are ready after the first
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / median(times)
