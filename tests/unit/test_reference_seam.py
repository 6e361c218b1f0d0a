"""The engine and its seam, driven by two small halves that keep records in a dict."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
from tests.controls import TINY

from ebbtide.allocator import pack_key, unpack_key
from ebbtide.connectors import seam
from ebbtide.connectors.reference import Engine, RequestOutput
from ebbtide.connectors.reference.device_pool import GROUP, ReferencePool
from ebbtide.errors import MisuseError
from ebbtide.kernels.copy import gather, scatter
from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator import BlockPool

pytestmark = pytest.mark.usefixtures("single_thread")

BLOCK = 16
NEW_TOKENS = 16
GARBAGE = 0x7F  # as float32 about 3e38: whoever reads it answers nonsense


@dataclass
class Tier:
    """The records, and how the halves misbehave."""

    records: dict[bytes, torch.Tensor] = field(default_factory=dict)
    load_delay: int = 0  # steps
    store_delay: int = 0
    nones: int = 0  # times per request that the answer has not arrived
    fail_at: int | None = None  # index in every load of the block that fails
    calls: list[str] = field(default_factory=list)


class DictScheduler:
    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        self.tier, self.pool = tier, pool
        self.hashes: dict[str, list[bytes]] = {}
        self.asked: dict[str, int] = {}
        self.new_loads: list[seam.LoadJob] = []
        self.cancelled: list[str] = []
        self.loading: set[str] = set()
        self.storing: dict[int, seam.BlockRef] = {}
        self.offered: list[seam.BlockRef] = []
        self.allocations: list[tuple[str, int, int]] = []

    def on_new_request(
        self, request_id: str, block_hashes: Sequence[bytes], prompt_tokens: int
    ) -> None:
        assert request_id not in self.hashes
        assert len(block_hashes) == prompt_tokens // BLOCK
        self.hashes[request_id] = list(block_hashes)

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        assert local_tokens % BLOCK == 0
        self.asked[request_id] = self.asked.get(request_id, 0) + 1
        if self.asked[request_id] <= self.tier.nones:
            return None
        matched = 0
        for block_hash in self.hashes[request_id][local_tokens // BLOCK :]:
            if block_hash not in self.tier.records:
                break
            matched += BLOCK
        return matched

    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        self.allocations.append((request_id, local_tokens, external_tokens))
        (table,) = block_ids  # of the one group
        assert len(table) * BLOCK >= local_tokens + external_tokens
        if external_tokens:
            part = slice(local_tokens // BLOCK, (local_tokens + external_tokens) // BLOCK)
            self.loading.add(request_id)
            keys = tuple(pack_key(name, GROUP) for name in self.hashes[request_id][part])
            self.new_loads.append(seam.LoadJob(request_id, keys, tuple(table[part])))

    def build_step(self, newly_full: Sequence[seam.BlockRef]) -> seam.StepMetadata:
        self.tier.calls.append("build")
        stores: list[seam.StoreJob] = []
        self.offered += newly_full
        for ref in newly_full:
            assert ReferencePool(self.pool).content(ref.block_id) == ref.key
            self.pool.touch([self.pool.blocks[ref.block_id]])
            sequence = len(self.offered) * 1000 + len(stores)
            self.storing[sequence] = ref
            stores.append(seam.StoreJob(ref.block_id, 0, sequence))
        loads, self.new_loads = tuple(self.new_loads), []
        cancelled, self.cancelled = tuple(self.cancelled), []
        return seam.StepMetadata(stores=tuple(stores), loads=loads, cancelled=cancelled)

    def on_report(self, report: seam.WorkerReport) -> list[seam.LoadResult]:
        self.tier.calls.append("report")
        for sequence in report.copied:
            ref = self.storing.pop(sequence)
            self.pool.free([self.pool.blocks[ref.block_id]])
            block_hash, _ = unpack_key(ref.key)
            self.tier.records[block_hash] = self.tier.records.pop(b"%d" % sequence)
        self.loading -= {result.request_id for result in report.loads}
        return report.loads

    def request_finished(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        known = self.hashes.pop(request_id)
        assert list(block_hashes[: len(known)]) == known
        if request_id in self.loading:
            self.cancelled.append(request_id)

    def arrives(self, request_id: str) -> bool:
        return False

    def has_pending_work(self) -> bool:
        return bool(self.storing or self.loading or self.new_loads)

    def close(self) -> None:
        pass


class DictWorker:
    def __init__(self, tier: Tier, kv_caches: list[torch.Tensor]) -> None:
        self.tier = tier
        self.layout = PagedLayout.from_tensors(kv_caches, block_dim=1)
        self.step = 0
        self.stores: list[tuple[int, seam.StoreJob]] = []
        self.stored: list[int] = []
        self.loads: list[tuple[int, seam.LoadJob]] = []
        self.cancelled: set[str] = set()

    def start_step(self, metadata: seam.StepMetadata) -> None:
        self.tier.calls.append("start")
        self.stores += [(self.step + self.tier.store_delay, job) for job in metadata.stores]
        self.loads += [(self.step + self.tier.load_delay, job) for job in metadata.loads]
        self.cancelled |= set(metadata.cancelled)
        for job in metadata.loads:  # half-written blocks are what a load looks like before its end
            junk = torch.full((self.layout.record_bytes,), GARBAGE, dtype=torch.uint8)
            scatter(self.layout, job.block_ids, [junk] * len(job.block_ids))
        self._store_due()  # before the forward pass: what is not computed yet is stored wrong

    def wait_for_layer(self, group: int, layer: int) -> None:
        raise AssertionError("nothing arrives layer by layer")

    def finish_step(self) -> seam.WorkerReport:
        self.tier.calls.append("finish")
        report, self.stored = seam.WorkerReport(copied=self.stored), []
        for due, load in self.loads:
            if due <= self.step:
                report.loads.append(self._load(load))
        self.loads = [entry for entry in self.loads if entry[0] > self.step]
        self.step += 1
        return report

    def _store_due(self) -> None:
        for due, job in self.stores:
            if due <= self.step:
                record = torch.zeros(self.layout.record_bytes, dtype=torch.uint8)
                gather(self.layout, [job.block_id], [record])
                self.tier.records[b"%d" % job.sequence] = record
                self.stored.append(job.sequence)
        self.stores = [entry for entry in self.stores if entry[0] > self.step]

    def _load(self, job: seam.LoadJob) -> seam.LoadResult:
        count = len(job.block_ids)
        first_bad = count if self.tier.fail_at is None else min(self.tier.fail_at, count)
        sources = ["disk" if index % 2 else "memory" for index in range(count)]
        sources[first_bad : first_bad + 1] = ["corrupt"] * (first_bad < count)
        for source, key, block_id in zip(sources, job.keys, job.block_ids, strict=True):
            if source != "corrupt":
                scatter(self.layout, [block_id], [self.tier.records[unpack_key(key)[0]]])
        return seam.LoadResult(job.request_id, first_bad, tuple(sources))

    def close(self) -> None:
        pass


def prompt(length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(97, 123, (length,), generator=draw).tolist()


def tiered(tier: Tier, num_blocks: int = 96, max_batched_tokens: int = 512) -> Engine:
    engine = Engine(TINY, num_blocks, max_batched_tokens=max_batched_tokens)
    engine.attach(DictScheduler(tier, engine.pool), DictWorker(tier, engine.runner.kv_caches))
    return engine


def scheduler_of(engine: Engine) -> DictScheduler:
    assert isinstance(engine.scheduler.half, DictScheduler)
    return engine.scheduler.half


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def assert_same_floats(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(
        one.view(torch.float32), other.view(torch.float32), atol=1e-4, rtol=0
    )


def assert_idle(engine: Engine) -> None:
    assert engine.drain()
    engine.kv.check_integrity()
    assert engine.pool.num_free_blocks == len(engine.pool.blocks) - 1


SHARED = prompt(80, seed=7)
PROMPTS = [SHARED + prompt(20 + number, seed=number) for number in range(4)]
PROMPTS += [prompt(90, seed=11), SHARED, prompt(96, seed=12), prompt(5, seed=13)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    engine = Engine(TINY, 96, enable_prefix_caching=False)
    return [tokens_of(engine.generate([one], NEW_TOKENS))[0] for one in PROMPTS]


@pytest.fixture(scope="module")
def stored() -> dict[bytes, torch.Tensor]:
    """The records of all prompts and answers."""
    tier = Tier()
    engine = tiered(tier)
    engine.generate(PROMPTS, NEW_TOKENS)
    assert_idle(engine)
    return tier.records


def assert_sources_add_up(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        parts = astuple(output.sources)
        assert sum(parts) == output.prompt_tokens
        assert min(parts) >= 0


def test_stored_records_hold_computed_blocks(
    stored: dict[bytes, torch.Tensor], plain: list[tuple[int, ...]]
) -> None:
    """Each record equals what an engine without tiers has in its block for the same tokens."""
    seen = 0
    for number, one in enumerate(PROMPTS):
        engine = Engine(TINY, 96)
        layout = PagedLayout.from_tensors(engine.runner.kv_caches, block_dim=1)
        assert tokens_of(engine.generate([one], NEW_TOKENS)) == plain[number : number + 1]
        for block in engine.pool.blocks:
            if block.key is not None:
                record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
                gather(layout, [block.block_id], [record])
                assert_same_floats(stored[unpack_key(block.key)[0]], record)
                seen += 1
    assert seen >= len(stored) > 20


@pytest.mark.parametrize("budget", [24, 512])
@pytest.mark.parametrize("nones", [0, 3])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_restored_blocks_give_the_same_answers(
    stored: dict[bytes, torch.Tensor],
    plain: list[tuple[int, ...]],
    delay: int,
    nones: int,
    budget: int,
) -> None:
    tier = Tier(dict(stored), load_delay=delay, store_delay=delay, nones=nones)
    engine = tiered(tier, max_batched_tokens=budget)
    outputs = engine.generate(PROMPTS, NEW_TOKENS)
    assert tokens_of(outputs) == plain
    assert_sources_add_up(outputs)
    first = outputs[0].sources
    assert (first.memory, first.disk, first.computed) == (48, 48, 4)
    assert not any(output.misses for output in outputs)
    exact = outputs[6]  # 96 tokens are exactly 6 blocks: all are loaded, one token computed again
    assert exact.sources.computed == 0
    assert_idle(engine)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_blocks_behind_a_failure_are_computed(
    stored: dict[bytes, torch.Tensor], plain: list[tuple[int, ...]], fail_at: int, delay: int
) -> None:
    tier = Tier(dict(stored), load_delay=delay, fail_at=fail_at)
    engine = tiered(tier)
    for number, one in enumerate(PROMPTS):
        (output,) = engine.generate([one], NEW_TOKENS)
        assert output.token_ids == plain[number]
        assert_sources_add_up([output])
        if number in (0, 4, 6):  # nothing of these is on the device
            loaded = output.sources.memory + output.sources.disk
            assert loaded == fail_at * BLOCK
            assert output.misses == {"corrupt": 1}
    tier.fail_at = None
    assert tokens_of(engine.generate(PROMPTS, NEW_TOKENS)) == plain
    assert_idle(engine)
    for block_hash, record in tier.records.items():
        assert_same_floats(record, stored[block_hash])


def test_zeros_instead_of_records_change_the_answers() -> None:
    """The proof that restored blocks are read: were they not, nothing would change."""
    prompts = [prompt(80, seed=100 + number) for number in range(20)]
    right = Engine(TINY, 128, enable_prefix_caching=False).generate(prompts, NEW_TOKENS)
    tier = Tier()
    assert tokens_of(tiered(tier, 256).generate(prompts, NEW_TOKENS)) == tokens_of(right)
    zeros = {name: torch.zeros_like(record) for name, record in tier.records.items()}
    wrong = tiered(Tier(zeros), 256).generate(prompts, NEW_TOKENS)
    changed = sum(a != b for a, b in zip(tokens_of(right), tokens_of(wrong), strict=True))
    assert changed >= 0.9 * len(prompts)


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("budget", [24, 512])
def test_a_tiny_pool_with_loads_and_preemptions(
    plain: list[tuple[int, ...]], delay: int, budget: int
) -> None:
    tier = Tier(load_delay=delay, store_delay=delay, nones=1)
    engine = tiered(tier, 11, max_batched_tokens=budget)
    for _ in range(3):
        outputs = engine.generate(PROMPTS, NEW_TOKENS)
        assert tokens_of(outputs) == plain
        assert_sources_add_up(outputs)
    assert any(external for _, _, external in scheduler_of(engine).allocations)
    assert_idle(engine)


def test_what_runs_in_a_step_is_not_preempted_in_it(stored: dict[bytes, torch.Tensor]) -> None:
    """One in prefill runs out of blocks after one that decodes has got its token, and gives way."""
    prompts = [PROMPTS[0][:97], prompt(240, seed=21)]
    right = Engine(TINY, 64, enable_prefix_caching=False).generate(prompts, NEW_TOKENS)
    # 6 blocks to load and 15 to compute fit exactly; the first answer token needs one more.
    engine = tiered(Tier(dict(stored), load_delay=3), 22, max_batched_tokens=17)
    outputs = engine.generate(prompts, NEW_TOKENS)
    assert tokens_of(outputs) == tokens_of(right)
    assert [output.preemptions for output in outputs] == [0, 1]
    assert_idle(engine)


def test_blocks_are_offered_once_computed(plain: list[tuple[int, ...]]) -> None:
    tier = Tier()
    engine = tiered(tier, max_batched_tokens=32)
    half = scheduler_of(engine)
    engine.add_request("a", PROMPTS[0], NEW_TOKENS)
    engine.step()
    assert half.offered == []  # cached by this step's schedule, offered by the next one
    while engine.has_unfinished():
        full = engine.scheduler.running[0].request.num_computed_tokens // BLOCK
        outputs = engine.step()
        assert tier.calls[-4:] == ["build", "start", "finish", "report"]
        assert len(half.offered) == full
    assert outputs[0].token_ids == plain[0]
    assert_idle(engine)
    assert len(half.offered) == (len(PROMPTS[0]) + NEW_TOKENS - 1) // BLOCK


def test_younger_requests_pass_one_whose_answer_is_late(plain: list[tuple[int, ...]]) -> None:
    tier = Tier(nones=5)
    engine = tiered(tier)
    half = scheduler_of(engine)
    engine.add_request("slow", PROMPTS[0], NEW_TOKENS)
    half.asked["quick"] = 5
    engine.add_request("quick", PROMPTS[4], NEW_TOKENS)
    engine.step()
    assert [one.request_id for one in engine.scheduler.running] == ["quick"]
    outputs = {output.request_id: output.token_ids for output in engine.run()}
    assert outputs == {"slow": plain[0], "quick": plain[4]}


@pytest.mark.parametrize("steps", [1, 2])
def test_blocks_of_an_aborted_load_stay_until_it_is_reported(
    stored: dict[bytes, torch.Tensor], plain: list[tuple[int, ...]], steps: int
) -> None:
    tier = Tier(dict(stored), load_delay=4)
    engine = tiered(tier)
    engine.add_request("a", PROMPTS[0], NEW_TOKENS)
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    held = len(engine.pool.blocks) - 1 - engine.pool.num_free_blocks
    assert held == 6
    assert engine.has_unfinished()
    with pytest.raises(MisuseError, match="in use"):  # its load's report will bear this name
        engine.add_request("a", PROMPTS[0], NEW_TOKENS)
    assert engine.run() == []
    engine.add_request("a", PROMPTS[0], NEW_TOKENS)
    outputs = engine.run()
    assert tokens_of(outputs) == plain[:1]
    assert_idle(engine)
