"""Pool and tables against a model of lists and dicts, under random sequences of operations.

The model follows the rules as written (oldest duplicate serves; unhashed blocks to the head,
hashed to the tail; the last token is never a hit) in the slowest, plainest way.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ebbtide.allocator import FullAttention, KVCacheManager, Request, hash_blocks, pack_key

SIZE = 2  # tokens per block
# Tokens are few and prompts short, so that prefixes are shared, duplicated and evicted often.
PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=9)


def key_of(name: tuple[Any, ...]) -> bytes:
    return pack_key(hash_blocks(name, SIZE)[-1], 0)


class Model:
    """A block is an int, its name the tuple of all tokens up to its end."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.caching = caching
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(self.free, 0)
        self.names: list[tuple[tuple[Any, ...], int]] = []  # in the order of caching
        self.tables: dict[str, list[int]] = {}
        self.evicted: list[int] = []

    def name_of(self, block: int) -> tuple[Any, ...] | None:
        return next((name for name, b in self.names if b == block), None)

    def lookup(self, tokens: list[int]) -> list[int]:
        hits: list[int] = []
        while (len(hits) + 1) * SIZE <= len(tokens) - 1:
            name = tuple(tokens[: (len(hits) + 1) * SIZE])
            block = next((b for n, b in self.names if n == name), None)
            if block is None:
                break
            hits.append(block)
        return hits

    def needed(self, request_id: str, upto: int, hits: list[int]) -> int:
        have = len(self.tables.get(request_id, [])) + len(hits)
        return max(-(-upto // SIZE) - have, 0) + sum(block in self.free for block in hits)

    def take(self, request_id: str, upto: int) -> list[int]:
        table = self.tables.setdefault(request_id, [])
        new = []
        while len(table) < -(-upto // SIZE):
            block = self.free.pop(0)
            if self.name_of(block) is not None:
                self.evicted.append(block)
                self.forget(block)
            self.refs[block] = 1
            table.append(block)
            new.append(block)
        return new

    def forget(self, block: int) -> None:
        self.names = [(n, b) for n, b in self.names if b != block]

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.free:
                self.free.remove(block)
            self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        head: list[int] = []
        tail: list[int] = []
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (head if self.name_of(block) is None else tail).append(block)
        self.free = head + self.free + tail

    def cache(self, request_id: str, tokens: list[int], start: int, end: int) -> None:
        if self.caching:
            for i in range(start, end):
                self.names.append((tuple(tokens[: (i + 1) * SIZE]), self.tables[request_id][i]))


class Allocator(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 14), caching=st.sampled_from([True, True, True, False]))
    def start(self, num_blocks: int, caching: bool) -> None:
        self.cache = KVCacheManager(
            num_blocks,
            [FullAttention(SIZE)],
            64,
            enable_caching=caching,
            track_newly_cached=True,
        )
        self.model = Model(num_blocks, caching)
        self.live: dict[str, Request] = {}
        self.done: dict[str, int] = {}  # blocks of a request that are cached, or were
        self.pins: list[int] = []
        self.count = 0

    @rule(
        prompt=PROMPTS,
        data=st.data(),
        external=st.sampled_from([0, 0, 0, 2, 3]),
        lookahead=st.sampled_from([0, 0, 2]),
        must_fit=st.booleans(),
        reserved=st.sampled_from([0, 0, 2]),
    )
    def admit(
        self, prompt: list[int], data: st.DataObject, external: int, lookahead: int,
        must_fit: bool, reserved: int,
    ) -> None:  # fmt: skip
        self.count += 1
        req = Request(f"r{self.count}", prompt, hash_block_size=SIZE)
        hits = self.model.lookup(prompt) if self.model.caching else []
        computed = self.cache.get_computed_blocks(req)
        assert [b.block_id for column in computed.blocks for b in column] == hits
        local = len(hits) * SIZE
        external = min(external, len(prompt) - local)
        delay = bool(external) and data.draw(st.booleans())
        left = len(prompt) - local - external
        new = 0 if delay else data.draw(st.integers(0 if external or hits else 1, max(left, 0)))
        if not (new or external or hits):
            return
        got = self.cache.allocate_slots(
            req,
            new,
            computed,
            num_external_computed_tokens=external,
            num_lookahead_tokens=lookahead,
            delay_cache_blocks=delay,
            full_sequence_must_fit=must_fit,
            reserved_blocks=reserved,
        )
        model = self.model
        upto = local + external + new + lookahead
        room = len(model.free)
        too_long = must_fit and model.needed(req.request_id, len(prompt), hits) > room
        if too_long or model.needed(req.request_id, upto, hits) > room - reserved:
            assert got is None
            return
        model.touch(hits)
        if hits or external:
            model.tables[req.request_id] = list(hits)
        if external:
            model.take(req.request_id, local + external)
        new_blocks = model.take(req.request_id, upto)
        assert got is not None
        assert [block.block_id for block in got[0]] == new_blocks
        self.live[req.request_id] = req
        self.done[req.request_id] = len(hits)
        req.num_computed_tokens = local + external + new
        if not delay:
            self.cached_up_to(req)

    def cached_up_to(self, req: Request) -> None:
        start, end = self.done[req.request_id], req.num_computed_tokens // SIZE
        self.model.cache(req.request_id, req.all_token_ids, start, end)
        self.done[req.request_id] = max(start, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3))
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        req = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if req.num_computed_tokens == req.num_tokens:
            if req.num_tokens > 40:
                return
            req.append_output(tokens)
        new = data.draw(st.integers(1, req.num_tokens - req.num_computed_tokens))
        upto = req.num_computed_tokens + new
        got = self.cache.allocate_slots(req, new)
        if self.model.needed(req.request_id, upto, []) > len(self.model.free):
            assert got is None
            return
        assert got is not None
        assert [block.block_id for block in got[0]] == self.model.take(req.request_id, upto)
        req.num_computed_tokens = upto
        self.cached_up_to(req)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def confirm_load(self, data: st.DataObject) -> None:
        req = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.cache.cache_blocks(req, req.num_computed_tokens)
        self.cached_up_to(req)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.cache.free(self.live.pop(request_id))
        self.model.release(list(reversed(self.model.tables.pop(request_id))))
        del self.done[request_id]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.cache.pool.blocks[1:]))
        self.cache.pool.touch([block])
        self.model.touch([block.block_id])
        self.pins.append(block.block_id)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pins))
        self.pins.remove(block)
        self.cache.pool.free([self.cache.pool.blocks[block]])
        self.model.release([block])

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.cache.pool.blocks[1:])).block_id
        self.cache.evict_blocks([block])
        self.model.forget(block)

    @rule()
    def reset(self) -> None:
        idle = not any(self.model.refs.values())
        assert self.cache.reset_prefix_cache() is idle
        if idle:
            self.model.names = []

    @rule()
    def take_newly_cached(self) -> None:
        for block_id, key in self.cache.take_newly_cached():
            name = self.model.name_of(block_id)
            assert name is not None
            assert key_of(name) == key

    @invariant()
    def states_agree(self) -> None:
        pool, model = self.cache.pool, self.model
        self.cache.check_integrity()
        assert [b.block_id for b in pool.peek_free(99)] == model.free
        assert {b.block_id: b.ref_count for b in pool.blocks[1:]} == model.refs
        for request_id in self.live:
            assert self.cache.get_block_ids(request_id) == (model.tables[request_id],)
        for name in {name for name, _ in model.names}:
            found = pool.cached_blocks(key_of(name))
            assert [b.block_id for b in found] == [b for n, b in model.names if n == name]
        assert sum(b.key is not None for b in pool.blocks) == len(model.names)
        assert pool.evictions == len(model.evicted)
        assert self.cache.usage == pytest.approx(
            sum(count > 0 for count in model.refs.values()) / len(model.refs)
        )


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
