"""How long prompts take to compute: from the schedule of the first chunk to the end of the last.

That is what a request waits for, other requests in the same steps included, and so what loading
has to beat. Steps may overlap (asynchronous scheduling, pipeline stages): their ends come in the
order of their schedules.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

STEPS_MAX = 64  # under way; more than any engine overlaps, so older ones have no end to come


class Prefill(NamedTuple):
    """Prompt tokens that one request had computed, and how long that took."""

    tokens: int
    elapsed_s: float


class PrefillClock:
    """Scheduler thread only. O(1) per scheduled request."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun: dict[str, tuple[int, float]] = {}  # request -> first token, when
        self._steps: deque[list[tuple[str, int]]] = deque(maxlen=STEPS_MAX)

    def scheduled(
        self,
        step: SchedulerOutput,
        before: Mapping[str, int],
        requests: Mapping[str, Request],
    ) -> None:
        """A step was scheduled. `before`: computed tokens of its requests, without this step."""
        now = self._now()
        complete: list[tuple[str, int]] = []
        for request_id in step.preempted_req_ids or ():
            self._begun.pop(request_id, None)
        for request_id, count in step.num_scheduled_tokens.items():
            request = requests.get(request_id)
            first = before[request_id]
            if request is None or first >= request.num_prompt_tokens:
                continue
            begun = self._begun.setdefault(request_id, (first, now))
            if first + count >= request.num_prompt_tokens:
                complete.append((request_id, request.num_prompt_tokens - begun[0]))
        self._steps.append(complete)

    def step_ended(self) -> list[Prefill]:
        """The results of the oldest step are there: the prompts that it completed."""
        if not self._steps:
            return []
        now = self._now()
        ended = []
        for request_id, tokens in self._steps.popleft():
            begun = self._begun.pop(request_id, None)
            if begun is not None:
                ended.append(Prefill(tokens, now - begun[1]))
        return ended

    def forget(self, request_id: str) -> None:
        """The request ended, or its blocks were loaded anew."""
        self._begun.pop(request_id, None)
