"""What commands ask, as messages to a session: answers and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask
from ebbtide.connectors.local_client import LocalClient
from ebbtide.errors import MisuseError, TierUnavailableError
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.bounds import Bounds
from ebbtide.tiers.runtime import ThreadRuntime
from ebbtide.tiers.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_BYTES = 16 << 20
KEYS = tuple(number.to_bytes(36, "big") for number in range(4))


@pytest.fixture
def client() -> Iterator[LocalClient]:
    """On a store of memory only."""
    runtime = ThreadRuntime()
    arena, bounds = Arena.create(MEMORY_BYTES), Bounds.for_capacity(MEMORY_BYTES)
    store = Store(runtime, arena, None, bounds)
    found = LocalClient(store, runtime)
    yield found
    found.close()
    runtime.close()
    store.close(False)


def store_records(client: LocalClient) -> wire.NamespaceOpened:
    opened = ask(client, wire.OpenNamespace([["model", "m"]]))
    assert isinstance(opened, wire.NamespaceOpened)
    grants = ask(client, wire.Reserve(opened.namespace, 4096, KEYS))
    assert isinstance(grants, wire.Grants)
    settled = ask(client, wire.Commit(tuple(sequence for _, sequence in grants.grants)))
    assert settled == wire.Settled(bytes(len(KEYS)))
    return opened


def describe(client: LocalClient, start: int = 0) -> dict[str, Any]:
    answer = ask(client, wire.Describe(start))
    assert isinstance(answer, wire.Report)
    return answer.report


def test_a_description_survives_the_wire_and_names_what_a_purge_takes(client: LocalClient) -> None:
    opened = store_records(client)
    report = describe(client)
    frame = wire.encode(1, wire.Report(report))
    assert wire.Decoder().feed(frame) == [(1, wire.Report(report))]
    (namespace,) = report["namespaces"]
    assert (namespace["digest"], namespace["memory_records"]) == (opened.digest, len(KEYS))
    answer = ask(client, wire.Purge(opened.digest))
    assert isinstance(answer, wire.Report)
    assert (answer.report["memory_records"], answer.report["disk_records"]) == (len(KEYS), 0)
    (namespace,) = describe(client)["namespaces"]
    assert (namespace["memory_records"], namespace["drops"]) == (0, {"reset": len(KEYS)})


def test_behind_the_last_namespace_a_description_is_empty(client: LocalClient) -> None:
    store_records(client)
    assert describe(client, 1 << 40)["namespaces"] == []


def test_what_cannot_be_done_is_a_failure_of_its_request(client: LocalClient) -> None:
    with pytest.raises(TierUnavailableError, match="no disk tier"):
        ask(client, wire.Check())
    with pytest.raises(MisuseError, match="unknown to this store"):
        ask(client, wire.Purge(bytes(32)))
    store_records(client)
