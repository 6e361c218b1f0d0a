"""Our encoder cache beside vLLM's own, under random operations, compared after each."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from ebbtide.allocator.encoder_cache import EncoderCache, EncoderInput
from ebbtide.allocator.extra_keys import MultiModalItem

CAPACITY = 10
SIZES = {"A": 4, "B": 3, "C": 5, "D": 6, "E": 2}
STEPS = 3000


@pytest.fixture(scope="session")
def what_lasts() -> None:
    """No engine is built here: nothing lasts."""


@dataclass
class Pair:
    """One request for both sides. Every other item's placeholders hold one that takes nothing."""

    theirs: Request
    request_id: str
    encoder_inputs: list[EncoderInput]


def pair(request_id: str, names: list[str]) -> Pair:
    import torch

    features, inputs, offset = [], [], 0
    for number, name in enumerate(names):
        masked = number % 2 == 1
        length = SIZES[name] + masked
        mask = [True] * SIZES[name] + [False] if masked else None
        place = PlaceholderRange(
            offset=offset, length=length, is_embed=None if mask is None else torch.tensor(mask)
        )
        features.append(
            MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)
        )
        inputs.append(EncoderInput.of(MultiModalItem(name, offset, length), mask))
        offset += length
    request = Request(
        request_id, [1] * offset, SamplingParams(max_tokens=1), None, mm_features=features
    )
    return Pair(request, request_id, inputs)


class Both:
    """The same calls on both sides, with equal answers and equal state after each."""

    def __init__(self) -> None:
        self.theirs = EncoderCacheManager(CAPACITY)
        self.ours = EncoderCache(CAPACITY)
        self.evicted = 0

    def agree(self) -> None:
        assert self.ours.free_embeds == self.theirs.num_free_slots
        assert self.ours.freeable_embeds == self.theirs.num_freeable_slots
        assert self.ours.unreferenced == list(self.theirs.freeable)
        for name in SIZES:
            assert self.ours.num_embeds(name) == self.theirs.num_embeds_by_hash.get(name)
        self.ours.check_integrity()

    def check(self, one: Pair, index: int) -> bool:
        found = self.ours.check_and_update(one, index)
        assert found == self.theirs.check_and_update_cache(one.theirs, index)
        self.agree()
        return found

    def can_allocate(self, one: Pair, index: int, budget: int, scheduled: int) -> bool:
        fits = self.ours.can_allocate(one, index, budget, scheduled)
        assert fits == self.theirs.can_allocate(one.theirs, index, budget, scheduled)
        self.agree()
        return fits

    def allocate(self, one: Pair, index: int) -> None:
        self.ours.allocate(one, index)
        self.theirs.allocate(one.theirs, index)
        self.agree()

    def free_one(self, one: Pair, index: int) -> None:
        self.ours.free_encoder_input(one, index)
        self.theirs.free_encoder_input(one.theirs, index)
        self.agree()

    def free(self, one: Pair) -> None:
        self.ours.free(one)
        self.theirs.free(one.theirs)
        self.agree()

    def take_freed(self) -> None:
        freed = self.ours.take_freed()
        assert freed == self.theirs.get_freed_mm_hashes()
        self.evicted += len(freed)

    def reset(self) -> None:
        self.ours.reset()
        self.theirs.reset()
        self.agree()


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_leave_both_in_the_same_state(seed: int) -> None:
    choose = random.Random(seed)
    both = Both()
    live: dict[str, Pair] = {}
    hits = refused = 0
    for step in range(STEPS):
        if len(live) < 3:
            name = f"r{step}"
            live[name] = pair(name, choose.choices("ABCDE", k=choose.choice((1, 2, 3, 12))))
        one = choose.choice(list(live.values()))
        index = choose.randrange(len(one.encoder_inputs))
        match choose.choices(
            ("schedule", "free one", "free", "take freed", "reset"), (12, 6, 4, 3, 0.05)
        )[0]:
            case "schedule":
                budget, scheduled = choose.choice((100, 100, 4)), choose.choice((0, 0, 0, 2))
                if both.check(one, index):
                    hits += 1
                elif not both.can_allocate(one, index, budget, scheduled):
                    refused += 1
                elif choose.random() < 0.8:
                    both.allocate(one, index)
            case "free one":
                both.free_one(one, index)
            case "free":
                both.free(one)
                del live[one.request_id]
            case "take freed":
                both.take_freed()
            case "reset":
                both.reset()
    both.take_freed()
    assert min(hits, refused, both.evicted) > STEPS / 100  # it was no idle walk
