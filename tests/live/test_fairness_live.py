"""One engine floods the store: what another one may keep stays, and its loads still come."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import cbor2
import pytest
from tests.live.conftest import eventually

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

KEPT = 30  # records of the quiet engine; its floor is 38 of 128 slots
LOADS = 20
FAIRNESS = {"cap": 0.8, "namespace": [{"match": "model=quiet", "floor": 0.3}]}


def _shares(stats: dict[str, Any], model: str) -> dict[str, Any]:
    digest = hashlib.sha256(cbor2.dumps([["model", model]], canonical=True)).hexdigest()
    found: dict[str, Any] = stats["namespaces"][digest]
    return found


@pytest.mark.parametrize("disk", [False, True])
def test_the_loads_of_one_engine_come_beside_the_flood_of_another(house: House, disk: bool) -> None:
    house.start(disk=disk, fairness=FAIRNESS, limits={"store_window": "1MiB"})
    quiet, loud = house.engine(model="quiet"), house.engine(model="loud")
    assert quiet.do(f"put 0 {KEPT}") == str(KEPT)
    loud.send("put 1000 4000")
    eventually(lambda: house.stats()["counts"]["stored"] > KEPT)  # the flood has begun
    for _ in range(LOADS):
        assert quiet.do(f"load 0 {KEPT}") == f"{KEPT} 0 0"
    # It rests, and whoever stores all the time would be the more recent in all of memory.
    stored = house.stats()["counts"]["stored"]
    eventually(lambda: house.stats()["counts"]["stored"] > stored + 300, 30.0)
    assert quiet.do(f"load 0 {KEPT}") == f"{KEPT} 0 0"
    loud.end()
    stats = house.stats()
    flood = _shares(stats, "loud")
    assert flood["refused"]["store_shed"] > 0
    assert flood["memory_slot_bytes"] <= 0.8 * stats["memory"]["capacity_bytes"]
    assert not _shares(stats, "quiet")["evicted_for_others"]
    assert not stats["counts"].get("faults")
