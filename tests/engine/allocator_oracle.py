"""vLLM's own KV cache manager on a CPU, without a model, under random operations that are recorded.

    python tests/engine/allocator_oracle.py SEED ROUNDS > trace.jsonl

prints what `tests/oracle_replay.py` replays.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sys
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Record = dict[str, Any]

SHAPES = (
    *(("full:1",), ("full:2",), ("full:4",), ("full:16",)),
    *(("swa:4:8",), ("swa:4:6",), ("swa:2:9",), ("full:4", "swa:4:8"), ("full:4", "swa:2:5")),
    *(("full:2", "swa:4:9"), ("swa:4:8", "full:4"), ("full:4", "swa:4:8", "swa:4:8")),
    *(("full:4", "swa:4:8", "swa:4:16"), ("full:4", "chunk:4:8"), ("full:8", "swa:4:6", "swa:2:4")),
    *(("swa:4:6", "swa:2:7"), ("full:4", "full:4"), ("full:4", "full:8", "swa:4:4")),
)
STEPS = 110
RARE = 0.12


class Oracle:
    """The real manager, and what a scheduler does around it."""

    def __init__(self, config: Record) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        specs = [_spec(text) for text in config["groups"]]
        sizes = [spec.block_size for spec in specs]
        digest = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(digest)
        self._hasher = kv_cache_utils.get_request_block_hasher(math.gcd(*sizes), digest)
        self._sampling = SamplingParams(max_tokens=1 << 20)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=config["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)
                ],
                prefix_cache_retention_interval=config["retention"],
            ),
            max_model_len=config["max_model_len"],
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            enable_caching=config["caching"],
            use_eagle=config["eagle"],
            max_in_flight_tokens=config["max_in_flight"],
            watermark=config["watermark"],
            log_stats=True,
            enable_kv_cache_events=True,
        )
        self.requests: dict[str, Any] = {}
        self.taken: list[Any] = []  # the events of the last operation

    def new(self, rid: str, record: Record) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        lora = record["lora"]
        self.requests[rid] = Request(
            rid,
            record["prompt"],
            self._sampling,
            None,
            cache_salt=record["salt"],
            lora_request=LoRARequest(lora, 1 + ord(lora), f"/lora/{lora}") if lora else None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=identifier,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for identifier, offset, length in record["mm"]
            ],
            block_hasher=self._hasher,
        )

    def lookup(self, rid: str) -> list[Any]:
        blocks, hit, junction = self.manager.get_computed_blocks(self.requests[rid])
        return [[list(group) for group in blocks.get_block_ids()], hit, junction]

    def admit(self, rid: str, arguments: Record) -> object:
        from vllm.v1.request import RequestStatus

        request = self.requests[rid]
        blocks, hit, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        external = min(arguments["external"], request.num_tokens - hit)
        new = 0 if arguments["delay"] else request.num_tokens - hit - external
        if arguments["chunk"] is not None:
            new = min(new, arguments["chunk"])
        got = self.manager.allocate_slots(
            request,
            new,
            hit,
            blocks,
            num_lookahead_tokens=arguments["lookahead"],
            num_external_computed_tokens=external,
            delay_cache_blocks=arguments["delay"],
            full_sequence_must_fit=arguments["must_fit"],
            reserved_blocks=arguments["reserved"],
        )
        if got is None:
            return None
        request.num_computed_tokens = hit + external + new
        request.status = RequestStatus.RUNNING
        return [list(group) for group in got.get_block_ids()]

    def run(self, rid: str, record: Record) -> object:
        request = self.requests[rid]
        request.num_in_flight_tokens = record["in_flight"]
        got = self.manager.allocate_slots(
            request, record["run"], num_lookahead_tokens=record["lookahead"]
        )
        if got is None:
            return None
        request.num_computed_tokens += record["run"]
        return [list(group) for group in got.get_block_ids()]

    def free(self, rid: str) -> None:
        self.manager.free(self.requests.pop(rid))

    def preempt(self, rid: str) -> None:
        from vllm.v1.request import RequestStatus

        request = self.requests[rid]
        self.manager.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        request.num_preemptions += 1

    def is_known(self, rid: str) -> bool:
        """Whether the request has blocks."""
        tables = self.manager.coordinator.single_type_managers
        return any(table.req_to_blocks.get(rid) for table in tables)

    def state(self) -> Record:
        pool = self.manager.block_pool
        cached = {}
        for key, found in pool.cached_block_hash_to_block._cache.items():
            cached[key.hex()] = list(found) if isinstance(found, dict) else [found.block_id]
        tables = self.manager.coordinator.get_blocks
        return {
            "free": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            "ref": {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt and not b.is_null},
            "hashed": {
                b.block_id: [b.block_hash.hex(), b.block_hash_num_tokens]
                for b in pool.blocks
                if b.block_hash
            },
            "cached": cached,
            "tables": {
                rid: [[b.block_id for b in g] for g in tables(rid)] for rid in self.requests
            },
            "usage": self.manager.usage,
        }

    def events(self) -> list[tuple[str, list[int]]]:
        taken = self.taken = self.manager.take_events()
        return [(type(e).__name__, list(getattr(e, "block_hashes", []))) for e in taken]


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def _spec(text: str) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )

    kind, size, *span = text.split(":")
    sizes: Record = {
        "block_size": int(size),
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if kind == "full":
        return FullAttentionSpec(**sizes)
    if kind == "swa":
        return SlidingWindowSpec(sliding_window=int(span[0]), **sizes)
    return ChunkedLocalAttentionSpec(attention_chunk_size=int(span[0]), **sizes)


class Round:
    """One manager from its construction to the last of its operations."""

    def __init__(self, rng: random.Random, emit: Callable[[Record], None]) -> None:
        self._rng = rng
        self._emit = emit
        shape = rng.choice(SHAPES)
        sizes = [int(text.split(":")[1]) for text in shape]
        self._largest, multiple = max(sizes), math.lcm(*sizes)
        chunked = any(text.startswith("chunk") for text in shape)
        sparse = any(text.startswith("swa") for text in shape)
        self.config: Record = {
            "op": "config",
            "groups": shape,
            "num_blocks": rng.choice([5, 11, 30, 80]),
            "caching": rng.random() > RARE,
            "watermark": rng.choice([0, 0, 0.1, 0.3]),
            "eagle": rng.random() < 0.3 and not chunked,
            "max_model_len": rng.choice([4096, 6 * self._largest]),
            "max_in_flight": rng.choice([None, self._largest, 2 * self._largest]),
            "retention": rng.choice(
                [None, 0, multiple, 2 * multiple, 4 * multiple] if sparse else [None, 0]
            ),
        }
        self.oracle = Oracle(self.config)
        self._count = 0
        emit(self.config)

    def step(self) -> None:
        """One operation and one line."""
        rng, live = self._rng, list(self.oracle.requests)
        names = ("new", "run", "free", "preempt", "evict", "reset")
        some = bool(live)
        weights = (4 * (len(live) < 5), 6 * some, 2 * some, some, 0.3, 0.4)
        op = rng.choices(names, weights)[0]
        rid = rng.choice(live) if live and op != "new" else None
        record: Record = {"op": op, "rid": rid, "result": None}
        if op == "new":
            record["rid"] = rid = f"q{self._count}"
            self._count += 1
            record.update(self._prompt())
            self.oracle.new(rid, record)
        if op in ("new", "run") and rid is not None:
            if self.oracle.is_known(rid):
                self._run(rid, record)
            else:
                self._admit(rid, record)
        elif op == "free" and rid is not None:
            self.oracle.free(rid)
        elif op == "preempt" and rid is not None:
            self.oracle.preempt(rid)
        elif op == "evict":
            record["block"] = rng.randrange(1, self.config["num_blocks"])
            self.oracle.manager.evict_blocks({record["block"]})
        elif op == "reset":
            record["result"] = self.oracle.manager.reset_prefix_cache()
        record["state"], record["events"] = self.oracle.state(), self.oracle.events()
        self._emit(record)

    def _prompt(self) -> Record:
        """Prompts share prefixes often: a common stem, a branch, a tail of their own."""
        rng, size = self._rng, 2 * self._largest
        stem = [rng.choice([7, 11])] * rng.randrange(0, 4 * size)
        branch = [rng.randrange(3)] * rng.randrange(0, 2 * size)
        tail = [rng.randrange(100, 104) for _ in range(rng.randrange(0, size + 2))]
        prompt = (stem + branch + tail or [5])[: self.config["max_model_len"] - 1]
        images = []
        if rng.random() < 0.3:
            at = rng.randrange(len(prompt))
            images.append([rng.choice("xy") * 8, at, rng.randrange(1, len(prompt) - at + 1)])
        return {
            "prompt": prompt,
            "salt": rng.choice([None, None, "s1"]),
            "lora": rng.choice([None, None, "a", "b"]),
            "mm": images,
        }

    def _admit(self, rid: str, record: Record) -> None:
        rng, size = self._rng, self._largest
        record["lookup"] = self.oracle.lookup(rid)
        left = self.oracle.requests[rid].num_tokens - record["lookup"][1]
        record["admit"] = {
            "chunk": rng.choice([None, None, size, 3]),
            "external": rng.choice([0, 0, 0, size, 3 * size]),
            "lookahead": rng.choice([0, 0, 2]),
            "must_fit": rng.random() < 0.5,
            "reserved": rng.choice([0, 0, 1]),
        }
        loads = min(record["admit"]["external"], left) > 0
        record["admit"]["delay"] = loads and rng.random() < 0.4
        record["result"] = self.oracle.admit(rid, record["admit"])

    def _run(self, rid: str, record: Record) -> None:
        rng, request = self._rng, self.oracle.requests[rid]
        if rng.random() < 0.3:  # for instance when a delayed load has ended
            record["commit"] = True
            self.oracle.manager.cache_blocks(request, request.num_computed_tokens)
        left = request.num_tokens - request.num_computed_tokens
        room = self.config["max_model_len"] - request.num_tokens
        record["append"] = []
        if left == 0:
            record["append"] = [rng.randrange(3) for _ in range(min(room, rng.choice([1, 1, 2])))]
            request.append_output_token_ids(record["append"])
            left = len(record["append"])
        record["in_flight"] = rng.choice([0, 0, 1, 4])
        record["lookahead"] = rng.choice([0, 0, 3])
        record["run"] = rng.choice([left, max(1, left // 2)]) if left else 0
        if record["run"]:
            record["result"] = self.oracle.run(rid, record)
        else:  # at the model's length: nothing can run any more
            record["op"] = "commit"


def rounds(
    seed: int,
    count: int,
    emit: Callable[[Record], None],
    after: Callable[[Oracle], None] = lambda oracle: None,
) -> None:
    """So many rounds of random operations. `emit` gets every line, `after` follows it."""
    rng = random.Random(seed)
    for _ in range(count):
        one = Round(rng, emit)
        for _ in range(STEPS):
            one.step()
            after(one.oracle)


def main(arguments: Iterable[str]) -> None:
    """Print a trace."""
    seed, count = map(int, arguments)
    rounds(seed, count, lambda record: print(json.dumps(record)))  # noqa: T201  # its purpose


if __name__ == "__main__":
    main(sys.argv[1:])
