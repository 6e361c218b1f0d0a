"""Prompts as token ids, and what an engine answered to them."""

from __future__ import annotations

import random
from typing import NamedTuple

VOCABULARY = 512  # of all tiny models
LONG = 2048  # tokens; 64 blocks of 32
LONG_RESTORED = LONG  # a load brings all of them, and the last token is computed again

Prompt = tuple[int, ...]


class Answer(NamedTuple):
    """The greedy tokens of one prompt, and how many prompt tokens were not computed."""

    tokens: tuple[int, ...]
    cached_tokens: int


def prompt(seed: int, tokens: int = LONG) -> Prompt:
    """A prompt that shares no prefix with that of any other seed. Token ids 0 to 2 are special."""
    return tuple(random.Random(seed).choices(range(3, VOCABULARY), k=tokens))


USERS = [prompt(seed) for seed in range(3)]  # each takes 65 of 79 usable device blocks


def tokens_of(answers: list[Answer]) -> list[tuple[int, ...]]:
    """The answers without what they cost."""
    return [answer.tokens for answer in answers]


def assert_mostly_different(plain: list[Answer], answers: list[Answer]) -> None:
    """At least 90 % of the answers differ: the control that shows that restored bytes matter."""
    differing = sum(a.tokens != b.tokens for a, b in zip(plain, answers, strict=True))
    assert differing >= 0.9 * len(plain), f"only {differing} of {len(plain)} answers differ"
