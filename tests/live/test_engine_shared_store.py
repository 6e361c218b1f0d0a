"""Engines with different models, and records of very different sizes, on one store."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.controls import BLOCK, TINY, Reference, answers, tokens
from tests.live.answering import EngineProcess
from tests.live.conftest import House
from tests.live.test_disk_bound import Watch

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask
from ebbtide.connectors.reference import Engine
from ebbtide.connectors.reference.connect import attach_socket
from ebbtide.testing import keyed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ebbtide.connectors.client import SocketClient

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("single_thread")]

RECORD_SIZES = (10_496, 18_432, 41_984, 1_124_352)
WINDOW = 8  # keys of one request
OTHER = replace(TINY, num_layers=3, num_kv_heads=4)
DISK_BYTES = 16 << 20


def test_two_models_on_one_store_never_see_each_others_blocks(house: House) -> None:
    """Same texts, hence the same keys; other weights, other shapes, the same store."""
    house.start(disk=True, memory="2MiB")
    prompts = [tokens(260, seed=number) for number in range(8)]
    models = [(TINY, 0), (TINY, 1), (OTHER, 0)]
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


class Three(NamedTuple):
    """Processes on one store: two engines of the same model, one of another."""

    house: House
    first: EngineProcess
    second: EngineProcess
    other: EngineProcess


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    with ExitStack() as stack:
        house = stack.enter_context(closing(House(tmp_path_factory.mktemp("three"))))
        disk = {"path": str(house.directory / "disk"), "capacity": "16MiB", "write_after": "0s"}
        house.start(disk=disk, memory="2MiB")
        engines = []
        for model in (TINY, TINY, OTHER):
            engine = EngineProcess({"socket": house.socket}, model=model, store="required")
            stack.callback(engine.end)
            engines.append(engine)
        for engine in engines:
            engine.until_ready()
        yield Three(house, *engines)
        assert [(engine.faults, engine.finish()) for engine in engines] == [(0, 0)] * 3
        assert "Traceback" not in house.log_text(), house.log_text()


def test_what_one_process_computed_another_of_its_model_restores(three: Three) -> None:
    prompts = [tokens(200 + 17 * number, seed=1000 + number) for number in range(4)]
    right = Reference().answers(prompts)
    for engine, expected in (
        (three.first, right),
        (three.other, Reference(OTHER).answers(prompts)),
    ):
        computed = [engine.ask(prompt)[0] for prompt in prompts]
        assert answers(computed) == expected
        assert [answer.sources["computed"] for answer in computed] == list(map(len, prompts))
        engine.drain()
    restored = [three.second.ask(prompt)[0] for prompt in prompts]
    assert answers(restored) == right
    for prompt, answer in zip(prompts, restored, strict=True):
        assert answer.restored_tokens == (len(prompt) - 1) // BLOCK * BLOCK


def test_three_processes_stay_within_one_stores_budgets(three: Three) -> None:
    """All ask at the same time, for more than memory or the disk holds."""
    house, *engines = three
    prompts = [tokens(300, seed=number) for number in range(60)]
    same = Reference().answers(prompts)
    right = (same, same, Reference(OTHER).answers(prompts))

    def ask(number: int) -> int:
        draw, restored = Random(number), 0
        for _ in range(40):
            chosen = draw.sample(range(len(prompts)), 2)
            found = engines[number].ask(*(prompts[one] for one in chosen))
            assert answers(found) == [right[number][one] for one in chosen]
            restored += sum(answer.restored_tokens for answer in found)
        engines[number].drain()
        return restored

    watch = Watch(house.directory / "disk")
    with watch.watching(), ThreadPoolExecutor(len(engines)) as threads:
        restored = list(threads.map(ask, range(len(engines))))
    assert min(restored) > 500
    stats = house.stats()
    memory, disk = stats["memory"], stats["disk"]
    assert memory["used_bytes"] <= memory["capacity_bytes"] == 2 << 20
    assert DISK_BYTES / 2 < watch.most <= DISK_BYTES
    assert min(stats["counts"]["memory_evicted"], disk["evicted"]) > 0
    assert memory["reserved_bytes"] == stats["loads"] == 0
    assert disk["corrupt"] == stats["counts"].get("faults", 0) == 0


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
    report = house.stats()
    assert min(space.right for space in spaces) > 5
    assert report["counts"]["memory_evicted"] > 0
    assert report["disk"]["read_bytes"] > 10 * RECORD_SIZES[-1]
    assert report["disk"]["corrupt"] == report["counts"].get("memory_corrupt", 0) == 0
    assert report["counts"].get("faults", 0) == 0
