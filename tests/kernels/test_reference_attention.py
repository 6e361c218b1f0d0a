"""The reference engine's model by the attention kernel: the same logits as by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ebbtide.connectors.reference.model import ModelConfig
from ebbtide.connectors.reference.runner import Part, Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest.importorskip("triton", reason="NO TRITON: kernels are not tested (pip install triton)")

TINY = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=32,
    vocab_size=64,
    max_position=64,
)


def run(steps: Sequence[list[Part]], device: str, *, by_kernel: bool) -> list[torch.Tensor]:
    runner = Runner(TINY, num_blocks=9, block_size=4, device=device)
    runner.model.by_kernel = by_kernel
    for cache in runner.kv_caches:
        cache.fill_(float("nan"))
    return [runner.execute(parts) for parts in steps]


def test_a_mixed_batch_gives_the_same_logits(device: str) -> None:
    """Prefill, then in one step a decode, a chunk behind a prefix and a new prompt."""
    steps = [
        [Part(list(range(9)), 0, [[5, 1, 8]]), Part(list(range(20, 26)), 0, [[2, 7]])],
        [
            Part([3], 9, [[5, 1, 8]]),
            Part([9, 8, 7, 6, 5], 6, [[2, 7, 4]]),
            Part([11, 12, 13], 0, [[3]]),
        ],
    ]
    by_torch, by_kernel = (run(steps, device, by_kernel=one) for one in (False, True))
    for expected, got in zip(by_torch, by_kernel, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_host_has_torch_attend() -> None:
    assert not Runner(TINY, num_blocks=2, block_size=4).model.by_kernel
