"""Stage of `ebbtide bench device`: whole loads against layer by layer, in an engine over a store.

Everything is there: the store's verification, grants in batches, copies beside the forward pass.
What is compared is the time until the first token of prompts whose prefix is in memory and whose
end nobody has seen.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from ebbtide.bench.device_restore import BLOCK, FULL, SMALL
from ebbtide.config import load_config
from ebbtide.connectors.reference.connect import attach_local
from ebbtide.connectors.reference.engine import Engine
from ebbtide.connectors.reference.runner import Part
from ebbtide.errors import TierUnavailableError
from ebbtide.sizes import exact_size
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import ThreadRuntime

if TYPE_CHECKING:
    from ebbtide.bench.device_rig import DeviceRig
    from ebbtide.config_schema import Layerwise
    from ebbtide.connectors.reference.model import ModelConfig

ROUNDS = 6  # of which the first warms up
ERROR_MAX = 0.05  # of logits, for elements of 16 bits
WAYS: dict[str, Layerwise] = {"whole": "off", "layerwise": "on"}


def layerwise(rig: DeviceRig) -> None:
    """Each length computed, restored as a whole, and restored while the first layers run."""
    lengths = rig.pick((64,), (2048, 8192, 32768))
    config, new_tokens = rig.pick((SMALL, 16), (FULL, 512))
    rounds = rig.pick(2, ROUNDS)
    held = sum(lengths) + len(lengths) * len(WAYS) * rounds * new_tokens
    size = exact_size(held * _kv_bytes(config) + (64 << 20))
    # The window as well: what a load needs it for a second time does not arrive by layer.
    settings = {"memory": {"capacity": size, "load_window": size}}
    runtime = ThreadRuntime()
    opened = OpenStore(load_config(settings, {}).config, runtime)
    draw = torch.Generator().manual_seed(4)

    def text(length: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (length,), generator=draw).tolist()

    prefixes = [text(length) for length in lengths]
    try:
        for way, setting in WAYS.items():
            longest = max(lengths) + new_tokens
            engine = Engine(config, longest // BLOCK + 8, BLOCK, longest, device=rig.device.type)
            prompts = [[prefix + text(new_tokens) for _ in range(rounds)] for prefix in prefixes]
            computed = [[_logits(rig, engine, prompt) for prompt in row] for row in prompts]
            attach_local(engine, opened.store, runtime, layerwise=setting)
            try:
                engine.generate(prefixes, 1)
                for length, row, expected in zip(lengths, prompts, computed, strict=True):
                    _restore(rig, engine, way, length, row, expected)
            finally:
                engine.close()
                runtime.run_ready()
    finally:
        runtime.close()
        opened.close(clean=False)


def _kv_bytes(config: ModelConfig) -> int:
    """Of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize


def _logits(rig: DeviceRig, engine: Engine, prompt: list[int]) -> tuple[torch.Tensor, float]:
    """Without any cache, and the milliseconds that it took. Before the engine has requests."""
    blocks = range(1, -(-len(prompt) // BLOCK) + 1)
    rig.synchronize()
    started = time.perf_counter()
    logits = engine.runner.execute([Part(prompt, 0, [blocks])])
    return logits[0], (time.perf_counter() - started) * 1e3


def _restore(
    rig: DeviceRig,
    engine: Engine,
    way: str,
    length: int,
    prompts: list[list[int]],
    computed: list[tuple[torch.Tensor, float]],
) -> None:
    times_ms, errors, restored, ahead = [], [], [], engine.tokens_ahead
    for prompt, (expected, _) in zip(prompts, computed, strict=True):
        if not engine.drain() or not engine.reset_prefix_cache():
            raise TierUnavailableError("The engine does not come to rest")
        for cache in engine.runner.kv_caches:
            cache.fill_(100.0)  # no byte that could pass for a right one
        rig.synchronize()
        (output,) = engine.generate([prompt], 1, keep_logits=True)
        assert output.first_logits is not None
        times_ms.append(output.ttft_s * 1e3)
        errors.append(float((output.first_logits - expected).abs().max() / expected.abs().max()))
        restored.append(output.sources.memory)
    rig.row(
        "layerwise",
        ok=max(errors) < ERROR_MAX and set(restored) == {length},
        way=way,
        tokens=len(prompts[0]),
        restored=min(restored),
        ahead=(engine.tokens_ahead - ahead) // len(prompts),
        ttft_ms=median(times_ms[1:]),
        computed_ms=median(took_ms for _, took_ms in computed[1:]),
        error=max(errors),
    )
