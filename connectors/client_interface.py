"""The client's interface: `submit(message) -> ticket`, `poll() -> completions`.

Never waits, never raises for a lost store: requests that cannot be answered complete with a
`Failure`. Usable by a scheduler that has no event loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ebbtide.connectors import protocol as wire
from ebbtide.errors import EbbtideError, TierUnavailableError

if TYPE_CHECKING:
    from ebbtide.tiers.arena import Arena

STREAMING = (wire.Batch, wire.BatchToVerify, wire.Failed)  # answers that more answers follow

LOST = wire.Failure("TierUnavailableError", "The store is not reachable; this is a miss")
CROWDED = wire.Failure("NoSpaceError", "The store does not keep up; this is a miss")


class Completion(NamedTuple):
    """An answer. `final`: no more will come for the ticket."""

    ticket: int
    message: wire.Message
    final: bool


class Client(Protocol):
    """What the halves of a connector use. One thread; no call waits except `wait`."""

    @property
    def incarnation(self) -> int:
        """Rises with every store that was reached: handles and slots of an older one are void."""
        ...

    @property
    def arena_generation(self) -> int:
        """Which arena the offsets of this store belong to."""
        ...

    @property
    def arena(self) -> Arena | None:
        """The mapped arena of the present store; None while there is none."""
        ...

    @property
    def load_window_bytes(self) -> int:
        """How much one load may hold unacknowledged."""
        ...

    def submit(self, message: wire.Message) -> int:
        """Send a request. Answers come from `poll`, also when the store is away."""
        ...

    def notify(self, message: wire.Message) -> None:
        """Send a message that has no answer (touch, ack, release)."""
        ...

    def poll(self) -> list[Completion]:
        """Everything that has been answered since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` may have something. Not for scheduler hooks."""
        ...

    def close(self) -> None: ...


def ask(client: Client, message: wire.Message, timeout_s: float = 10.0) -> wire.Message:
    """Submit and wait for the one answer: for tools and tests, never for a scheduler hook.

    Raises the error that a Failure carries, and TierUnavailableError after `timeout_s`. Other
    completions that arrive meanwhile are lost: use it on a client with nothing else open.
    """
    ticket = client.submit(message)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for completion in client.poll():
            if completion.ticket == ticket and completion.final:
                if isinstance(completion.message, wire.Failure):
                    raise error_of(completion.message)
                return completion.message
        client.wait(0.05)
    raise TierUnavailableError("The store did not answer in time", timeout_s=timeout_s)


def error_of(failure: wire.Failure) -> EbbtideError:
    """The error that a Failure carries."""
    kinds = {kind.__name__: kind for kind in _all_errors(EbbtideError)}
    return kinds.get(failure.error, EbbtideError)(failure.problem, next_step=failure.next_step)


def _all_errors(base: type[EbbtideError]) -> list[type[EbbtideError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in _all_errors(child))]
