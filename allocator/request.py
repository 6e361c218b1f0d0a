"""What the allocator knows of a request: its tokens, their names, how far it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.allocator.hashing import DEFAULT_ALGORITHM, check_token_ids, hash_blocks, none_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ebbtide.allocator.extra_keys import LoraAdapter, MultiModalItem


class Request:
    """The tokens of one request and the hashes of its full blocks.

    Hashes are computed here and only grow: on construction for the prompt, in `append_output` for
    every block that becomes full. Tokens not yet accepted (drafts) never belong here.

    The scheduler owns `num_computed_tokens`, `num_in_flight_tokens` (of them those that a step
    still under way computes), `junction_tokens` (of the last lookup), `num_preemptions` and
    `is_running`; the allocator only reads them. A preemption sets `num_computed_tokens = 0`,
    `is_running = False` and counts.
    `lora_id` is what events call the adapter beside its name; no hash knows it.
    `skip_reading_prefix_cache` makes lookups miss (as prompt log-probabilities need it); the blocks
    are still cached for others.

    Raises MisuseError for token ids that are not ints, ConfigError for an unknown algorithm.
    """

    __slots__ = (
        "_root",
        "_token_ids",
        "algorithm",
        "block_hashes",
        "extras",
        "hash_block_size",
        "is_running",
        "junction_tokens",
        "lora_id",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request_id",
        "skip_reading_prefix_cache",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[Any],
        *,
        hash_block_size: int,
        algorithm: str = DEFAULT_ALGORITHM,
        root: bytes | None = None,
        lora: LoraAdapter | None = None,
        mm_items: Sequence[MultiModalItem] = (),
        cache_salt: str | None = None,
        prompt_embeds: NDArray[Any] | None = None,
        skip_reading_prefix_cache: bool = False,
        lora_id: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.hash_block_size = hash_block_size
        self.algorithm = algorithm
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.junction_tokens = 0
        self.lora_id = lora_id
        self.num_preemptions = 0
        self.is_running = False
        self._root = none_hash(algorithm) if root is None else root
        self.extras = (lora, tuple(mm_items), cache_salt, prompt_embeds)
        self.block_hashes: list[bytes] = []
        # Hashing checks the ids in full blocks; the tail, not hashed yet, is checked apart.
        self.block_hashes = self._hash(prompt_token_ids)
        check_token_ids(prompt_token_ids[len(self.block_hashes) * hash_block_size :])
        self._token_ids: list[int] = list(
            prompt_token_ids.tolist()
            if isinstance(prompt_token_ids, np.ndarray)
            else prompt_token_ids
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self._token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy. O(prompt)."""
        return self._token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy. O(output)."""
        return self._token_ids[self.num_prompt_tokens :]

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output, a copy. O(tokens)."""
        return self._token_ids.copy()

    def tokens(self, start: int, end: int) -> list[int]:
        """The tokens of positions `start` .. `end - 1`, as far as they are known. A copy."""
        return self._token_ids[start:end]

    def append_output(self, token_ids: Sequence[int]) -> None:
        """Add accepted tokens and name the blocks they fill. O(tokens added + block size).

        Raises MisuseError, and adds none, unless they are Python ints.
        """
        self._token_ids.extend(check_token_ids(token_ids))
        if len(self._token_ids) // self.hash_block_size > len(self.block_hashes):
            self.block_hashes += self._hash(self._token_ids)

    def _hash(self, token_ids: Sequence[int] | NDArray[Any]) -> list[bytes]:
        """The hashes of the blocks of `token_ids` that come after the known ones."""
        lora, mm_items, cache_salt, prompt_embeds = self.extras
        return hash_blocks(
            token_ids,
            self.hash_block_size,
            algorithm=self.algorithm,
            root=self._root,
            known=self.block_hashes,
            lora=lora,
            mm_items=mm_items,
            cache_salt=cache_salt,
            prompt_embeds=prompt_embeds,
        )
