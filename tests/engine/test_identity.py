"""Restored blocks never change an answer, and the answers do depend on the restored blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import (
    LONG_RESTORED,
    USERS,
    assert_mostly_different,
    prompt,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="evicted_on_the_device"),
        pytest.param({"enable_prefix_caching": False}, id="no_prefix_caching"),
        pytest.param({"max_num_batched_tokens": 256}, id="chunked_prefill"),
    ],
)
def test_answers_stay_the_same_when_prompts_come_back(
    models: Models,
    plain: Plain,
    tiers: Tiers,
    zeros_restored: Callable[[], None],
    flags: dict[str, Any],
) -> None:
    expected = plain(USERS, **flags)
    with Engine(models["llama"], transfer=tiers(disk=False), **flags) as engine:
        first = engine.one_by_one(USERS)
        assert engine.counters().restored_tokens == 0
        again = engine.one_by_one(USERS)
        counters = engine.counters()
        zeros_restored()
        control = engine.one_by_one(USERS)
        restored_zeros = engine.counters().since(counters).restored_tokens
    assert tokens_of(first) == tokens_of(expected)
    assert tokens_of(again) == tokens_of(expected)
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 3
    # How many blocks of a prompt survive on the device depends on when copies ended.
    assert counters.restored_from("memory") >= 2 * LONG_RESTORED
    assert_counters_add_up(counters, requests=6)
    assert restored_zeros >= 2 * LONG_RESTORED
    assert_mostly_different(expected, control)


CROWD = [prompt(100 + seed, 320) for seed in range(16)]
PRESSURE: dict[str, Any] = {"blocks": 76, "max_num_seqs": 8}


def test_answers_stay_the_same_under_preemption(
    models: Models, plain: Plain, tiers: Tiers, zeros_restored: Callable[[], None]
) -> None:
    expected = plain(CROWD, max_tokens=96, together=True, **PRESSURE)
    with Engine(models["llama"], transfer=tiers(disk=False), **PRESSURE) as engine:
        first = engine.generate(CROWD, max_tokens=96)
        again = engine.generate(CROWD, max_tokens=96)
        counters = engine.counters()
        zeros_restored()
        control = engine.generate(CROWD, max_tokens=96)
    assert tokens_of(first) == tokens_of(expected)
    assert tokens_of(again) == tokens_of(expected)
    assert counters.preemptions >= 1
    assert counters.restored_tokens >= 1000
    assert_counters_add_up(counters, requests=32)
    assert_mostly_different(expected, control)
