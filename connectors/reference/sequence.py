"""One request inside the reference engine, and what is handed out when it has finished."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ebbtide.allocator import Request
    from ebbtide.connectors.seam import LoadResult


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Where the KV of a prompt came from at its first admission, in tokens. Sums to its length."""

    device: int = 0
    memory: int = 0
    disk: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request.

    `ttft_s` runs from arrival to the first token, `ttft_scheduled_s` from the first admission to
    it, both in seconds of the monotonic clock. `first_logits` is float32 [vocab] on the CPU when it
    was asked for. `misses` counts the blocks that were asked for and not loaded, by reason.
    """

    request_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    ttft_s: float
    ttft_scheduled_s: float
    sources: TokenSources
    misses: dict[str, int]
    preemptions: int
    first_logits: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine. Owned by the scheduler's thread."""

    request: Request
    max_new_tokens: int
    keep_logits: bool = False
    arrived: float = field(default_factory=time.monotonic)
    first_admitted: float | None = None
    first_token: float | None = None
    first_logits: torch.Tensor | None = None
    load_start_tokens: int = 0  # tokens in front of the load under way
    load_tokens: int = 0  # that it stands for: more than its blocks hold where a window hides some
    loads: bool = True  # asks the tiers behind the device
    device_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The engine's name of the request."""
        return self.request.request_id

    @property
    def remaining_tokens(self) -> int:
        """Known tokens whose KV is missing: 1 while decoding."""
        return self.request.num_tokens - self.request.num_computed_tokens

    @property
    def finished(self) -> bool:
        """All tokens that were asked for are there."""
        generated = self.request.num_tokens - self.request.num_prompt_tokens
        return generated >= self.max_new_tokens

    def admitted(self, local_tokens: int) -> None:
        """Note an admission with a device hit of `local_tokens`; only the first one counts."""
        if self.first_admitted is None:
            self.first_admitted = time.monotonic()
            self.device_tokens = local_tokens

    def load_ended(self, result: LoadResult, tokens: int) -> None:
        """Count the `tokens` that a load brought by source; loads after a preemption do not count.

        Every loaded block stands for an equal part of them.
        """
        if self.request.num_preemptions:
            return
        done = 0
        for position, source in enumerate(result.sources):
            if tokens and position < result.loaded_blocks:
                upto = tokens * (position + 1) // result.loaded_blocks
                self.loaded[source] = self.loaded.get(source, 0) + upto - done
                done = upto
            elif source not in ("memory", "disk"):
                self.misses[source] = self.misses.get(source, 0) + 1

    def output(self, misses: dict[str, int] | None = None) -> RequestOutput:
        """The finished answer. `misses` replaces the reasons seen by the engine itself."""
        request = self.request
        memory, disk = self.loaded.get("memory", 0), self.loaded.get("disk", 0)
        assert self.first_token is not None
        assert self.first_admitted is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            token_ids=tuple(request.output_token_ids),
            ttft_s=self.first_token - self.arrived,
            ttft_scheduled_s=self.first_token - self.first_admitted,
            sources=TokenSources(
                device=self.device_tokens,
                memory=memory,
                disk=disk,
                computed=request.num_prompt_tokens - self.device_tokens - memory - disk,
            ),
            misses=self.misses if misses is None else misses,
            preemptions=request.num_preemptions,
            first_logits=self.first_logits,
        )
