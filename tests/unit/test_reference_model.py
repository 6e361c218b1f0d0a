"""The model computes what a Llama computes, repeatably, and listens to its whole context."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from ebbtide.connectors.reference.model import Batch, Model, ModelConfig, SequenceRange
from ebbtide.connectors.reference.rate import matmul_flops, measure_matmul_rate
from ebbtide.connectors.reference.tokenizer import BOS, EOS, VOCAB_SIZE, decode, encode
from ebbtide.errors import ConfigError

pytestmark = pytest.mark.usefixtures("single_thread")

TINY = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128
)
BLOCK = 16


def empty_cache(config: ModelConfig, blocks: int) -> list[torch.Tensor]:
    shape = (config.num_layers, 2, blocks, BLOCK, config.num_kv_heads, config.head_dim)
    return list(torch.zeros(shape, dtype=config.dtype))


def prompt(length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(97, 123, (length,), generator=draw).tolist()


def forward(
    model: Model, cache: list[torch.Tensor], parts: list[tuple[list[int], int, torch.Tensor]]
) -> torch.Tensor:
    """One step for parts of (new tokens, position of the first, block table)."""
    tokens: list[int] = []
    places, slots, ranges = [], [], []
    for new, position, table in parts:
        where = torch.arange(position, position + len(new))
        places.append(where)
        slots.append(table[where // BLOCK] * BLOCK + where % BLOCK)
        ranges.append(SequenceRange(len(tokens), len(new), position + len(new), (table,)))
        tokens += new
    batch = Batch(torch.tensor(tokens), torch.cat(places), (torch.cat(slots),), tuple(ranges))
    return model.forward(batch, cache)


def prefill(
    model: Model, cache: list[torch.Tensor], tokens: list[int], chunk: int, start: int = 0
) -> torch.Tensor:
    table = torch.arange(len(cache[0][0]))
    bounds = [*range(start, len(tokens), chunk), len(tokens)]
    for begin, end in pairwise(bounds):
        logits = forward(model, cache, [(tokens[begin:end], begin, table)])
    return logits


def answer(
    model: Model, cache: list[torch.Tensor], logits: torch.Tensor, length: int, count: int
) -> list[int]:
    table = torch.arange(len(cache[0][0]))
    out: list[int] = []
    for position in range(length, length + count):
        out.append(int(logits.argmax()))
        logits = forward(model, cache, [(out[-1:], position, table)])
    return out


def dense_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """The same network in float64, without cache, chunks, fused weights or in-place steps."""
    config = model.config
    count, dim, groups = len(tokens), config.head_dim, config.num_heads // config.num_kv_heads

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return rows / torch.sqrt((rows**2).mean(-1, keepdim=True) + config.norm_eps)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        exponent = -torch.arange(0, dim, 2).double() / dim
        frequency = torch.pow(config.rope_theta, exponent)
        angle = torch.arange(count).double()[:, None, None] * frequency
        even, odd = rows[..., 0::2], rows[..., 1::2]
        turned = (
            even * angle.cos() - odd * angle.sin(),
            even * angle.sin() + odd * angle.cos(),
        )
        return torch.stack(turned, dim=-1).flatten(-2)

    hidden = model._embedding.double()[torch.tensor(tokens)]
    sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    hidden_from = torch.ones(count, count).triu(1).bool()
    for layer in model._layers:
        weights = torch.split(layer.qkv.double(), sizes)
        query, key, value = ((norm(hidden) @ weight.T).view(count, -1, dim) for weight in weights)
        query, key = rotate(query), rotate(key)
        mixed = torch.empty_like(query)
        for head in range(config.num_heads):
            scores = query[:, head] @ key[:, head // groups].T / math.sqrt(dim)
            scores[hidden_from] = -math.inf
            mixed[:, head] = torch.softmax(scores, -1) @ value[:, head // groups]
        hidden = hidden + mixed.flatten(1) @ layer.attention_out.double().T
        gate, up = (norm(hidden) @ layer.gate_up.double().T).chunk(2, dim=-1)
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer.down.double().T
    return torch.mm(norm(hidden[-1:]), model._head.double().T)


@pytest.mark.parametrize("tied", [False, True])
def test_agrees_with_a_plain_float64_network(tied: bool) -> None:
    config = ModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        tied_head=tied,
    )
    model = Model(config, seed=3)
    tokens = prompt(50, seed=1)
    logits = prefill(model, empty_cache(config, 5), tokens, chunk=20)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), dense_logits(model, tokens), atol=1e-5, rtol=0)


def test_weights_depend_on_the_seed_alone() -> None:
    tokens = prompt(40, seed=1)
    logits = [
        prefill(Model(TINY, seed=seed), empty_cache(TINY, 4), tokens, chunk=64)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=0.1)


@pytest.mark.parametrize(("config", "length"), [(TINY, 300), (ModelConfig(), 320)])
def test_chunk_size_moves_logits_by_less_than_1e_5(config: ModelConfig, length: int) -> None:
    model = Model(config)
    tokens = prompt(length, seed=2)
    seen = []
    for chunk in (length, 128, 37):
        cache = empty_cache(config, length // BLOCK + 3)
        logits = prefill(model, cache, tokens, chunk)
        seen.append((logits, answer(model, cache, logits, length, 8)))
    for logits, tokens_out in seen[1:]:
        assert (logits - seen[0][0]).abs().max() < 1e-5
        assert tokens_out == seen[0][1]
    assert 0.3 < seen[0][0].std() < 0.7


def test_a_mixed_batch_gives_what_each_sequence_gives_alone() -> None:
    model = Model(TINY)
    prompts = [prompt(length, seed=length) for length in (40, 33, 7)]
    alone = [prefill(model, empty_cache(TINY, 4), tokens, chunk=64)[0] for tokens in prompts]
    cache = empty_cache(TINY, 12)
    tables = [torch.tensor([5, 1, 9]), torch.tensor([2, 10, 4]), torch.tensor([7])]
    forward(model, cache, [(prompts[0][:39], 0, tables[0]), (prompts[1][:20], 0, tables[1])])
    logits = forward(
        model,
        cache,
        [
            (prompts[0][39:], 39, tables[0]),  # a decode
            (prompts[1][20:], 20, tables[1]),  # a chunk behind a prefix
            (prompts[2], 0, tables[2]),  # a whole prompt
        ],
    )
    torch.testing.assert_close(logits, torch.stack(alone), atol=1e-5, rtol=0)


def test_answers_depend_on_the_prefix() -> None:
    model = Model(TINY)
    changed = {"all zero": 0, "one block zero": 0}
    count, length, cases = 16, 128, 20
    for case in range(cases):
        tokens = prompt(length, seed=case)
        cache = empty_cache(TINY, length // BLOCK + 1)
        logits = prefill(model, cache, tokens, length)
        kept = [tensor.clone() for tensor in cache]
        right = answer(model, cache, logits, length, count)
        for name, blocks in (("all zero", slice(0, 7)), ("one block zero", slice(3, 4))):
            damaged = [tensor.clone() for tensor in kept]
            for tensor in damaged:
                tensor[:, blocks] = 0
            logits = prefill(model, damaged, tokens, BLOCK, start=length - BLOCK)
            changed[name] += answer(model, damaged, logits, length, count) != right
    assert changed["all zero"] >= 0.9 * cases
    assert changed["one block zero"] >= 0.9 * cases


def test_bfloat16_runs() -> None:
    config = ModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        dtype=torch.bfloat16,
    )
    tokens = prompt(40, seed=1)
    logits = prefill(Model(config), empty_cache(config, 4), tokens, chunk=32)
    exact = prefill(Model(TINY), empty_cache(TINY, 4), tokens, chunk=32)
    torch.testing.assert_close(logits, exact, atol=0.2, rtol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        ModelConfig(num_heads=8, num_kv_heads=3)
    with pytest.raises(ConfigError, match="even"):
        ModelConfig(head_dim=63)


def test_flops_are_those_of_the_products() -> None:
    weights = 64 * 128 + 64 * 64 + 64 * 256 + 128 * 64  # of one layer
    pairs = 10 * 11 // 2
    attention = 2 * 2 * 64 * pairs
    head = 2 * 64 * VOCAB_SIZE
    assert matmul_flops(TINY, 10) == 2 * (2 * weights * 10 + attention) + head
    parts = matmul_flops(TINY, 4, logit_rows=0) + matmul_flops(TINY, 6, 10)
    assert parts == matmul_flops(TINY, 10)  # chunks add up


def test_matmul_rate_is_measured() -> None:
    assert measure_matmul_rate(size=128, seconds=0.01) > 1e7


def test_bytes_are_tokens() -> None:
    assert encode("aé") == [BOS, 97, 0xC3, 0xA9]
    assert encode("a", bos=False) == [97]
    assert decode([BOS, *encode("aé", bos=False), EOS]) == "aé"
    assert decode([0xC3]) == "�"
