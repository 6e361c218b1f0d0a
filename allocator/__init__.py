"""The device blocks of an engine: names, pool, block tables.

`hash_blocks` names the full blocks of a token sequence; `BlockPool` keeps the blocks, cached ones
findable by name until they are handed out again; `KVCacheManager` gives them to requests. Behaviour
follows vLLM 0.32. `EncoderCache` keeps count of encoder outputs, `EventLog` of what others may want
to know. No tensor, no I/O and no clock in here; `event_publisher`, which has I/O, and `metrics`,
which needs prometheus-client, are imported by name.
"""

from ebbtide.allocator.algorithms import (
    DEFAULT_ALGORITHM,
    HashAlgorithm,
    hash_algorithm,
    register_algorithm,
)
from ebbtide.allocator.block import Block, FreeBlockQueue
from ebbtide.allocator.coordinator import ComputedBlocks
from ebbtide.allocator.encoder_cache import EncoderCache, EncoderInput
from ebbtide.allocator.encoder_check import check_encoder
from ebbtide.allocator.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventLog,
)
from ebbtide.allocator.eviction_policy import EvictionPolicy, register_eviction_policy
from ebbtide.allocator.extra_keys import (
    LoraAdapter,
    MultiModalItem,
    block_extra_keys,
    check_cache_salt,
    embeds_token_ids,
)
from ebbtide.allocator.group_hashes import group_hashes
from ebbtide.allocator.group_spec import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    SlidingWindow,
    group_spec,
)
from ebbtide.allocator.hashing import (
    event_hash,
    hash_blocks,
    none_hash,
    pack_key,
    root_seed,
    unpack_key,
)
from ebbtide.allocator.hit_rate import HitRate
from ebbtide.allocator.kv_cache_manager import KVCacheManager
from ebbtide.allocator.log_line import LogLine
from ebbtide.allocator.pool import BlockPool
from ebbtide.allocator.prefix_stats import PrefixCacheStats
from ebbtide.allocator.request import Request
from ebbtide.allocator.residency import Residency, ResidencySampler

__all__ = [
    "DEFAULT_ALGORITHM",
    "AllBlocksCleared",
    "Block",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ChunkedLocal",
    "ComputedBlocks",
    "EncoderCache",
    "EncoderInput",
    "Event",
    "EventBatch",
    "EventLog",
    "EvictionPolicy",
    "FreeBlockQueue",
    "FullAttention",
    "GroupSpec",
    "HashAlgorithm",
    "HitRate",
    "KVCacheManager",
    "LogLine",
    "LoraAdapter",
    "MultiModalItem",
    "PrefixCacheStats",
    "Request",
    "Residency",
    "ResidencySampler",
    "SlidingWindow",
    "block_extra_keys",
    "check_cache_salt",
    "check_encoder",
    "embeds_token_ids",
    "event_hash",
    "group_hashes",
    "group_spec",
    "hash_algorithm",
    "hash_blocks",
    "none_hash",
    "pack_key",
    "register_algorithm",
    "register_eviction_policy",
    "root_seed",
    "unpack_key",
]
