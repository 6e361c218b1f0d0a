"""What a reset forgets: the device's prefix cache alone, or the tiers as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import LONG_RESTORED, USERS, tokens_of

if TYPE_CHECKING:
    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

USER = USERS[:1]


def test_a_plain_reset_leaves_the_tiers_alone(models: Models, plain: Plain, tiers: Tiers) -> None:
    with Engine(models["llama"], transfer=tiers(disk=False)) as engine:
        engine.generate(USER)
        assert engine.reset(), "a copy under way holds device blocks"
        again = engine.generate(USER)
        counters = engine.counters()
    assert tokens_of(again) == tokens_of(plain(USER))
    assert counters.restored_from("memory") == LONG_RESTORED
    assert_counters_add_up(counters, requests=2)


def test_a_reset_of_the_connector_empties_the_tiers_for_good(
    models: Models, plain: Plain, tiers: Tiers
) -> None:
    with Engine(models["llama"], transfer=tiers()) as engine:
        engine.generate(USER)
        assert engine.reset(connector=True)
    with Engine(models["llama"], transfer=tiers()) as engine:
        after_restart = engine.one_by_one(USER)
        assert engine.counters().restored_tokens == 0
        assert engine.reset(connector=True)
        after_reset = engine.one_by_one(USER)
        assert engine.counters().restored_tokens == 0
        assert engine.reset()
        stored_again = engine.one_by_one(USER)
        counters = engine.counters()
    assert tokens_of(after_restart + after_reset + stored_again) == tokens_of(plain(USER) * 3)
    assert counters.restored_tokens == LONG_RESTORED
    assert_counters_add_up(counters, requests=3)
