"""Beside another connector, under vLLM's own that combines several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import LONG_RESTORED, USERS, tokens_of
from tests.engine.slow_remote import SlowRemote

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models


def test_the_first_of_two_connectors_restores(
    models: Models, plain: Plain, tiers: Tiers, tmp_path: Path
) -> None:
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [tiers(disk=False), other]},
    }
    with Engine(models["llama"], transfer=both) as engine:
        first = engine.one_by_one(USERS)
        assert engine.reset()
        again = engine.one_by_one(USERS)
        counters = engine.counters()
    assert tokens_of(first + again) == tokens_of(plain(USERS) * 2)
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 3
    assert counters.restored_from("memory") == 3 * LONG_RESTORED
    assert_counters_add_up(counters, requests=6)
    assert list((tmp_path / "other").iterdir()), "the other connector stored nothing"


def test_p25_blocks_that_another_connector_is_still_filling_are_not_stored(
    models: Models, plain: Plain, tiers: Tiers
) -> None:
    slow = {
        "kv_connector": "SlowRemote",
        "kv_connector_module_path": "tests.engine.slow_remote",
        "kv_role": "kv_both",
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [tiers(disk=False), slow]},
    }
    one = USERS[:1]
    with Engine(models["llama"], transfer=both) as engine:
        cold = engine.one_by_one(one)  # the other connector keeps the blocks
        assert engine.reset(connector=True)  # ours forgets them
        engine.ready()
        assert engine.reset()  # nor does the device keep what a probe may have left unstored
        stored = engine.counters().total("ebbtide_demoted_blocks_total")
        filled = SlowRemote.filled
        engine.add("again", one[0], max_tokens=16)
        while SlowRemote.filled == filled:
            engine.step()
            # Whatever waits to be filled must not have been copied.
            assert engine.counted_now("ebbtide_demoted_blocks_total") == stored
        engine.settle()
        stored_after = engine.counters().total("ebbtide_demoted_blocks_total")
        assert stored_after - stored >= LONG_RESTORED // 32, "a cold request for us, never stored"
        SlowRemote.kept.clear()
        assert engine.reset()
        warm = engine.one_by_one(one)
        counters = engine.counters()
    assert tokens_of(cold + warm) == tokens_of(plain(one) * 2)
    assert warm[0].cached_tokens == LONG_RESTORED
    assert counters.restored_from("memory") == LONG_RESTORED
