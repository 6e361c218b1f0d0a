"""The encoder cache: its vector, its rules one by one, and random operations against a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ebbtide.allocator.encoder_cache import EncoderCache, EncoderInput
from ebbtide.allocator.extra_keys import MultiModalItem
from ebbtide.errors import MisuseError

SIZES = {"A": 4, "B": 3, "C": 5, "D": 6, "E": 2}
AMPLE = 100


@dataclass
class Inputs:
    """As much of a request as the cache looks at."""

    request_id: str
    encoder_inputs: list[EncoderInput]


def inputs(request_id: str, names: str) -> Inputs:
    return Inputs(request_id, [EncoderInput(name, SIZES[name]) for name in names])


def take(cache: EncoderCache, request: Inputs, index: int) -> bool:
    """What a scheduler does with an item that it wants to have in this step."""
    if cache.check_and_update(request, index):
        return True
    if not cache.can_allocate(request, index, AMPLE):
        return False
    cache.allocate(request, index)
    return True


def test_the_vector_of_vllm() -> None:
    cache = EncoderCache(10)
    a, b = inputs("a", "AB"), inputs("b", "AC")
    assert take(cache, a, 0)
    assert take(cache, a, 1)
    assert (cache.free_embeds, cache.freeable_embeds) == (3, 3)
    assert cache.check_and_update(b, 0)
    assert not cache.can_allocate(b, 1, AMPLE)
    cache.free_encoder_input(a, 1)
    assert (cache.free_embeds, cache.freeable_embeds) == (3, 6)
    assert cache.can_allocate(b, 1, AMPLE)
    cache.allocate(b, 1)
    assert cache.take_freed() == ["B"]
    cache.free(a)
    cache.free(b)
    assert (cache.free_embeds, cache.freeable_embeds) == (1, 10)
    assert cache.unreferenced == ["A", "C"]
    d = inputs("d", "D")
    assert cache.can_allocate(d, 0, AMPLE)
    assert cache.free_embeds == 10
    cache.allocate(d, 0)
    assert (cache.free_embeds, cache.freeable_embeds) == (4, 4)
    assert cache.take_freed() == ["A", "C"]
    cache.check_integrity()


def test_what_cannot_be_computed_in_this_step_evicts_nothing() -> None:
    cache = EncoderCache(10)
    a, d = inputs("a", "A"), inputs("d", "D")
    take(cache, a, 0)
    cache.free(a)
    assert not cache.can_allocate(d, 0, SIZES["D"] - 1)
    assert not cache.can_allocate(d, 0, AMPLE, 10 - SIZES["D"] + 1)
    assert cache.unreferenced == ["A"]
    assert cache.can_allocate(d, 0, SIZES["D"], 10 - SIZES["D"])
    assert cache.unreferenced == []


def test_an_entry_is_released_with_the_last_item_that_has_it() -> None:
    cache = EncoderCache(10)
    a = inputs("a", "ABA")
    assert all(take(cache, a, index) for index in range(3))
    assert cache.held(a) == {0, 1, 2}
    cache.free_encoder_input(a, 0)
    cache.free_encoder_input(a, 0)
    assert cache.unreferenced == []
    cache.free_encoder_input(a, 2)
    assert cache.unreferenced == ["A"]
    assert cache.held(a) == {1}


def test_what_comes_back_in_the_same_step_is_not_dropped_by_the_workers() -> None:
    cache = EncoderCache(10)
    a, b = inputs("a", "AD"), inputs("b", "A")
    take(cache, a, 0)
    cache.free(a)
    assert cache.can_allocate(a, 1, AMPLE, 1)
    assert take(cache, b, 0)
    assert cache.take_freed() == []


def test_a_reset_forgets_references_and_what_was_evicted() -> None:
    cache = EncoderCache(10)
    a = inputs("a", "ABD")
    take(cache, a, 0)
    cache.free(a)
    take(cache, a, 2)
    take(cache, a, 1)
    cache.reset()
    assert (cache.free_embeds, cache.freeable_embeds, cache.held(a)) == (10, 10, set())
    assert cache.take_freed() == []
    assert not cache.check_and_update(a, 1)
    cache.check_integrity()


def test_misuse_is_refused_and_changes_nothing() -> None:
    cache = EncoderCache(10)
    a, b = inputs("a", "AD"), inputs("b", "AD")
    take(cache, a, 0)
    with pytest.raises(MisuseError, match="cached already"):
        cache.allocate(b, 0)
    take(cache, a, 1)
    with pytest.raises(MisuseError, match="no such input"):
        cache.check_and_update(a, 2)
    with pytest.raises(MisuseError, match="no such input"):
        cache.check_and_update(a, -1)
    cache.reset()
    take(cache, a, 1)
    other = Inputs("c", [EncoderInput("F", 5)])
    with pytest.raises(MisuseError, match="no room"):
        cache.allocate(other, 0)
    cache.check_integrity()
    with pytest.raises(MisuseError, match="not negative"):
        EncoderCache(-1)


def test_the_size_of_an_item_is_its_placeholders_that_take_an_embedding() -> None:
    item = MultiModalItem("A", 7, 5)
    assert EncoderInput.of(item) == ("A", 5)
    assert EncoderInput.of(item, [True, False, True, True, False]) == ("A", 3)
    with pytest.raises(MisuseError, match="one mark"):
        EncoderInput.of(item, [True])


def test_a_request_with_another_size_can_be_told() -> None:
    cache = EncoderCache(10)
    take(cache, inputs("a", "A"), 0)
    assert cache.num_embeds("A") == 4
    assert cache.num_embeds("B") is None


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("free_embeds", 9, "lost"),
        ("freeable_embeds", 9, "freeable"),
        ("_held", {}, "holders"),
        ("_held", {"a": {0}, "b": set()}, "holders"),
        ("_unreferenced", {}, "listed"),
    ],
)
def test_the_integrity_check_sees_what_is_wrong(name: str, wrong: object, message: str) -> None:
    cache = EncoderCache(10)
    a = inputs("a", "AB")
    take(cache, a, 0)
    take(cache, a, 1)
    cache.free_encoder_input(a, 1)
    cache.check_integrity()
    setattr(cache, name, wrong)
    with pytest.raises(MisuseError, match=message):
        cache.check_integrity()


class Model:
    """Entries as lists of (request, index); everything else is counted from them."""

    def __init__(self) -> None:
        self.holders: dict[str, list[tuple[str, int]]] = {}
        self.idle: list[str] = []
        self.evicted: list[str] = []
        self.order: dict[str, set[int]] = {}  # the order in which `free` visits

    def free(self) -> int:
        return 10 - sum(SIZES[name] for name in self.holders)

    def freeable(self) -> int:
        return self.free() + sum(SIZES[name] for name in self.idle)

    def hold(self, request: Inputs, index: int) -> None:
        name = request.encoder_inputs[index].identifier
        if name in self.idle:
            self.idle.remove(name)
        if (request.request_id, index) not in self.holders.setdefault(name, []):
            self.holders[name].append((request.request_id, index))
        self.order.setdefault(request.request_id, set()).add(index)

    def drop(self, request: Inputs, index: int) -> None:
        name = request.encoder_inputs[index].identifier
        holders = self.holders.get(name, [])
        if (request.request_id, index) in holders:
            holders.remove((request.request_id, index))
            if not holders:
                self.idle.append(name)
        held = self.order.get(request.request_id, set())
        held.discard(index)
        if not held:
            self.order.pop(request.request_id, None)


class Encoder(RuleBasedStateMachine):
    @initialize(
        names=st.lists(st.text("ABCDE", min_size=1, max_size=10), min_size=2, max_size=4),
    )
    def start(self, names: list[str]) -> None:
        self.cache = EncoderCache(10)
        self.model = Model()
        self.requests = [inputs(f"r{number}", each) for number, each in enumerate(names)]

    def pick(self, data: st.DataObject) -> tuple[Inputs, int]:
        request = data.draw(st.sampled_from(self.requests))
        return request, data.draw(st.integers(0, len(request.encoder_inputs) - 1))

    @rule(
        data=st.data(),
        budget=st.sampled_from([AMPLE, AMPLE, 4]),
        scheduled=st.sampled_from([0, 0, 0, 1, 4]),
        allocate=st.sampled_from([True, True, True, False]),
    )
    def schedule(self, data: st.DataObject, budget: int, scheduled: int, allocate: bool) -> None:
        request, index = self.pick(data)
        name, size = request.encoder_inputs[index]
        known = name in self.model.holders
        assert self.cache.check_and_update(request, index) == known
        if known:
            self.model.hold(request, index)
            return
        fits = size <= budget and size + scheduled <= self.model.freeable()
        assert self.cache.can_allocate(request, index, budget, scheduled) == fits
        while fits and size + scheduled > self.model.free():
            oldest = self.model.idle.pop(0)
            del self.model.holders[oldest]
            self.model.evicted.append(oldest)
        if fits and allocate:
            self.cache.allocate(request, index)
            self.model.hold(request, index)

    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        request, index = self.pick(data)
        self.cache.free_encoder_input(request, index)
        self.model.drop(request, index)

    @rule(data=st.data())
    def free_all(self, data: st.DataObject) -> None:
        request, _ = self.pick(data)
        self.cache.free(request)
        for index in list(self.model.order.get(request.request_id, ())):
            self.model.drop(request, index)

    @rule()
    def take_freed(self) -> None:
        expected = [name for name in self.model.evicted if name not in self.model.holders]
        assert self.cache.take_freed() == expected
        self.model.evicted = []

    @rule(really=st.sampled_from([True, False, False, False]))
    def reset(self, really: bool) -> None:
        if really:
            self.cache.reset()
            self.model = Model()

    @invariant()
    def states_agree(self) -> None:
        self.cache.check_integrity()
        assert self.cache.free_embeds == self.model.free()
        assert self.cache.freeable_embeds == self.model.freeable()
        assert self.cache.unreferenced == self.model.idle
        for request in self.requests:
            assert self.cache.held(request) == self.model.order.get(request.request_id, set())


TestEncoder = Encoder.TestCase
TestEncoder.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
