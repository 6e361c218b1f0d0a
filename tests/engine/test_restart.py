"""What one engine computed, the next one restores: after a restart, and by role."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def test_p64_p84_after_a_restart_prompts_come_from_the_disk_and_are_counted_once(
    models: Models, plain: Plain, tiers: Tiers, zeros_restored: Callable[[], None]
) -> None:
    expected = plain(USERS)
    with Engine(models["llama"], transfer=tiers()) as engine:
        assert tokens_of(engine.one_by_one(USERS)) == tokens_of(expected)
    with Engine(models["llama"], transfer=tiers()) as engine:
        again = engine.one_by_one(USERS)
        counters = engine.counters()
        engine.one_by_one(USERS, reads=False)
        unread = engine.counters().since(counters)
        zeros_restored()
        control = engine.one_by_one(USERS)
    for name in ("requests", "prompt_blocks", "hit_tokens", "miss_blocks"):
        assert unread.total(f"ebbtide_{name}_total") == 0  # in no denominator
    assert tokens_of(again) == tokens_of(expected)
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 3
    assert counters.restored_from("disk") == 3 * LONG_RESTORED
    assert_counters_add_up(counters, requests=3)
    assert_mostly_different(expected, control)


def test_a_producer_stores_and_a_consumer_restores(
    models: Models, plain: Plain, tiers: Tiers
) -> None:
    expected = plain(USERS)
    with Engine(models["llama"], transfer=tiers(role="kv_producer")) as producer:
        produced = producer.one_by_one([*USERS, USERS[0]])
        wrote = producer.counters()
    with Engine(models["llama"], transfer=tiers(role="kv_consumer")) as consumer:
        consumed = consumer.one_by_one([USERS[0], prompt(50), USERS[1]])
        read = consumer.counters()
    assert tokens_of(produced) == tokens_of([*expected, expected[0]])
    assert wrote.restored_tokens == 0
    assert wrote.total("ebbtide_demoted_blocks_total") >= 3 * 64
    assert_counters_add_up(wrote, requests=0)
    assert tokens_of([consumed[0], consumed[2]]) == tokens_of(expected[:2])
    assert read.restored_tokens == 2 * LONG_RESTORED
    assert read.total("ebbtide_demoted_blocks_total") == 0
    assert_counters_add_up(read, requests=3)
