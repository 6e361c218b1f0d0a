"""Replays of what vLLM's own manager did: one JSON line per operation, compared whole after each.

A trace begins, for every round, with a line `op = "config"`; each further line has the operation,
its arguments, the lookup, the result, the events and the whole state behind it. Keys are
`sha256_cbor` under the default seed; an adapter `x` has the path `/lora/x`.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
from typing import TYPE_CHECKING, Any

from ebbtide.allocator import (
    ComputedBlocks,
    KVCacheManager,
    LoraAdapter,
    MultiModalItem,
    Request,
    event_hash,
    group_spec,
    none_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ebbtide.allocator import Block, GroupSpec

KINDS = {"full": "full_attention", "swa": "sliding_window", "chunk": "chunked_local_attention"}
PACKED = {".gz": gzip.decompress, ".xz": lzma.decompress}
ROOT = none_hash("sha256_cbor", "vllm-none-hash")

Record = dict[str, Any]


def read_trace(path: Path) -> Iterator[Record]:
    """The lines of a trace, plain or compressed."""
    data = path.read_bytes()
    if path.suffix in PACKED:
        data = PACKED[path.suffix](data)
    yield from map(json.loads, data.splitlines())


def spec_of(text: str) -> GroupSpec:
    """`full:4`, `swa:4:8`, `chunk:4:8`: kind, block size, window or chunk."""
    kind, block_size, *span = text.split(":")
    return group_spec(KINDS[kind], int(block_size), int(span[0]) if span else None)


class Told:
    """The events in the form of the traces: what happened, and the hashes it happened to."""

    def __init__(self, hash_block_size: int) -> None:
        self.events: list[tuple[str, list[int]]] = []

    def stored(
        self,
        request: Request,
        group: int,
        spec: GroupSpec,
        start: int,
        end: int,
        kept: Sequence[int],
    ) -> None:
        ratio = spec.block_size // request.hash_block_size
        names = [request.block_hashes[(number + 1) * ratio - 1] for number in kept]
        self.events.append(("BlockStored", [event_hash(name) for name in names]))

    def stored_partial(
        self, request: Request, group: int, spec: GroupSpec, end_tokens: int
    ) -> None:
        name = request.block_hashes[end_tokens // request.hash_block_size - 1]
        self.events.append(("BlockStored", [event_hash(name)]))

    def reused(self, request: Request, group: int, spec: GroupSpec, end: int) -> None:
        raise AssertionError("nobody asked for a report")

    def removed(self, key: bytes) -> None:
        self.events.append(("BlockRemoved", [event_hash(key[:-4])]))

    def cleared(self) -> None:
        self.events.append(("AllBlocksCleared", []))

    def take(self) -> list[tuple[str, list[int]]]:
        taken, self.events = self.events, []
        return sorted(taken)


class Replay:
    """Our manager under the operations of one round."""

    def __init__(self, config: Record, events: Callable[[int], Told] = Told) -> None:
        self.config = config
        specs = [spec_of(text) for text in config["groups"]]
        self.told = events(math.gcd(*(spec.block_size for spec in specs)))
        self.cache = KVCacheManager(
            config["num_blocks"],
            specs,
            config["max_model_len"],
            enable_caching=config["caching"],
            watermark=config["watermark"],
            use_eagle=config["eagle"],
            max_in_flight_tokens=config["max_in_flight"],
            retention_interval=config["retention"],
            events=self.told,
        )
        self.requests: dict[str, Request] = {}
        self.evicted = 0
        self.hit_tokens = 0
        self.refused = 0

    def apply(self, record: Record) -> None:
        """Do the same, and compare everything. Raises AssertionError."""
        result = getattr(self, "_" + record["op"])(record)
        assert result == record["result"], ("result", result, record["result"])
        self._compare(record)
        self.cache.check_integrity()

    # -- operations -----------------------------------------------------------------------------

    def _new(self, record: Record) -> object:
        lora = record.get("lora")
        self.requests[record["rid"]] = Request(
            record["rid"],
            record["prompt"],
            hash_block_size=self.cache.rules.hash_block_size,
            root=ROOT,
            lora=LoraAdapter(lora, f"/lora/{lora}") if lora else None,
            lora_id=1 + ord(lora) if lora else None,
            cache_salt=record.get("salt"),
            mm_items=[MultiModalItem(*item) for item in record.get("mm", ())],
        )
        return self._admit(record)

    def _admit(self, record: Record) -> object:
        request, arguments = self.requests[record["rid"]], record["admit"]
        computed = self.cache.get_computed_blocks(request)
        self._compare_lookup(computed, record["lookup"])
        hit = computed.num_tokens
        request.junction_tokens = computed.junction_tokens
        external = min(arguments["external"], request.num_tokens - hit)
        new = 0 if arguments["delay"] else request.num_tokens - hit - external
        if arguments["chunk"] is not None:
            new = min(new, arguments["chunk"])
        got = self.cache.allocate_slots(
            request,
            new,
            computed,
            num_lookahead_tokens=arguments["lookahead"],
            num_external_computed_tokens=external,
            delay_cache_blocks=arguments["delay"],
            full_sequence_must_fit=arguments["must_fit"],
            reserved_blocks=arguments["reserved"],
        )
        if got is None:
            self.refused += 1
            return None
        self.hit_tokens += hit
        request.num_computed_tokens = hit + external + new
        request.is_running = True
        return ids_of(got)

    def _run(self, record: Record) -> object:
        request = self.requests[record["rid"]]
        if "admit" in record:
            return self._admit(record)
        if record.get("commit"):
            self.cache.cache_blocks(request, request.num_computed_tokens)
        request.append_output(record.get("append", []))
        request.num_in_flight_tokens = record["in_flight"]
        got = self.cache.allocate_slots(
            request, record["run"], num_lookahead_tokens=record["lookahead"]
        )
        if got is None:
            self.refused += 1
            return None
        request.num_computed_tokens += record["run"]
        return ids_of(got)

    def _commit(self, record: Record) -> None:
        if record.get("commit"):
            request = self.requests[record["rid"]]
            self.cache.cache_blocks(request, request.num_computed_tokens)

    def _free(self, record: Record) -> None:
        self.cache.free(self.requests.pop(record["rid"]))

    def _preempt(self, record: Record) -> None:
        request = self.requests[record["rid"]]
        self.cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.is_running = False

    def _evict(self, record: Record) -> None:
        self.cache.evict_blocks([record["block"]])

    def _reset(self, record: Record) -> bool:
        return self.cache.reset_prefix_cache()

    # -- comparing ------------------------------------------------------------------------------

    def _compare_lookup(self, computed: ComputedBlocks, theirs: Sequence[Any]) -> None:
        columns = ids_of(computed.blocks) or [[] for _ in self.cache.groups]
        ours = [columns, computed.num_tokens, computed.junction_tokens]
        assert ours == list(theirs), ("lookup", ours, theirs)

    def _compare(self, record: Record) -> None:
        pool, state = self.cache.pool, record["state"]
        blocks = pool.blocks
        ours: dict[str, Any] = {
            "free": [block.block_id for block in pool.peek_free(len(blocks))],
            "ref": {str(b.block_id): b.ref_count for b in blocks if b.ref_count},
            "hashed": {str(b.block_id): [b.key.hex(), b.num_tokens] for b in blocks if b.key},
            "tables": {name: list(self.cache.get_block_ids(name)) for name in self.requests},
        }
        for name, mine in ours.items():
            theirs = {str(k): v for k, v in state[name].items()} if name != "free" else state[name]
            assert mine == theirs, (name, mine, theirs)
        cached = {
            key: [block.block_id for block in pool.cached_blocks(bytes.fromhex(key))]
            for key in state["cached"]
        }
        assert cached == state["cached"], ("cached", cached, state["cached"])
        known = sum(len(pool.keys_of(block)) for block in blocks)
        assert known == sum(map(len, state["cached"].values())), "we find more than they do"
        assert abs(self.cache.usage - state["usage"]) < 1e-9, (self.cache.usage, state["usage"])
        events = self.told.take()
        self.evicted += sum(name == "BlockRemoved" for name, _ in events)
        theirs = sorted((name, hashes) for name, hashes in record["events"])
        assert events == theirs, ("events", events, theirs)


class Replays:
    """Rounds one behind the other, as they come: for a trace, or beside the real thing."""

    def __init__(self, events: Callable[[int], Told] = Told) -> None:
        self._events = events
        self.rounds = self.operations = self.evicted = self.hit_tokens = self.refused = 0
        self.shapes: set[tuple[str, ...]] = set()
        self._one: Replay | None = None

    def apply(self, record: Record) -> None:
        """The next line. Raises AssertionError for the first difference."""
        if record["op"] == "config":
            self.end()
            self.one = self._one = Replay(record, self._events)
            self.rounds += 1
            self.shapes.add(tuple(record["groups"]))
            return
        assert self._one is not None
        try:
            self._one.apply(record)
        except AssertionError as error:
            asked = {k: v for k, v in record.items() if k not in ("state", "events")}
            where = f"round {self.rounds}, operation {self.operations}"
            raise AssertionError(f"{where}: {error}\n{self._one.config}\n{asked}") from error
        self.operations += 1

    def end(self) -> None:
        """Count the round that has ended."""
        if self._one is not None:
            self.evicted += self._one.evicted
            self.hit_tokens += self._one.hit_tokens
            self.refused += self._one.refused
            self._one = None


def ids_of(columns: Sequence[Sequence[Block]]) -> list[list[int]]:
    """Block ids per group."""
    return [[block.block_id for block in column] for column in columns]
