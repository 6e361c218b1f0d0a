"""What `ebbtide bench allocator` asks of an allocator, and how each answer is timed and checked.

Times are CPU time of the calling thread: others on the machine do not count, and nothing here waits
for anything.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")

BLOCK_SIZE = 16
VOCABULARY = 151_936
STEP_BLOCKS = 32  # taken and given back at a time


class Pool(NamedTuple):
    """A block pool's two calls. `give` takes what `take` returned, next to be reused first."""

    take: Callable[[int], Sequence[Any]]
    give: Callable[[Iterable[Any]], None]


class Serving(Protocol):
    """A manager of block tables. A request is whatever `request` returned."""

    def request(self, name: str, tokens: list[int]) -> Any:
        """A new request with its hashes. Not measured."""
        ...

    def lookup(self, request: Any) -> Any:
        """What the cache holds of it, as `allocate` takes it."""
        ...

    def hit_tokens(self, computed: Any) -> int:
        """Of what `lookup` returned."""
        ...

    def allocate(self, request: Any, computed: Any) -> None:
        """Blocks for all of its tokens."""
        ...

    def admitted(self, request: Any) -> None:
        """What a scheduler notes after `allocate`. Not measured."""
        ...

    def decode(self, request: Any, tokens: Sequence[int]) -> None:
        """A step for each token: it is appended and gets a slot."""
        ...

    def free(self, request: Any) -> None:
        """Give its blocks back."""
        ...

    def table(self, request: Any) -> list[int]:
        """Its block ids. Not measured."""
        ...

    def num_free(self) -> int:
        """Blocks without a reference. Not measured."""
        ...


class Contestant(Protocol):
    """One allocator."""

    name: str

    def hasher(self, tokens: list[int] | NDArray[np.int64]) -> Callable[[], list[bytes]]:
        """What names the blocks of `tokens` when called; what must be made first is made here."""
        ...

    def serving(self, num_blocks: int, max_model_len: int) -> Serving:
        """A manager over a pool with `num_blocks` usable blocks."""
        ...

    def pool(self, num_blocks: int) -> Pool:
        """A pool with `num_blocks` usable blocks."""
        ...


class Sample(NamedTuple):
    """One measured number. Contestants of one round must have the same `proof`."""

    value: float
    is_right: bool
    proof: object = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done in a round."""

    tokens: int = 131_072
    steps: int = 512
    decode_tokens: int = 2048
    pool_blocks: int = 200_000
    few_blocks: int = 10_000
    few_pools: int = 20
    many_blocks: int = 1_000_000


# Enough to have everything imported, tested and allocated once.
WARM_UP = Sizes(1024, 32, 64, 1000, 320, 1, 1000)

UNITS = {
    "hash_list": "us",
    "hash_int64": "us",
    "allocate": "ms",
    "lookup_full_hit": "ms",
    "decode_step": "us",
    "free": "ms",
    "pool_build": "ms",
    "block_bytes": "B",
    "pool_allocate_free_10k": "us",
    "pool_allocate_free_1m": "us",
}


@contextmanager
def quiet_collector() -> Iterator[None]:
    """The collector of cycles runs between measurements only, and leaves alone what exists."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def cpu_us(work: Callable[[], T]) -> tuple[float, T]:
    """CPU time of this thread, and the result."""
    started = time.thread_time_ns()
    result = work()
    return (time.thread_time_ns() - started) / 1e3, result


def prompt(count: int, seed: int) -> list[int]:
    """Token ids as a tokenizer yields them: Python ints, nearly all different."""
    draw = np.random.default_rng(seed)
    ids: list[int] = draw.integers(0, VOCABULARY, count).tolist()
    return ids


def measure(
    contestant: Contestant, sizes: Sizes, seed: int, parts: Iterable[str]
) -> dict[str, Sample]:
    """One round of one contestant, by case. Of what takes milliseconds the median of a few."""
    found: dict[str, Sample] = {}
    for part in parts:
        work, repeats = PARTS[part]
        taken = []
        for _ in range(repeats):
            gc.collect()
            taken.append(work(contestant, sizes, seed))
        for case in taken[0]:
            found[case] = _middle([each[case] for each in taken])
    return found


def _middle(samples: Sequence[Sample]) -> Sample:
    """The median value, right if all were; the seed was one, and so must be the proofs."""
    first = samples[0]
    right = all(each.is_right and each.proof == first.proof for each in samples)
    return Sample(median(each.value for each in samples), right, first.proof)


