"""How much is talked about, in which order, and how large the tiers are: the plan of one case.

The plan follows from its options and seed alone, so that two machines run the same load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from ebbtide.bench.contestant import BLOCK_SIZE, Question
from ebbtide.bench.conversations import Conversations, Shape, Turn
from ebbtide.errors import ConfigError
from ebbtide.sizes import exact_size

MEMORY_FACTOR = 2.5  # memory tier to device pool, in every case
DISK_FACTOR = 2.5  # disk tier to working set
DISK_BYTES_MIN = 64 << 20
WRITE_AFTER = "100ms"  # not 30 s: what one round left unwritten would be written in another's
USERS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """One case: the conversations and the sizes. Counts of blocks, without the null block."""

    factor: float
    shape: Shape
    concurrent: int
    record_bytes: int
    request_blocks: int
    device_blocks: int
    working_blocks: int  # distinct full blocks of the last prompts
    seed: int

    @property
    def name(self) -> str:
        """As the case is called in the results."""
        return f"working_set_{self.factor:g}x"

    @property
    def memory_blocks(self) -> int:
        """Records that the memory tier has room for."""
        return int(self.device_blocks * MEMORY_FACTOR)

    @property
    def evicts(self) -> bool:
        """The device pool cannot hold the working set."""
        return self.working_blocks > self.device_blocks

    @property
    def exceeds_memory(self) -> bool:
        """Nor can the memory tier."""
        return self.working_blocks > self.memory_blocks

    @property
    def ceiling_blocks(self) -> int:
        """A device pool that never has to evict."""
        return self.shape.users * self.request_blocks + self.device_blocks

    def settings(self, socket: str, directory: str | None) -> dict[str, Any]:
        """Of a store; `directory` None: without a disk tier."""
        memory = {"capacity": exact_size(self.memory_blocks * self.record_bytes)}
        settings: dict[str, Any] = {"socket": socket, "memory": memory}
        if directory is not None:
            wanted = int(self.working_blocks * DISK_FACTOR) * self.record_bytes
            settings["disk"] = {
                "path": directory,
                "capacity": exact_size(max(wanted, DISK_BYTES_MIN)),
                "write_after": WRITE_AFTER,
            }
        return settings

    def fill(self) -> list[list[Turn]]:
        """The first round: every conversation from its start, a group of users at a time."""
        users = range(self.shape.users)
        groups = [users[first : first + self.concurrent] for first in users[:: self.concurrent]]
        return [
            [Turn(user, turn) for user in group]
            for group in groups
            for turn in range(self.shape.turns)
        ]

    def orders(self, rounds: int) -> list[list[Turn]]:
        """The measured rounds: the last turn of every user, in an order that changes.

        Every round comes from the one before by the same permutation, so that each block comes back
        after as many others in one round as in the next, and the rounds are comparable. Users who
        asked late in a round tend to ask early in the next, as people do who are still there: their
        place is their age plus as much chance.
        """
        users, draw = list(range(self.shape.users)), random.Random(self.seed)
        places = [len(users) - 1 - place for place in users]
        keys = [age / len(users) + draw.random() for age in places]
        permutation = sorted(users, key=keys.__getitem__)
        found = []
        for _ in range(rounds):
            found.append([Turn(user, self.shape.turns - 1) for user in users])
            users = [users[place] for place in permutation]
        return found

    def questions(self, conversations: Conversations, turns: list[Turn]) -> list[Question]:
        """The turns as requests. Answers of earlier turns must be known."""
        return [
            Question(turn.name, conversations.prompt(turn), self.shape.answer_tokens)
            for turn in turns
        ]

    def described(self) -> dict[str, Any]:
        """The sizes, for the reader of the results."""
        record = self.record_bytes
        return {
            "users": self.shape.users,
            "turns": self.shape.turns,
            "concurrent": self.concurrent,
            "device_bytes": self.device_blocks * record,
            "memory_bytes": self.memory_blocks * record,
            "working_set_bytes": self.working_blocks * record,
        }


def plan(
    factor: float,
    *,
    turns: int,
    document_tokens: int,
    answer_tokens: int,
    concurrent: int,
    record_bytes: int,
    seed: int,
) -> WorkingSet:
    """The smallest number of users whose conversations make `factor` device pools.

    The device pool has room for the requests that run at a time and one more. Raises ConfigError
    when that many users would be too many.
    """
    one = Shape(1, turns, document_tokens, answer_tokens, concurrent)
    request_blocks = -(-(one.prompt_tokens_max + answer_tokens) // BLOCK_SIZE)
    device_blocks = (concurrent + 1) * request_blocks
    users = 1
    while True:
        shape = Shape(users, turns, document_tokens, answer_tokens, concurrent)
        blocks = distinct_blocks(shape)
        if blocks >= factor * device_blocks:
            break
        users = max(users + 1, int(users * factor * device_blocks / blocks))
        if users > USERS_MAX:
            raise ConfigError(
                f"This working set takes more than {USERS_MAX} users",
                next_step="Give smaller factors, or longer documents.",
            )
    return WorkingSet(
        factor, shape, concurrent, record_bytes, request_blocks, device_blocks, blocks, seed
    )


def distinct_blocks(shape: Shape) -> int:
    """Full blocks of all users' last prompts, each prefix counted once."""
    unanswered = [0] * shape.answer_tokens
    turns = [Turn(user, turn) for user in range(shape.users) for turn in range(shape.turns)]
    conversations = Conversations(shape, {turn.name: unanswered for turn in turns})
    found: set[int] = set()
    for turn in shape.last_turns():
        prompt, chain = conversations.prompt(turn), 0
        for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
            chain = hash((chain, *prompt[end - BLOCK_SIZE : end]))
            found.add(chain)
    return len(found)
