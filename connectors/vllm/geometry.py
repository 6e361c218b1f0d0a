"""How the ranks of one engine share a record: whose shard begins where, and who writes it.

A record holds the shards of all ranks side by side, pipeline stages first, then tensor-parallel
shards. Ranks that hold replicas share one shard, and the first of them writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbtide.connectors.offload.groups import KVGroup, KVGroups
from ebbtide.connectors.vllm.cache_groups import taking_part, window_of
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ebbtide.connectors.vllm.metadata import Handshake, Shard

Rank = tuple[int, int]  # pipeline stage, tensor-parallel rank


@dataclass(frozen=True)
class Geometry:
    """What the scheduler half needs to know of all ranks together."""

    groups: KVGroups
    ranks: int
    writers: dict[int, int]  # by group number
    shard_offsets: tuple[tuple[int, ...], ...]  # by rank, then by group number

    @classmethod
    def of(cls, config: KVCacheConfig, handshakes: Mapping[Rank, Handshake]) -> Geometry:
        """Raises ConfigError when ranks contradict each other."""
        numbers = taking_part(config)
        places = sorted(handshakes)
        offsets = {place: [0] * (1 + max(numbers)) for place in places}
        writers: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for number in numbers:
            end = 0
            for stage, tp_rank in places:
                shard = handshakes[stage, tp_rank].shards.get(number)
                if shard is None:
                    continue
                first = tp_rank - tp_rank % shard.replicas
                if tp_rank == first:
                    offsets[stage, tp_rank][number] = end
                    end += shard.record_bytes
                    writers[number] = writers.get(number, 0) + 1
                else:
                    _check_alike(number, shard, handshakes[stage, first], tp_rank)
                    offsets[stage, tp_rank][number] = offsets[stage, first][number]
            if not end:
                raise ConfigError(
                    f"No rank has a layer of KV-cache group {number}",
                    next_step="Run this model without ebbtide, and report its cache groups.",
                    layers=len(config.kv_cache_groups[number].layer_names),
                )
            sizes[number] = end
        groups = [
            KVGroup(number, spec.block_size, sizes[number], window_of(spec))
            for number in numbers
            for spec in (config.kv_cache_groups[number].kv_cache_spec,)
        ]
        hash_block_size = config.hash_block_size or min(group.block_size for group in groups)
        return cls(
            KVGroups(groups, hash_block_size, fails_whole=len(config.kv_cache_groups) > 1),
            len(places),
            writers,
            tuple(tuple(offsets[place]) for place in places),
        )

    def shard_bytes(self, group: KVGroup) -> list[int]:
        """Of one record, the parts that the ranks write, in their order."""
        starts = sorted({offsets[group.number] for offsets in self.shard_offsets})
        ends = [*starts[1:], group.record_bytes]
        return [end - start for start, end in zip(starts, ends, strict=True)]


def _check_alike(number: int, shard: Shard, first: Handshake, tp_rank: int) -> None:
    if first.shards.get(number) != shard:
        raise ConfigError(
            "Ranks that should hold the same KV heads have blocks of different forms",
            next_step="Choose a --tensor-parallel-size that the number of KV heads divides.",
            group=number,
            tp_rank=tp_rank,
        )
