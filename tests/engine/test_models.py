"""Other shapes of cache: several KV-cache groups that share bytes, and a latent instead of K, V."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import assert_mostly_different, prompt, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

# 1008 tokens and two: the CPU's kernel for latents adds up in another order behind a restored
# prefix, and tokens close to a tie flip, with vLLM alone as well; not so for this remainder.
USERS = [prompt(20 + seed, 1010) for seed in range(3)]


@pytest.mark.parametrize(
    ("model", "flags", "restored_each"),
    [
        # Six groups: a prompt takes 32 blocks of the full group and a window's of each other.
        pytest.param("gemma", {"blocks": 250}, 992, id="sliding_windows"),
        # The CPU's kernel for latents has blocks of 16 tokens. Named, because vLLM prefers another
        # one where the machine has AMX, which takes no float32.
        pytest.param(
            "mla",
            {"blocks": 100, "block_size": 16, "attention_backend": "CPU_MLA"},
            1008,
            id="latents",
        ),
    ],
)
def test_answers_stay_the_same(
    models: Models,
    plain: Plain,
    tiers: Tiers,
    zeros_restored: Callable[[], None],
    model: str,
    flags: dict[str, Any],
    restored_each: int,
) -> None:
    flags = {**flags, "max_model_len": 1152}
    expected = plain(USERS, model, **flags)
    with Engine(models[model], transfer=tiers(), **flags) as engine:
        first = engine.one_by_one(USERS)
        assert engine.reset()
        from_memory = engine.one_by_one(USERS)
        warm = engine.counters()
    with Engine(models[model], transfer=tiers(), **flags) as engine:
        from_disk = engine.one_by_one(USERS)
        cold = engine.counters()
        assert engine.reset()
        zeros_restored()
        control = engine.one_by_one(USERS)
    assert tokens_of(first) == tokens_of(expected)
    for again, counters, tier in ((from_memory, warm, "memory"), (from_disk, cold, "disk")):
        assert tokens_of(again) == tokens_of(expected)
        assert [answer.cached_tokens for answer in again] == [restored_each] * 3, counters
        assert counters.restored_from(tier) == 3 * restored_each, counters
    assert_counters_add_up(warm, requests=6)
    assert_counters_add_up(cold, requests=3)
    assert_mostly_different(expected, control)
