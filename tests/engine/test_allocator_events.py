"""Our KV events beside vLLM's: the same bytes for the same content, and read by vLLM's decoder."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import zmq
from vllm.distributed import kv_events as theirs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from ebbtide.allocator import events as ours
from ebbtide.allocator.event_publisher import EventPublisher, rank_endpoint
from ebbtide.allocator.extra_keys import LoraAdapter, MultiModalItem
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAIRS = [
    (ours.BlockStored, theirs.BlockStored),
    (ours.BlockRemoved, theirs.BlockRemoved),
    (ours.AllBlocksCleared, theirs.AllBlocksCleared),
    (ours.EventBatch, theirs.EventBatch),
]
WAIT_MS = 10_000


@pytest.fixture(scope="session")
def what_lasts() -> None:
    """No engine is built here: nothing lasts."""


# Bytes.


@pytest.mark.parametrize(("our", "their"), PAIRS)
def test_fields_defaults_and_tags_are_vllms(our: Any, their: Any) -> None:
    assert our.__struct_fields__ == their.__struct_fields__
    assert our.__struct_defaults__ == their.__struct_defaults__
    assert our.__struct_config__.tag == their.__struct_config__.tag
    assert our.__struct_config__.array_like == their.__struct_config__.array_like


def some_stored(choose: random.Random) -> dict[str, Any]:
    def some_hash() -> int | bytes:
        return choose.choice((choose.getrandbits(64), choose.randbytes(32), choose.randbytes(16)))

    optional = {
        "extra_keys": [None, ("x", ("image", -4), "salt", choose.randbytes(32))],
        "group_idx": choose.randrange(3),
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 4096,
        "locality": "LOCAL",
        "ownership": "disk",
        "session_id": "chat",
    }
    return {
        "block_hashes": [some_hash() for _ in range(choose.randrange(4))],
        "parent_block_hash": choose.choice((None, some_hash())),
        "token_ids": [choose.randrange(200_000) for _ in range(choose.randrange(40))],
        "block_size": choose.choice((1, 16, 128)),
        "lora_id": choose.choice((None, 3)),
        "medium": choose.choice((None, "GPU", "CPU", "STORAGE")),
        "lora_name": choose.choice((None, "adapter")),
        **{name: value for name, value in optional.items() if choose.random() < 0.5},
    }


def some_removed(choose: random.Random) -> dict[str, Any]:
    optional = {"group_idx": 2, "locality": "REMOTE", "ownership": "disk"}
    return {
        "block_hashes": [choose.getrandbits(64)],
        "medium": choose.choice((None, "GPU")),
        **{name: value for name, value in optional.items() if choose.random() < 0.5},
    }


@pytest.mark.parametrize("seed", range(20))
def test_equal_content_is_equal_bytes_and_vllm_reads_every_field(seed: int) -> None:
    choose = random.Random(seed)
    contents: list[tuple[int, dict[str, Any]]] = []
    for _ in range(10):
        kind = choose.randrange(3)
        contents.append((kind, (some_stored, some_removed, lambda _: {})[kind](choose)))
    rank = choose.choice((None, 0, 7))
    our = ours.EventBatch(choose.random(), [PAIRS[kind][0](**c) for kind, c in contents], rank)
    their = theirs.KVEventBatch(our.ts, [PAIRS[kind][1](**c) for kind, c in contents], rank)
    payload = msgspec.msgpack.encode(our)
    assert payload == msgspec.msgpack.encode(their)
    read = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(payload)
    assert (read.ts, read.data_parallel_rank) == (our.ts, rank)
    for (kind, content), event in zip(contents, read.events, strict=True):
        assert type(event) is PAIRS[kind][1]
        for name in event.__struct_fields__:
            expected = content.get(name)
            if name == "extra_keys" and expected:
                expected = [None, (expected[1][0], list(expected[1][1]), *expected[1][2:])]
            assert getattr(event, name) == expected, name


# Content: what vLLM's own pool says while it works, and what our log says of the same.


@dataclass
class Spec:
    """A KV group as the log reads it."""

    kind: str
    block_size: int
    window_tokens: int | None = None


class View:
    """A vLLM request as the log reads it."""

    def __init__(self, request: Request, hash_block_size: int) -> None:
        self._request = request
        self.hash_block_size = hash_block_size
        lora = request.lora_request
        self.lora_id = None if lora is None else lora.lora_int_id
        self.session_id = request.session_id
        self.extras = (
            None if lora is None else LoraAdapter(lora.lora_name, lora.lora_path),
            tuple(
                MultiModalItem(each.identifier, each.mm_position.offset, each.mm_position.length)
                for each in request.mm_features
            ),
            request.cache_salt,
            None,
        )

    @property
    def block_hashes(self) -> list[bytes]:
        return list(self._request.block_hashes)

    def tokens(self, start: int, end: int) -> list[int]:
        return list(self._request.all_token_ids[start:end])


AT = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
SHAPES: dict[str, tuple[int, int | None, list[Spec]]] = {
    "one group": (4, None, [Spec("full_attention", 4)]),
    "window, dense": (4, None, [Spec("full_attention", 8), Spec("sliding_window", 4, 9)]),
    "window, sparse": (4, 0, [Spec("full_attention", 8), Spec("sliding_window", 4, 9)]),
    "chunks": (4, None, [Spec("full_attention", 4), Spec("chunked_local_attention", 4)]),
}


def their_spec(spec: Spec) -> Any:
    if spec.kind == "sliding_window":
        window = spec.window_tokens
        return interface.SlidingWindowSpec(block_size=spec.block_size, sliding_window=window, **AT)
    if spec.kind == "chunked_local_attention":
        return interface.ChunkedLocalAttentionSpec(
            block_size=spec.block_size, attention_chunk_size=8, **AT
        )
    return interface.FullAttentionSpec(block_size=spec.block_size, **AT)


class Pool:
    """vLLM's manager, whose pool also calls our log wherever it may emit an event."""

    def __init__(self, shape: str, use_int_hashes: bool) -> None:
        self.size, retention, self.specs = SHAPES[shape]
        algorithm = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(algorithm)
        self.hasher = kv_cache_utils.get_request_block_hasher(self.size, algorithm)
        groups = [
            interface.KVCacheGroupSpec([f"layer{number}"], their_spec(spec))
            for number, spec in enumerate(self.specs)
        ]
        self.manager = KVCacheManager(
            interface.KVCacheConfig(
                num_blocks=31,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=retention,
            ),
            max_model_len=512,
            scheduler_block_size=math.lcm(*(spec.block_size for spec in self.specs)),
            hash_block_size=self.size,
            enable_caching=True,
            log_stats=True,
            enable_kv_cache_events=True,
        )
        self.log = ours.EventLog(self.size, use_int_hashes=use_int_hashes)
        self.called: set[str] = set()
        pool = self.manager.block_pool
        self.wrap(pool, "cache_full_blocks", self.stored)
        self.wrap(pool, "cache_partial_block", self.stored_partial, after=True)
        self.wrap(pool, "emit_cached_block_events", self.reused)
        self.wrap(pool, "_emit_block_removed_events", self.removed)
        self.wrap(pool, "reset_prefix_cache", self.cleared, after=True)

    def wrap(self, pool: Any, name: str, told: Callable[..., None], after: bool = False) -> None:
        real = getattr(pool, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            bound = inspect.signature(real).bind(*args, **kwargs)
            bound.apply_defaults()
            queued = len(pool.kv_event_queue)
            result = real(*args, **kwargs)
            told(**bound.arguments, result=result, news=pool.kv_event_queue[queued:])
            return result

        setattr(pool, name, call)

    def stored(self, *, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int,
               kv_cache_group_id: int, block_mask: Any, **_: Any) -> None:  # fmt: skip
        start, end = num_cached_blocks, num_full_blocks
        kept = [
            block
            for block in range(start, end)
            if not blocks[block].is_null and (block_mask is None or block_mask[block - start])
        ]
        spec = self.specs[kv_cache_group_id]
        self.log.stored(View(request, self.size), kv_cache_group_id, spec, start, end, kept)

    def stored_partial(
        self, *, request: Any, num_tokens: int, kv_cache_group_id: int, news: list[Any], **_: Any
    ) -> None:
        if any(type(event) is theirs.BlockStored for event in news):
            spec = self.specs[kv_cache_group_id]
            self.log.stored_partial(View(request, self.size), kv_cache_group_id, spec, num_tokens)

    def reused(
        self, *, request: Any, num_cached_blocks: int, kv_cache_group_id: int, **_: Any
    ) -> None:
        spec = self.specs[kv_cache_group_id]
        self.log.reused(View(request, self.size), kv_cache_group_id, spec, num_cached_blocks)

    def removed(self, *, block_hashes: list[bytes], **_: Any) -> None:
        for key in block_hashes:
            self.log.removed(key)

    def cleared(self, *, result: bool, **_: Any) -> None:
        if result:
            self.log.cleared()

    def agree(self) -> list[str]:
        """The types of the events since the last call, whose bytes are the same on both sides."""
        found = self.manager.take_events()
        payload = msgspec.msgpack.encode(ours.EventBatch(1.0, self.log.take(), 0))
        assert payload == msgspec.msgpack.encode(theirs.KVEventBatch(1.0, found, 0))
        return [type(event).__name__ for event in found]


def some_request(choose: random.Random, name: str, hasher: Any) -> Request:
    """One of twelve prompts, asked again and again."""
    report = choose.choice(("full", "incremental"))
    choose = random.Random(choose.randrange(12))
    prompt = [1] * choose.randint(0, 24) + [choose.randint(2, 3) for _ in range(20)]
    lora = choose.choice((None, None, "x", "y"))
    items = choose.choice(((), (("image", 3, 9), ("image", 14, 2), ("sound", 17, 8))))
    return Request(
        name,
        prompt,
        SamplingParams(
            max_tokens=99,
            extra_args={"kv_cache_report_mode": report},
        ),
        None,
        cache_salt=choose.choice((None, None, "salt")),
        lora_request=LoRARequest(lora, 1 + ord(lora), f"/lora/{lora}") if lora else None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset=offset, length=length),
            )
            for identifier, offset, length in items
        ],
        block_hasher=hasher,
        session_id=choose.choice((None, "chat")),
    )


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the root of its chains per process: leave it as it was."""
    known = getattr(kv_cache_utils, "NONE_HASH", None)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", known, raising=False)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("use_int_hashes", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_our_log_says_what_vllms_pool_says(
    monkeypatch: pytest.MonkeyPatch, shape: str, use_int_hashes: bool
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(use_int_hashes)))
    choose = random.Random(f"{shape} {use_int_hashes}")
    both = Pool(shape, use_int_hashes)
    manager = both.manager
    live: list[Request] = []
    seen: set[str] = set()
    for step in range(400):
        action = choose.choice(("admit", "admit", "append", "append", "free", "reset"))
        if action == "admit":
            request = some_request(choose, f"r{step}", both.hasher)
            blocks, hit, junction = manager.get_computed_blocks(request)
            request.shared_prefix_boundary = junction
            new = request.num_tokens - hit
            if manager.allocate_slots(request, new, hit, blocks) is None:
                action = "free"
            else:
                request.num_computed_tokens = request.num_tokens
                request.status = RequestStatus.RUNNING
                live.append(request)
        elif action == "append" and live:
            request = choose.choice(live)
            tokens = [choose.randint(2, 3) for _ in range(choose.randint(1, 9))]
            request.append_output_token_ids(tokens)
            if manager.allocate_slots(request, len(tokens)) is not None:
                request.num_computed_tokens = request.num_tokens
            else:
                live.remove(request)
                manager.free(request)
        elif action == "reset" and choose.random() < 0.3:
            while live:
                manager.free(live.pop())
            assert manager.reset_prefix_cache()
        if action == "free" and live:
            manager.free(live.pop(choose.randrange(len(live))))
        seen.update(both.agree())
    assert seen == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert {"cache_full_blocks", "emit_cached_block_events"} <= both.called
    assert ("cache_partial_block" in both.called) == shape.startswith("window")


# Transport.


@pytest.fixture
def their_context() -> Iterator[zmq.Context[Any]]:
    """vLLM's publisher uses the context of the process, and leaves it behind."""
    context: zmq.Context[Any] = zmq.Context.instance()
    yield context
    context.term()


