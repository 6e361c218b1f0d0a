"""Which blocks fill: follows every scheduled request through its block table.

A block is full when all its tokens are computed and known to the hash chain; drafted tokens that
were not accepted yet are in neither, because hashes cover accepted tokens only. With asynchronous
scheduling the last hash comes a step or two late: it is picked up then, or when the request
finishes. What fills in a step is offered with the next one, which every rank runs after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.connectors.offload.groups import NULL_BLOCK
from ebbtide.connectors.seam import BlockRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from ebbtide.connectors.offload.groups import KVGroups


def computed_before(step: SchedulerOutput) -> dict[str, int]:
    """Per scheduled request the tokens that were computed, or loaded, before this step."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
    return before


class Fill:
    """Scheduler thread only. O(1) per scheduled request in a step that fills nothing."""

    def __init__(
        self, groups: KVGroups, manager: KVCacheManager, *, prompt_only: bool = False
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._prompt_only = prompt_only
        self._requests: dict[str, Request] = {}
        self._done: dict[str, int] = {}  # request -> tokens in front of which all is offered
        self._mine: dict[str, set[int]] = {}  # request -> blocks that were offered for it
        self.waiting: list[BlockRef] = []  # full after the step that was planned last

    def arrived(self, request: Request) -> None:
        """A request that may be stored."""
        self._requests[request.request_id] = request

    def take(self) -> list[BlockRef]:
        """What filled in the steps before this one."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def holds(self, key: bytes) -> bool:
        """Whether the key waits to be offered."""
        return any(ref.key == key for ref in self.waiting)

    def forget(self, request_id: str) -> set[int]:
        """The request's blocks are not what they were. Returns those that were offered."""
        self._done.pop(request_id, None)
        return self._mine.pop(request_id, set())

    def scheduled(self, step: SchedulerOutput, before: Mapping[str, int]) -> set[int]:
        """Note what this step will fill. Returns blocks that a preemption took since the last.

        `before`: see `computed_before`.
        """
        lost: set[int] = set()
        cached = step.scheduled_cached_reqs
        for request_id in (*(step.preempted_req_ids or ()), *cached.resumed_req_ids):
            lost |= self.forget(request_id)
        for new in step.scheduled_new_reqs:  # also resumed ones, with the newer model runner
            lost |= self.forget(new.req_id)
        for request_id, count in step.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                self._advance(request, before[request_id] + count, None)
        return lost

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """The request ends: what its last steps have filled. Its blocks are still its own."""
        request_id = request.request_id
        if self._requests.pop(request_id, None) is not None and request_id in self._done:
            self._advance(request, request.num_computed_tokens, block_ids)
        self.forget(request_id)

    def _advance(
        self, request: Request, tokens: int, tables: Sequence[Sequence[int]] | None
    ) -> None:
        """Offer what is full with `tokens` computed tokens and was not offered before."""
        groups = self._groups
        hashes = request.block_hashes
        full = min(tokens, len(hashes) * groups.hash_block_size)
        if self._prompt_only:
            full = min(full, request.num_prompt_tokens)
        done = self._done.setdefault(request.request_id, 0)
        step = groups.hash_block_size
        if full // step <= done // step:
            return
        if tables is None:
            tables = self._manager.get_block_ids(request.request_id)
        mine = self._mine.setdefault(request.request_id, set())
        for group in groups.all:
            table = tables[group.number]
            first, end = done // group.block_size, min(full // group.block_size, len(table))
            for block, key in enumerate(groups.keys(group, hashes, first, end), start=first):
                block_id = table[block]
                if block_id != NULL_BLOCK:
                    self.waiting.append(BlockRef(block_id, key))
                    mine.add(block_id)
        self._done[request.request_id] = full
