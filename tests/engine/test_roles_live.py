"""Roles on a store that lives on: a producer fills it, a consumer restores from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import LONG_RESTORED, prompt, tokens_of
from tests.engine.servers import END_S, SharedStore, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

USERS = [prompt(seed) for seed in range(2)]
STRANGER = prompt(50)


def test_a_producer_fills_a_shared_store_and_a_consumer_restores_from_it(
    models: Models, plain: Plain, tiers: Tiers, tmp_path: Path
) -> None:
    expected = tokens_of(plain([*USERS, STRANGER]))
    with SharedStore(tmp_path) as store:

        def engine(role: str) -> Engine:
            transfer = tiers(disk=False, socket=store.socket, role=role)
            transfer["kv_connector_extra_config"]["limits"] = {"lookup_timeout": "2s"}
            return Engine(models["llama"], transfer=transfer)

        with engine("kv_producer") as producer:
            produced = producer.one_by_one([*USERS, USERS[0]])
            wrote = producer.counters()
        filled = store.stats()["memory"]["records"]
        with engine("kv_consumer") as consumer:
            consumed = consumer.one_by_one([*USERS, STRANGER])
            read = consumer.counters()
        eventually(lambda: store.held() == 0, END_S, "slots stay held")
        assert store.stats()["memory"]["records"] == filled, "the consumer has stored"
    assert tokens_of(produced) == [*expected[:2], expected[0]]
    assert wrote.restored_tokens == 0
    assert wrote.total("ebbtide_demoted_blocks_total") >= 2 * 64
    assert wrote.total("ebbtide_requests_total") == 0, "it never looks into the tiers"
    assert wrote.total("ebbtide_faults_total") == 0
    assert tokens_of(consumed) == expected
    assert [answer.cached_tokens for answer in consumed] == [LONG_RESTORED] * 2 + [0]
    assert read.restored_tokens == 2 * LONG_RESTORED
    assert read.total("ebbtide_demoted_blocks_total") == 0
    assert_counters_add_up(read, requests=3)
