"""What an operator can set, seen in a running engine: what is stored, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import LONG_RESTORED, USERS, prompt, tokens_of

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

ROOMY = 700  # device blocks; lazy stores look at the next 512 that the device would reuse


def test_lazy_stores_keep_what_the_device_gives_up(
    models: Models, plain: Plain, tiers: Tiers
) -> None:
    lazy = tiers(disk=False, stores="lazy")
    with Engine(models["llama"], blocks=ROOMY, transfer=lazy) as engine:
        assert engine.reset()  # what probes have left there is no part of this
        engine.one_by_one(USERS[:1])
        assert engine.counters().total("ebbtide_demoted_blocks_total") == 0
    with Engine(models["llama"], transfer=lazy) as engine:
        answers = engine.one_by_one(USERS * 2)
        counters = engine.counters()
    assert tokens_of(answers) == tokens_of(plain(USERS * 2))
    assert counters.restored_from("memory") >= LONG_RESTORED, counters
    assert_counters_add_up(counters, requests=6)


@pytest.mark.parametrize(("prompt_only", "blocks"), [(True, 4), (False, 7)])
def test_generated_blocks_are_stored_unless_only_prompts_are(
    models: Models, tiers: Tiers, prompt_only: bool, blocks: int
) -> None:
    transfer = tiers(disk=False, prompt_only=prompt_only)
    asked = prompt(61, 128)  # 4 blocks, and 3 of its answer
    with Engine(models["llama"], transfer=transfer) as engine:
        (answer,) = engine.one_by_one([asked], max_tokens=100)
        assert engine.reset()
        (again,) = engine.one_by_one([asked + answer.tokens])
        counters = engine.counters()
    assert again.cached_tokens == blocks * 32, counters
    assert_counters_add_up(counters, requests=2)


def test_the_default_load_failure_policy_is_refused_with_the_fix(
    models: Models, tiers: Tiers
) -> None:
    transfer = tiers()
    del transfer["kv_load_failure_policy"]  # "fail" is vLLM's default
    with pytest.raises(ConfigError, match=r'"kv_load_failure_policy": ?"recompute"'):
        Engine(models["llama"], transfer=transfer)


def test_a_hash_with_a_random_root_warns_and_leaves_nothing_on_disk(
    models: Models, plain: Plain, tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    flags: dict[str, Any] = {"prefix_caching_hash_algo": "xxhash"}
    with Engine(models["llama"], transfer=tiers(), **flags) as engine:
        first = engine.one_by_one(USERS[:1])
        assert engine.reset()
        again = engine.one_by_one(USERS[:1])
        counters = engine.counters()
    warnings = [r.getMessage() for r in caplog.records if "ebbtide" in r.name]
    assert [text for text in warnings if "xxhash" in text and "sha256_cbor" in text], warnings
    assert tokens_of(first + again) == tokens_of(plain(USERS[:1]) * 2)
    assert counters.restored_from("memory") == LONG_RESTORED, counters
    assert_counters_add_up(counters, requests=2)
    assert not tiers.disk_path.exists()
