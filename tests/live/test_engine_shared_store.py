"""Engines with different models, and records of very different sizes, on one store."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.controls import TINY, Reference, answers, one_thread, tokens

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask
from ebbtide.connectors.reference import Engine
from ebbtide.connectors.reference.connect import attach_socket
from ebbtide.testing import keyed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.live.conftest import House

    from ebbtide.connectors.client import SocketClient

pytestmark = pytest.mark.live

RECORD_SIZES = (10_496, 18_432, 41_984, 1_124_352)
WINDOW = 8  # keys of one request


@pytest.fixture(scope="module", autouse=True)
def single() -> Iterator[None]:
    with one_thread():
        yield


def test_two_models_on_one_store_never_see_each_others_blocks(house: House) -> None:
    """Same texts, hence the same keys; other weights, other shapes, the same store."""
    house.start(disk=True, memory="2MiB")
    prompts = [tokens(260, seed=number) for number in range(8)]
    models = [(TINY, 0), (TINY, 1), (replace(TINY, num_layers=3, num_kv_heads=4), 0)]
    references = [Reference(config, seed=seed).answers(prompts) for config, seed in models]
    assert len({tuple(reference) for reference in references}) == 3
    engines = [Engine(config, 40, seed=seed) for config, seed in models]
    halves = [attach_socket(engine, house.socket) for engine in engines]
    draw = Random(0)
    restored = [0, 0, 0]
    try:
        for _ in range(36):
            number = draw.randrange(3)
            chosen = draw.sample(range(8), 2)
            outputs = engines[number].generate([prompts[one] for one in chosen], 12)
            assert answers(outputs) == [references[number][one] for one in chosen]
            assert engines[number].drain()  # an engine with copies under way goes on stepping
            restored[number] += sum(o.sources.memory + o.sources.disk for o in outputs)
        assert min(restored) > 500
        assert sum(h.scheduler.faults.count + h.worker.faults.count for h in halves) == 0
    finally:
        for engine in engines:
            engine.close()


class Records:
    """One namespace with records of one size, whose bytes follow from namespace and key."""

    def __init__(self, client: SocketClient, name: str, size: int) -> None:
        opened = ask(client, wire.OpenNamespace([["model", name], ["bytes", size]]))
        assert isinstance(opened, wire.NamespaceOpened)
        self.client, self.size = client, size
        self.handle, self.digest = opened.namespace, opened.digest
        self.stored: set[bytes] = set()
        self.right = 0

    def key(self, number: int) -> bytes:
        """The same in every namespace."""
        return hashlib.sha256(number.to_bytes(4, "big")).digest() + bytes(4)

    def put(self, numbers: Sequence[int]) -> None:
        keys = tuple(self.key(number) for number in numbers)
        grants = ask(self.client, wire.Reserve(self.handle, self.size, keys))
        assert isinstance(grants, wire.Grants)
        assert self.client.arena is not None
        mine = []
        for key, (offset, sequence) in zip(keys, grants.grants, strict=False):
            if sequence:
                view = self.client.arena.view(offset, self.size)
                view[:] = keyed_bytes(self.digest + key, self.size)
                view.release()
                mine.append(sequence)
            self.stored.add(key)
        assert ask(self.client, wire.Commit(tuple(mine))) == wire.Settled(bytes(len(mine)))

    def check(self, numbers: Sequence[int]) -> None:
        """Whatever a load brings is the right bytes."""
        keys = tuple(self.key(number) for number in numbers)
        ticket = self.client.submit(wire.LoadKeys(self.handle, keys))
        done = False
        while not done:
            self.client.wait(1.0)
            for completion in self.client.poll():
                assert completion.ticket == ticket
                done = isinstance(completion.message, wire.Done)
                if isinstance(completion.message, wire.Batch):
                    self._compare(keys, completion.message)
                    self.client.notify(wire.Ack(ticket, completion.message.batch))

    def _compare(self, keys: Sequence[bytes], batch: wire.Batch) -> None:
        assert self.client.arena is not None
        for position, length, _, offset in batch.granted:
            assert length == self.size
            assert keys[position] in self.stored
            view = self.client.arena.view(offset, length)
            assert view == keyed_bytes(self.digest + keys[position], self.size)
            view.release()
            self.right += 1


def test_records_of_all_sizes_share_one_store(house: House) -> None:
    """Memory holds a third of them, the disk nearly all; two namespaces of every size."""
    house.start(disk=True, memory="16MiB")
    client = house.client(arena=True)
    draw = Random(4)
    spaces = [Records(client, name, size) for size in RECORD_SIZES for name in ("a", "b")]
    for _ in range(220):
        space = draw.choice(spaces)
        several = WINDOW if space.size < 1_000_000 else 2
        first = draw.randrange(24 if space.size > 1_000_000 else 160)
        numbers = range(first, first + several)
        if draw.random() < 0.5:
            space.put(numbers)
        else:
            space.check(numbers)
    for space in spaces:
        space.check(range(20))
    report = ask(client, wire.Stats())
    assert isinstance(report, wire.Report)
    assert min(space.right for space in spaces) > 5
    assert report.report["counts"]["memory_evicted"] > 0
    assert report.report["disk"]["read_bytes"] > 10 * RECORD_SIZES[-1]
    assert report.report["disk"]["corrupt"] == report.report["counts"].get("memory_corrupt", 0) == 0
    assert report.report["counts"].get("faults", 0) == 0
