"""The device side of the reference engine: the paged tensors and the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ebbtide.connectors.reference.model import Batch, Model, SequenceRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.connectors.reference.model import ModelConfig, WaitForLayer


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of one sequence to run: `token_ids` stand at `position` and after.

    `block_tables` are the sequence's, one for each KV group, long enough for all of them.
    """

    token_ids: list[int]
    position: int
    block_tables: Sequence[Sequence[int]]


class Runner:
    """A model and its KV.

    `kv_caches` holds [2, num_blocks, block_size, kv_heads, head_dim] tensors in the model's dtype,
    one for a layer of each KV group: a block belongs to one group at a time (as in vLLM 0.32). All
    are views of a single allocation, so that a block is copied in one go. They stay in place for
    the runner's life; a worker half registers them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = config
        self.seed = seed
        self.block_size = block_size
        self.device = torch.device(device)
        self.model = Model(config, seed=seed, device=device)
        tensors = config.num_layers // len(config.windows)
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_caches: list[torch.Tensor] = list(
            torch.zeros((tensors, 2, *shape), dtype=config.dtype, device=self.device)
        )

    def execute(
        self, parts: Sequence[Part], wait_for_layer: WaitForLayer | None = None
    ) -> torch.Tensor:
        """Logits float32 [parts, vocab] on the CPU for the last token of each part.

        Writes the KV of all tokens. Parts may share blocks of a prefix, even one that another part
        of the same call computes: every layer writes all its KV before it attends. Parts that stand
        on blocks still on their way need `wait_for_layer`: see `Model.forward`.
        """
        token_ids: list[int] = []
        positions: list[torch.Tensor] = []
        slots: list[list[torch.Tensor]] = [[] for _ in self.config.windows]
        ranges: list[SequenceRange] = []
        for part in parts:
            end = part.position + len(part.token_ids)
            tables = [torch.tensor(ids, dtype=torch.int64) for ids in part.block_tables]
            where = torch.arange(part.position, end)
            block = torch.div(where, self.block_size, rounding_mode="floor")
            positions.append(where)
            for group, table in zip(slots, tables, strict=True):
                group.append(table[block] * self.block_size + where % self.block_size)
            on_device = tuple(table.to(self.device) for table in tables)
            ranges.append(SequenceRange(len(token_ids), len(part.token_ids), end, on_device))
            token_ids += part.token_ids
        batch = Batch(
            torch.tensor(token_ids, dtype=torch.int64, device=self.device),
            torch.cat(positions).to(self.device),
            tuple(torch.cat(group).to(self.device) for group in slots),
            tuple(ranges),
        )
        return self.model.forward(batch, self.kv_caches, wait_for_layer).cpu()
