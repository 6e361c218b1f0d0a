"""Blocks, the free queue and the pool, in isolation."""

import logging
from collections.abc import Sequence

import pytest

from ebbtide.allocator import (
    Block,
    BlockPool,
    FreeBlockQueue,
    eviction_policy,
    register_eviction_policy,
)
from ebbtide.errors import ConfigError, MisuseError


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def queue(pool: BlockPool) -> list[int]:
    return ids(pool.peek_free(len(pool.blocks)))


def cached(pool: BlockPool, *names: bytes) -> list[Block]:
    """Allocate and cache one block per name."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.cache(block, name)
    return blocks


class Told:
    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def removed(self, key: bytes) -> None:
        self.keys.append(key)

    def cleared(self) -> None:
        self.keys.append(b"all")


# ------------------------------------------------------------------------------ free queue


def test_queue_keeps_order_at_both_ends() -> None:
    blocks = [Block(i) for i in range(7)]
    line = FreeBlockQueue(blocks[:3])
    line.append(blocks[3:5])
    line.prepend(blocks[5:])
    assert ids(list(line)) == [5, 6, 0, 1, 2, 3, 4]
    assert ids(line.pop(2)) == [5, 6]
    line.remove(blocks[1])
    assert (ids(list(line)), len(line)) == ([0, 2, 3, 4], 4)
    line.append([blocks[1]])
    assert ids(line.peek(2)) == [0, 2]
    assert ids(line.peek(99)) == [0, 2, 3, 4, 1]
    assert ids(line.pop(5)) == [0, 2, 3, 4, 1]
    assert (list(line), len(line), line.pop(0)) == ([], 0, [])


def test_queue_rejects_what_would_break_its_links() -> None:
    blocks = [Block(i) for i in range(3)]
    line = FreeBlockQueue(blocks)
    taken = line.pop(1)
    for call in (
        lambda: line.pop(3),
        lambda: line.pop(-1),
        lambda: line.remove(taken[0]),
        lambda: line.append([taken[0], blocks[1]]),  # the first of them joins, soundly
    ):
        with pytest.raises(MisuseError):
            call()
    assert ids(list(line)) == [1, 2, 0]
    assert len(line) == 3


# ------------------------------------------------------------------------------ pool


def test_block_zero_is_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.null_block.is_null
    assert (pool.null_block.block_id, queue(pool), pool.num_free_blocks) == (0, [1, 2, 3], 3)
    pool.touch([pool.null_block])
    pool.free([pool.null_block, pool.null_block])
    pool.check_integrity()
    assert queue(pool) == [1, 2, 3]


def test_freed_blocks_without_a_hash_go_to_the_head_and_cached_ones_to_the_tail() -> None:
    pool = BlockPool(9)
    first, second = cached(pool, b"a", b"b")
    third, fourth = pool.allocate(2)
    pool.free([fourth, second, third, first])
    assert queue(pool) == [4, 3, 5, 6, 7, 8, 2, 1]
    pool.check_integrity()


def test_without_caching_the_queue_is_a_stack() -> None:
    pool = BlockPool(6, enable_caching=False)
    blocks = pool.allocate(3)
    pool.free(reversed(blocks))
    assert queue(pool) == [3, 2, 1, 4, 5]
    with pytest.raises(MisuseError, match="caching=False"):
        pool.cache(pool.allocate(1)[0], b"a")


def test_the_oldest_duplicate_serves_and_the_next_follows() -> None:
    pool = BlockPool(6)
    one, two, three, four = cached(pool, b"same", b"same", b"same", b"same")
    assert pool.get_cached_block(b"same") is one
    pool.evict_blocks([three.block_id])
    assert ids(pool.cached_blocks(b"same")) == [1, 2, 4]
    pool.evict_blocks([one.block_id])
    assert pool.get_cached_block(b"same") is two
    pool.check_integrity()
    pool.cache(one, b"same")
    assert ids(pool.cached_blocks(b"same")) == [2, 4, 1]
    pool.evict_blocks(ids([two, four, one]))
    assert (pool.get_cached_block(b"same"), pool.cached_blocks(b"same")) == (None, [])
    pool.check_integrity()


def test_allocation_evicts_from_the_head_and_tells() -> None:
    told = Told()
    pool = BlockPool(4, events=told)
    blocks = cached(pool, b"a", b"b", b"a")
    pool.free(reversed(blocks))
    assert ids(pool.peek_free(2)) == [3, 2]
    assert told.keys == []
    assert ids(pool.allocate(2)) == [3, 2]
    assert (told.keys, pool.evictions) == ([b"a", b"b"], 2)
    assert pool.get_cached_block(b"a") is blocks[0]
    pool.evict_blocks([1])
    assert (told.keys, pool.evictions) == ([b"a", b"b", b"a"], 2)
    pool.check_integrity()


def test_a_touched_block_leaves_the_queue_until_its_last_reference() -> None:
    pool = BlockPool(4)
    (block,) = cached(pool, b"a")
    pool.free([block])
    pool.touch([block, block])
    assert (queue(pool), block.ref_count) == ([2, 3], 2)
    pool.free([block])
    assert queue(pool) == [2, 3]
    pool.free([block])
    assert queue(pool) == [2, 3, 1]
    assert pool.get_cached_block(b"a") is block


def test_a_pin_outlives_the_table() -> None:
    pool = BlockPool(3)
    (block,) = cached(pool, b"a")
    pool.touch([block])  # a connector starts to copy
    pool.free([block])  # the request ends
    assert ids(pool.allocate(1)) == [2]
    assert block.key == b"a"
    with pytest.raises(MisuseError, match="not enough free blocks"):
        pool.allocate(1)
    pool.free([block])
    assert ids(pool.allocate(1)) == [1]


def test_p30_a_block_listed_three_times_comes_back_once() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(5)
    shared = blocks[4]
    pool.free(blocks[:4])
    start = shared.ref_count
    for _ in range(2):  # requests A and B, in the same step
        pool.touch([shared, shared, shared])
        pool.check_integrity()
    for _ in range(2):
        pool.free([shared, shared, shared])
        pool.check_integrity()
    assert shared.ref_count == start
    pool.free([shared])
    assert sorted(queue(pool)) == [1, 2, 3, 4, 5, 6, 7]


def test_freeing_too_often_is_refused_and_leaves_a_sound_pool() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    with pytest.raises(MisuseError, match="freed more often"):
        pool.free([first, first, second])
    pool.check_integrity()
    assert (first.ref_count, second.ref_count) == (0, 1)
    assert sorted(queue(pool)) == [1, 3, 4]


def test_allocating_too_much_changes_nothing() -> None:
    pool = BlockPool(4)
    for wrong in (4, -1):
        with pytest.raises(MisuseError, match="not enough free blocks"):
            pool.allocate(wrong)
    assert queue(pool) == [1, 2, 3]
    assert pool.allocate(0) == []


def test_only_referenced_blocks_without_a_hash_are_cached() -> None:
    pool = BlockPool(4)
    (block,) = cached(pool, b"a")
    for wrong in (block, pool.null_block, pool.blocks[3]):
        with pytest.raises(MisuseError, match="can be cached"):
            pool.cache(wrong, b"b")
    pool.check_integrity()


def test_evicting_by_id_keeps_references_and_place() -> None:
    pool = BlockPool(5)
    blocks = cached(pool, b"a", b"b")
    pool.free(blocks)
    pool.evict_blocks([1, 4])  # 4 has no hash: nothing to do
    assert (queue(pool), pool.get_cached_block(b"a")) == ([3, 4, 1, 2], None)
    for wrong in (5, -1):
        with pytest.raises(MisuseError, match="no such block"):
            pool.evict_blocks([2, wrong])
    assert pool.get_cached_block(b"b") is blocks[1]


def test_reset_waits_for_every_reference(caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(5)
    blocks = cached(pool, b"a", b"a", b"b")
    with caplog.at_level(logging.WARNING):
        assert not pool.reset()
    assert "3 blocks are still in use" in caplog.text
    assert pool.get_cached_block(b"a") is blocks[0]
    pool.free(reversed(blocks))
    before = queue(pool)
    assert pool.reset()
    assert queue(pool) == before
    assert not any(block.key for block in pool.blocks)
    assert (pool.get_cached_block(b"a"), pool.get_cached_block(b"b")) == (None, None)
    pool.check_integrity()


def test_usage_counts_referenced_blocks() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0
    blocks = cached(pool, b"a")
    assert pool.usage == 0.25
    pool.free(blocks)
    assert pool.usage == 0
    assert BlockPool(1).usage == 0
    with pytest.raises(MisuseError):
        BlockPool(0)


def test_integrity_check_sees_each_kind_of_damage() -> None:
    def damaged(harm: int) -> BlockPool:
        pool = BlockPool(6)
        blocks = cached(pool, b"a", b"b")
        pool.free(blocks[1:])
        match harm:
            case 0:
                blocks[1].ref_count = 1
            case 1:
                blocks[0].ref_count = 0
            case 2:
                blocks[0].key = b"other"
            case 3:
                blocks[0].key = None
            case 4:
                pool.blocks[4].prev_free = pool.blocks[5]
            case 5:
                pool.blocks[3].next_free = pool.blocks[5]
            case 6:
                blocks[0].ref_count = -1
        return pool

    damaged(99).check_integrity()
    for harm in range(7):
        with pytest.raises(MisuseError):
            damaged(harm).check_integrity()


# ------------------------------------------------------------------------------ further keys


def test_a_block_is_found_under_a_part_of_it_too() -> None:
    told = Told()
    pool = BlockPool(5, events=told)
    (block,) = pool.allocate(1)
    assert pool.cache_partial(block, b"half", 2)
    assert not pool.cache_partial(block, b"half", 2)
    assert (block.key, block.num_tokens) == (b"half", 2)
    pool.cache(block, b"whole", 4)  # covers more: the part is forgotten
    assert (pool.keys_of(block), told.keys) == ([b"whole"], [b"half"])
    assert pool.cache_partial(block, b"half", 2)
    assert (pool.keys_of(block), pool.get_cached_block(b"half")) == ([b"whole", b"half"], block)
    pool.check_integrity()
    pool.free([block])
    assert pool.allocate(4)[3] is block
    assert told.keys[1:] == [b"whole", b"half"]
    assert (pool.evictions, pool.forgotten) == (1, 3)
    pool.check_integrity()


def test_a_run_of_blocks_is_cached_as_one_after_the_other() -> None:
    pool, single = BlockPool(6), BlockPool(6)
    names = [b"a", b"b", b"a"]
    blocks = pool.allocate(3)
    pool.cache_run(blocks, names, b"!", 16, 16)
    for block, name, end in zip(single.allocate(3), names, (16, 32, 48), strict=True):
        single.cache(block, name + b"!", end)
    for one in (pool, single):
        assert [(b.key, b.num_tokens) for b in one.blocks[1:4]] == [
            (b"a!", 16),
            (b"b!", 32),
            (b"a!", 48),
        ]
        assert ids(one.cached_blocks(b"a!")) == [1, 3]
        one.check_integrity()
    with pytest.raises(MisuseError, match="nothing is cached here"):
        BlockPool(3, enable_caching=False).cache_run([], [], b"", 0, 16)


# ------------------------------------------------------------------------------ watched blocks


def test_a_watched_block_stays_until_it_is_handed_out() -> None:
    told: list[int] = []
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.free_watched([first], lambda block: told.append(block.block_id))
    assert (queue(pool), told) == ([3, 1], [])  # at the tail, although nobody could find it
    pool.free([second])
    assert ids(pool.allocate(2)) == [2, 3]
    assert told == []
    assert (ids(pool.allocate(1)), told) == ([1], [1])
    pool.free_watched([second], lambda block: told.append(-block.block_id))
    pool.free([first, pool.blocks[3]])
    assert pool.reset()
    assert told == [1, -2]
    with pytest.raises(MisuseError, match="freed more often"):
        pool.free_watched([second], lambda block: None)
    assert pool.reset()
    assert told == [1, -2]


# ------------------------------------------------------------------------------ policies


class MostRecentFirst(FreeBlockQueue):
    def release(self, uncached: Sequence[Block], cached: Sequence[Block]) -> None:
        self.prepend([*uncached, *cached])


def test_policies_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_policy, "_POLICIES", dict(eviction_policy._POLICIES))
    register_eviction_policy("most_recent", MostRecentFirst)
    for name, order in (("lru", [3, 4, 2, 1]), ("most_recent", [2, 1, 3, 4])):
        pool = BlockPool(5, policy=name)
        pool.free(reversed(cached(pool, b"a", b"b")))
        assert queue(pool) == order
        pool.check_integrity()
    with pytest.raises(ConfigError, match="exists"):
        register_eviction_policy("lru", MostRecentFirst)
    with pytest.raises(ConfigError, match="Did you mean 'lru'"):
        BlockPool(5, policy="lrru")


# ------------------------------------------------------------------------------ residency


class Lives:
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def allocated(self, block_id: int) -> None:
        self.told.append(("allocated", block_id))

    def accessed(self, block_id: int) -> None:
        self.told.append(("accessed", block_id))

    def evicted(self, block_id: int) -> None:
        self.told.append(("evicted", block_id))

    def cleared(self) -> None:
        self.told.append(("cleared", 0))


def test_lives_of_blocks_are_told() -> None:
    lives = Lives()
    pool = BlockPool(3, residency=lives)
    (block,) = cached(pool, b"a")
    pool.touch([block])
    pool.free([block, block])
    pool.reset()
    assert lives.told == [("evicted", 1), ("allocated", 1), ("accessed", 1), ("cleared", 0)]
