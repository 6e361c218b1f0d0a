"""A request is aborted while its blocks are on their way: no block is lost, the engine goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.engine.copies import HeldLoads
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import LONG_RESTORED, USERS, tokens_of

if TYPE_CHECKING:
    import pytest
    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

USER = USERS[0]


def load_has_begun(engine: Engine, loads: HeldLoads) -> None:
    """Step until the request waits for a copy that has begun."""
    for _ in range(10_000):
        engine.step()
        if loads.begun:
            break
        time.sleep(0.001)
    assert loads.begun
    assert [r.status.name for r in engine.scheduler.requests.values()] == ["WAITING_FOR_REMOTE_KVS"]


def abort_all(engine: Engine, loads: HeldLoads, steps: int = 5) -> None:
    """Abort every request, step on while the copy still writes, then let it end."""
    engine.abort()
    for _ in range(steps):
        engine.step()
    assert engine.free_blocks < engine.blocks - 1, "blocks were freed under a copy"
    loads.release()
    engine.settle()


def test_abort_during_a_load(
    models: Models, plain: Plain, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(models["llama"], transfer=tiers(disk=False)) as engine:
        engine.one_by_one([USER])
        assert engine.reset()
        loads = HeldLoads(monkeypatch)
        engine.add("aborted", USER)
        load_has_begun(engine, loads)
        abort_all(engine, loads)
        assert engine.free_blocks == engine.blocks - 1
        assert engine.reset()
        again = engine.one_by_one([USER])
        counters = engine.counters()
    assert tokens_of(again) == tokens_of(plain([USER]))
    assert counters.restored_from("memory") >= LONG_RESTORED
    assert_counters_add_up(counters)


def test_abort_of_a_preempted_request_that_loads_again(
    models: Models, plain: Plain, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(models["llama"], transfer=tiers(disk=False)) as engine:
        loads = HeldLoads(monkeypatch)
        engine.add("preempted", USER, max_tokens=64)
        while engine.counted_now("ebbtide_demoted_blocks_total") < 32:
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        load_has_begun(engine, loads)
        abort_all(engine, loads)
        assert engine.free_blocks == engine.blocks - 1
        assert engine.reset()
        again = engine.one_by_one([USER])
        counters = engine.counters()
    assert tokens_of(again) == tokens_of(plain([USER]))
    assert counters.restored_from("memory") >= LONG_RESTORED
    assert_counters_add_up(counters)