def _hashes(contestant: Contestant, sizes: Sizes, seed: int) -> dict[str, Sample]:
    tokens, found = prompt(sizes.tokens, seed), {}
    blocks = sizes.tokens // BLOCK_SIZE
    for case, given in (("hash_list", tokens), ("hash_int64", np.array(tokens, np.int64))):
        spent_us, names = cpu_us(contestant.hasher(given))
        found[case] = Sample(spent_us / blocks, len(names) == blocks, names[-1:])
    return found


def _tables(contestant: Contestant, sizes: Sizes, seed: int) -> dict[str, Sample]:
    """A prompt that nobody asked before, the same prompt again, a request that goes on."""
    blocks = sizes.tokens // BLOCK_SIZE
    usable = blocks + (sizes.decode_tokens + sizes.steps) // BLOCK_SIZE + 64
    serving = contestant.serving(usable, sizes.tokens + sizes.steps)
    tokens = prompt(sizes.tokens, seed)
    first = serving.request("first", tokens)
    cold = serving.lookup(first)
    allocate_us, _ = cpu_us(lambda: serving.allocate(first, cold))
    serving.admitted(first)
    table = serving.table(first)
    allocated = len(set(table)) == blocks and serving.hit_tokens(cold) == 0

    again = serving.request("again", tokens)
    lookup_us, hit = cpu_us(lambda: serving.lookup(again))
    hit_tokens = serving.hit_tokens(hit)

    other = serving.request("other", prompt(sizes.decode_tokens, seed + 1))
    serving.allocate(other, serving.lookup(other))
    serving.admitted(other)
    steps = prompt(sizes.steps, seed + 2)
    decode_us, _ = cpu_us(lambda: serving.decode(other, steps))
    grown = serving.table(other)
    length = -(-(sizes.decode_tokens + sizes.steps) // BLOCK_SIZE)

    free_us, _ = cpu_us(lambda: serving.free(first))
    freed = serving.num_free() == usable - len(grown)
    full_hit = (sizes.tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    return {
        "allocate": Sample(allocate_us / 1e3, allocated, table),
        "lookup_full_hit": Sample(lookup_us / 1e3, hit_tokens == full_hit, hit_tokens),
        "decode_step": Sample(decode_us / sizes.steps, len(set(grown)) == length, grown),
        "free": Sample(free_us / 1e3, freed),
    }


def _pools(contestant: Contestant, sizes: Sizes, seed: int) -> dict[str, Sample]:
    build_us, pool = cpu_us(lambda: contestant.pool(sizes.pool_blocks))
    right = len(pool.take(sizes.pool_blocks)) == sizes.pool_blocks
    found = {"pool_build": Sample(build_us / 1e3, right)}
    del pool
    gc.collect()
    tracemalloc.start()
    try:
        pool = contestant.pool(sizes.pool_blocks)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found["block_bytes"] = Sample(held_bytes / sizes.pool_blocks, held_bytes > 0)
    del pool
    few = [_take_and_give(contestant, sizes.few_blocks) for _ in range(sizes.few_pools)]
    value = sum(sample.value for sample in few) / len(few)
    found["pool_allocate_free_10k"] = Sample(value, all(sample.is_right for sample in few))
    found["pool_allocate_free_1m"] = _take_and_give(contestant, sizes.many_blocks)
    gc.collect()
    return found


def _take_and_give(contestant: Contestant, num_blocks: int) -> Sample:
    """All blocks of a fresh pool, taken and given back in the order of chains. us per block."""
    take, give = contestant.pool(num_blocks)
    calls = num_blocks // STEP_BLOCKS

    def work() -> list[Sequence[Any]]:
        taken = [take(STEP_BLOCKS) for _ in range(calls)]
        for blocks in taken:
            give(reversed(blocks))
        return taken

    spent_us, taken = cpu_us(work)
    distinct = len({id(block) for blocks in taken for block in blocks})
    count = calls * STEP_BLOCKS
    return Sample(spent_us / count, distinct == count and len(take(count)) == count)


PARTS: dict[str, tuple[Callable[[Contestant, Sizes, int], dict[str, Sample]], int]] = {
    "hash": (_hashes, 5),
    "manager": (_tables, 3),
    "pool": (_pools, 1),
}
"""What is measured in one go, and how often in a round."""
