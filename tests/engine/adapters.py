"""A tiny LoRA adapter for the Llama model, in the files that adapters come in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

RANK, HIDDEN, KV, LAYERS = 8, 256, 128, 4  # of the Llama in `models`
STRENGTH = 0.3  # large enough to change every answer


def write_adapter(directory: Path, *, seed: int) -> Path:
    """Write an adapter of the key and value projections; return its directory."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for projection in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for half, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (KV, RANK))):
                weights[f"{name}.{half}.weight"] = STRENGTH * torch.randn(shape, generator=random)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["k_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
