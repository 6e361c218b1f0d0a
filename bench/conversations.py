"""Multi-turn conversations over real text: the load of the demo and of the offload benchmark.

The text is `pydoc_data.topics`, which every Python ships: long documents about a real subject, no
download. Each user asks several questions about a document of their own; each prompt repeats
the whole conversation so far, as chat clients do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import NamedTuple

from ebbtide.connectors.reference.tokenizer import encode

SYSTEM = (
    "You are a patient teacher of programming. Answer from the document that the user has given, "
    "say which part of it your answer rests on, and keep to two sentences.\n\n"
)
QUESTIONS = (
    "Which rule of this document do people break most often, and what happens then?",
    "Show the shortest example that obeys the rule you named, and explain each line.",
    "What did this look like in older versions, and why was it changed?",
    "Which other chapter should I read next to understand this one better?",
)


class Turn(NamedTuple):
    """One request: which user asks for the how-manieth time."""

    user: int
    turn: int

    @property
    def name(self) -> str:
        return f"user{self.user}-turn{self.turn}"


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is talked about. All counts of tokens are of byte-level tokens."""

    users: int = 6
    turns: int = 3
    document_tokens: int = 1_950
    answer_tokens: int = 16
    group: int = 3  # users who talk during the same time

    @property
    def prompt_tokens_max(self) -> int:
        """No prompt of this shape is longer."""
        question = max(len(text) for text in QUESTIONS) + 32
        head = len(SYSTEM) + self.document_tokens + 64
        return head + self.turns * (question + self.answer_tokens)

    def order(self) -> list[Turn]:
        """Every request once: users of a group take turns, one group after the other.

        So a conversation comes back after its group's others (further than a small device pool
        reaches, nearer than memory does), and in a second round after everybody's (further than
        memory).
        """
        return [
            Turn(user, turn)
            for first in range(0, self.users, self.group)
            for turn in range(self.turns)
            for user in range(first, min(first + self.group, self.users))
        ]

    def last_turns(self) -> list[Turn]:
        """The longest prompt of every user, once."""
        return [Turn(user, self.turns - 1) for user in range(self.users)]


@dataclass(slots=True)
class Conversations:
    """Builds prompts; `answers` holds what has been answered so far, by turn name."""

    shape: Shape
    answers: dict[str, list[int]] = field(default_factory=dict)

    def prompt(self, turn: Turn) -> list[int]:
        """Token ids of the request: system text, document, earlier turns with answers, question."""
        tokens = encode(SYSTEM + self._document(turn.user))
        for earlier in range(turn.turn + 1):
            question = QUESTIONS[(turn.user + earlier) % len(QUESTIONS)]
            tokens += encode(f"\n\nUser: {question}\nTeacher: ", bos=False)
            if earlier < turn.turn:
                tokens += self.answers[Turn(turn.user, earlier).name]
        return tokens

    def working_set_blocks(self, block_size: int) -> int:
        """Distinct full blocks that the whole conversations leave behind, the shared ones once."""
        blank = [0] * self.shape.answer_tokens
        blanks = {turn.name: blank for turn in self.shape.order()}
        finished = Conversations(self.shape, blanks)
        lengths = [len(finished.prompt(turn)) + len(blank) for turn in self.shape.last_turns()]
        shared = len(encode(SYSTEM)) // block_size
        return sum(length // block_size - shared for length in lengths) + shared

    def _document(self, user: int) -> str:
        """`document_tokens` bytes of ASCII text that no other user has."""
        names = sorted(topics)
        text = f"Document {user}.\n"
        chosen = user % len(names)
        while len(text) < self.shape.document_tokens:
            text += topics[names[chosen]].encode("ascii", "ignore").decode()
            chosen = (chosen + self.shape.users) % len(names)
        return text[: self.shape.document_tokens]
