"""A tiny Llama with random weights, written without a tensor library: the default model.

Weights are larger than a trained model's, so that each token depends on every KV byte before it
and a wrong restored block shows in the answer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 4, 8, 4, 32, 512
WEIGHT_STD = 0.12
POSITIONS_MAX = 16_384

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS_MAX,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_model(directory: Path, seed: int = 0) -> None:
    """Write `config.json` and `model.safetensors`, 12 MB. The same bytes for the same seed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    draw = np.random.Generator(np.random.Philox(key=seed))
    tensors = {name: _weights(shape, draw) for name, shape in _shapes()}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def _weights(shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[np.float32]:
    if len(shape) == 1:  # the scale of a norm
        return np.ones(shape, dtype=np.float32)
    return draw.standard_normal(shape, dtype=np.float32) * np.float32(WEIGHT_STD)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{layer}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
