"""Metrics of what no honest client can bring about, on a store in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.test_session_server import Rim

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.http.metrics import StoreCollector
from ebbtide.connectors.traffic import VERBS, Histogram, Traffic
from ebbtide.testing import SimStore
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.bounds import Bounds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ebbtide.connectors.server import StoreServer

PAGE = 4096


@pytest.fixture
async def rim(tmp_path: Path) -> AsyncIterator[Rim]:
    found = Rim(str(tmp_path / "s"))
    yield found
    await found.close()


def value_of(server: StoreServer, series: str) -> float:
    registry = CollectorRegistry()
    registry.register(StoreCollector(server))
    found: float | None = registry.get_sample_value(series)
    assert found is not None
    return found


async def test_faults_of_requests_and_of_completions_are_counted(
    rim: Rim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert value_of(rim.server, "ebbtide_store_faults_total") == 0
    peer = await rim.greeted()
    monkeypatch.setattr(rim.store, "stats", fail)
    await rim.say(peer, 7, wire.Stats())
    await rim.hear(peer)
    monkeypatch.undo()
    assert value_of(rim.server, "ebbtide_store_faults_total") == 1
    rim.runtime.call_later(0.0, fail)
    await rim.say(peer, 8, wire.Flush())
    await rim.hear(peer)
    assert value_of(rim.server, "ebbtide_store_faults_total") == 2


async def test_a_lost_batch_is_counted(rim: Rim, tmp_path: Path) -> None:
    bounds = Bounds.for_capacity(8 * PAGE, write_after_s=0.0)
    with SimStore(
        5, 8 * PAGE, disk_path=str(tmp_path / "d"), slab_bytes=24 * PAGE, bounds=bounds
    ) as sim:
        rim.server.store = sim.store
        assert value_of(rim.server, "ebbtide_store_disk_lost_batches_total") == 0
        assert sim.slab is not None
        sim.slab.fail_next("sync")
        sim.put(sim.namespace(), [key_of(1)], PAGE)
        sim.runtime.pass_time(1.0)
        assert value_of(rim.server, "ebbtide_store_disk_lost_batches_total") == 1
        rim.server.store = rim.store


def test_a_histogram_counts_a_value_at_its_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 14.0


def test_verbs_are_spelled_as_in_the_protocol_and_replies_are_none() -> None:
    assert {"hello", "open_namespace", "lookup", "load", "ack", "purge"} <= set(VERBS.values())
    traffic = Traffic()
    traffic.handled(wire.Ok(), 1.0)
    assert not traffic.requests