def first_frames(context: zmq.Context[Any], publisher: Any, endpoint: str) -> list[bytes]:
    """Publish until a subscriber sees a batch, and return its frames, the number left out."""
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    sub.connect(endpoint)
    for _ in range(WAIT_MS // 20):
        publisher.publish(theirs.EventBatch(2.5, [theirs.AllBlocksCleared()]))
        if sub.poll(20):
            break
    topic, sequence, payload = sub.recv_multipart()
    sub.close(linger=0)
    assert len(sequence) == 8
    return [topic, payload]


def whole_replay(context: zmq.Context[Any], endpoint: str) -> list[list[bytes]]:
    one = context.socket(zmq.DEALER)
    one.connect(endpoint)
    one.send_multipart((b"", bytes(8)))
    found: list[list[bytes]] = []
    while not found or found[-1][-1]:
        assert one.poll(WAIT_MS)
        found.append(one.recv_multipart())
    one.close(linger=0)
    return found


def test_frames_and_replays_are_vllms(tmp_path: Path, their_context: zmq.Context[Any]) -> None:
    live, replays = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    our = EventPublisher(f"{live}0", replay_endpoint=f"{replays}0", topic="kv", buffer_steps=1)
    their = theirs.ZmqEventPublisher(0, f"{live}1", f"{replays}1", topic="kv", buffer_steps=1)
    try:
        frames = [
            first_frames(their_context, each, f"{live}{n}") for n, each in enumerate((our, their))
        ]
        assert frames[0] == frames[1]
        answers = [whole_replay(their_context, f"{replays}{number}") for number in range(2)]
        for answer in answers:
            assert answer[0].pop(2)[:4] == bytes(4)  # how many it took is no matter
        assert answers[0] == answers[1]
        assert answers[0][1] == [b"", b"", theirs.ZmqEventPublisher.END_SEQ, b""]
    finally:
        our.shutdown()
        their.shutdown()


@pytest.mark.parametrize("rank", [0, 1, 9])
@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://*:0", "tcp://[::]:5557", "inproc://x", "ipc:///run/x"]
)
def test_ranks_get_vllms_endpoints(endpoint: str, rank: int) -> None:
    try:
        expected = theirs.ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
    except ValueError:
        with pytest.raises(ConfigError):
            rank_endpoint(endpoint, rank)
    else:
        assert rank_endpoint(endpoint, rank) == expected
