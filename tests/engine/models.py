"""Tiny models with large random weights: each greedy token depends on every KV byte before it.

Made from seeds, without a network. Weights of the usual size would give answers that hardly look
at the cache, and a restored block of zeros would pass unnoticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.engine.prompts import VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(seed: int) -> Any:
    """Four layers of full attention, 128 KiB of KV per block of 32 tokens."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            initializer_range=0.12,
            **_COMMON,
        )
    )


def _gemma() -> Any:
    """Five layers with a sliding window of 128 tokens and one with full attention: six groups."""
    torch.manual_seed(2)
    model: Any = Gemma3ForCausalLM(
        Gemma3TextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=128,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            initializer_range=0.3,
            query_pre_attn_scalar=1,
            pad_token_id=0,
            **_COMMON,
        )
    )
    # The head shares the embedding's weights: a large embedding would repeat the last token.
    model.model.embed_tokens.weight.data.mul_(0.1)
    return model


def _mla() -> Any:
    """Two layers of multi-head latent attention: one latent per token instead of K and V."""
    torch.manual_seed(3)
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            n_shared_experts=1,
            initializer_range=0.15,
            **_COMMON,
        )
    )


_MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(0),
    "other_llama": lambda: _llama(1),  # the same shapes, other weights
    "gemma": _gemma,
    "mla": _mla,
}


class Models:
    """The models of one test session, each written when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, name: str) -> Path:
        """The directory of model `name`: llama, other_llama, gemma or mla."""
        place = self._directory / name
        if not place.exists():
            model: Any = _MAKERS[name]()
            model.to(torch.float32).save_pretrained(place)
            _tokenizer().save_pretrained(place)
        return place


def _tokenizer() -> Any:
    """One word per token, such as <17>: servers want a tokenizer, tests speak in token ids."""
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<1>", eos_token="<2>", unk_token="<0>"
    )
