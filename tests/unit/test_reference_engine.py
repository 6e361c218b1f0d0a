"""However requests are batched, chunked, cached, preempted or aborted: the answers are the same."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch

from ebbtide.connectors.reference import Engine, ModelConfig, RequestOutput
from ebbtide.connectors.seam import SchedulerHalf, WorkerHalf
from ebbtide.errors import ConfigError, MisuseError

pytestmark = pytest.mark.usefixtures("single_thread")

TINY = ModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    max_position=2048,
)
NEW_TOKENS = 16


def prompt(length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(97, 123, (length,), generator=draw).tolist()


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def assert_idle(engine: Engine) -> None:
    engine.kv.check_integrity()
    assert engine.pool.num_free_blocks == len(engine.pool.blocks) - 1
    assert not engine.has_unfinished()
    assert not engine.has_pending_work()


PROMPTS = [prompt(length, seed=length) for length in (5, 16, 40, 33, 100, 64, 1, 77)]


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    """The answers of an engine that caches nothing and runs one request at a time."""
    engine = Engine(TINY, 64, max_batched_tokens=512, enable_prefix_caching=False)
    return [engine.generate([one], NEW_TOKENS, keep_logits=True)[0] for one in PROMPTS]


@pytest.mark.parametrize(("budget", "running"), [(7, 3), (16, 16), (64, 2), (512, 16)])
@pytest.mark.parametrize("caching", [False, True])
def test_batches_and_chunks_change_no_answer(
    alone: list[RequestOutput], budget: int, running: int, caching: bool
) -> None:
    engine = Engine(
        TINY,
        96,
        max_batched_tokens=budget,
        max_running=running,
        enable_prefix_caching=caching,
    )
    for number, one in enumerate(PROMPTS):
        engine.add_request(f"r{number}", one, NEW_TOKENS, keep_logits=True)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.step())
        assert 0 < engine.last_step_tokens <= budget
        assert len(engine.scheduler.running) <= running
        engine.kv.check_integrity()
    got = [outputs[f"r{number}"] for number in range(len(PROMPTS))]
    assert tokens_of(got) == tokens_of(alone)
    for output, expected in zip(got, alone, strict=True):
        assert output.first_logits is not None
        assert expected.first_logits is not None
        assert (output.first_logits - expected.first_logits).abs().max() < 1e-5
        assert output.sources.computed == output.prompt_tokens
        assert 0 < output.ttft_scheduled_s <= output.ttft_s
    assert_idle(engine)


def test_prefix_hits_change_no_answer() -> None:
    shared = prompt(64, seed=1)
    prompts = [shared + prompt(10 + number, seed=number) for number in range(6)]
    prompts += [shared, shared[:50]]
    plain = Engine(TINY, 96, enable_prefix_caching=False).generate(prompts, NEW_TOKENS)
    engine = Engine(TINY, 96)
    first = engine.generate(prompts[:1], NEW_TOKENS)
    rest = engine.generate(prompts[1:], NEW_TOKENS)
    assert tokens_of(first + rest) == tokens_of(plain)
    assert [one.sources.device for one in first + rest] == [0, 64, 64, 64, 64, 64, 48, 48]
    for one in first + rest:
        assert one.sources.device + one.sources.computed == one.prompt_tokens
    again = engine.generate(prompts[:1], NEW_TOKENS)
    assert tokens_of(again) == tokens_of(plain[:1])
    assert engine.reset_prefix_cache()
    assert engine.generate(prompts[:1], NEW_TOKENS)[0].sources.device == 0
    assert_idle(engine)


def test_a_prefix_is_shared_within_the_step_that_computes_it() -> None:
    shared = prompt(48, seed=1)
    prompts = [[*shared, 97], [*shared, 98, 99]]
    plain = Engine(TINY, 64, enable_prefix_caching=False).generate(prompts, NEW_TOKENS)
    engine = Engine(TINY, 64)
    outputs = engine.generate(prompts, NEW_TOKENS)
    assert outputs[1].sources.device == 48
    assert tokens_of(outputs) == tokens_of(plain)


def test_answers_are_cached_too() -> None:
    engine = Engine(TINY, 64)
    (first,) = engine.generate([prompt(20, seed=1)], 30)
    conversation = prompt(20, seed=1) + list(first.token_ids)
    (second,) = engine.generate([[*conversation, 97]], 4)
    assert second.sources.device == 48


def test_salts_keep_requests_apart() -> None:
    engine = Engine(TINY, 64)
    one = prompt(40, seed=1)
    hits = []
    for number, salt in enumerate((None, "a", "a", "b")):
        engine.add_request(str(number), one, 4, cache_salt=salt)
        hits += [output.sources.device for output in engine.run()]
    assert hits == [0, 0, 32, 0]


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("caching", [False, True])
def test_preemption_changes_no_answer(
    alone: list[RequestOutput], budget: int, caching: bool
) -> None:
    # 100 + 16 tokens are 8 blocks: 9 usable ones hold the longest request and hardly another.
    engine = Engine(TINY, 10, max_batched_tokens=budget, enable_prefix_caching=caching)
    outputs = engine.generate(PROMPTS, NEW_TOKENS)
    assert tokens_of(outputs) == tokens_of(alone)
    assert sum(output.preemptions for output in outputs) > 0
    for output in outputs:
        sources = output.sources
        assert sources.device + sources.computed == output.prompt_tokens
    assert_idle(engine)


def test_first_come_first_served() -> None:
    engine = Engine(TINY, 96, max_running=1)
    for number in (2, 0, 1):
        engine.add_request(str(number), PROMPTS[number], 2)
    assert [output.request_id for output in engine.run()] == ["2", "0", "1"]


def test_decodes_go_before_prefill_chunks() -> None:
    engine = Engine(TINY, 96, max_batched_tokens=8)
    engine.add_request("a", prompt(5, seed=1), 20)
    engine.step()
    engine.add_request("b", prompt(60, seed=2), 4)
    engine.add_request("c", prompt(60, seed=3), 4)
    for _ in range(6):
        before = engine.scheduler.running[0].request.num_tokens
        engine.step()
        assert engine.scheduler.running[0].request.num_tokens == before + 1


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_an_aborted_request_leaves_nothing_behind(steps: int, alone: list[RequestOutput]) -> None:
    engine = Engine(TINY, 96, max_batched_tokens=24)
    for number, one in enumerate(PROMPTS):
        engine.add_request(str(number), one, NEW_TOKENS)
    outputs = [output for _ in range(steps) for output in engine.step()]
    for number in (2, 4, 7):
        engine.abort(str(number))
    engine.abort("unknown")
    outputs += engine.run()
    assert {output.request_id for output in outputs} == {"0", "1", "3", "5", "6"}
    for output in outputs:
        assert output.token_ids == alone[int(output.request_id)].token_ids
    assert_idle(engine)
    assert tokens_of(engine.generate(PROMPTS[2:3], NEW_TOKENS)) == tokens_of(alone[2:3])


def test_logits_are_kept_only_when_asked_for() -> None:
    (output,) = Engine(TINY, 16).generate([prompt(5, seed=1)], 2)
    assert output.first_logits is None
    assert len(output.token_ids) == 2


def test_what_cannot_run_is_refused() -> None:
    engine = Engine(TINY, 10)
    engine.add_request("a", [1, 2, 3], 4)
    for request_id, tokens, count, words in (
        ("a", [1], 1, "in use"),
        ("b", [], 1, "empty"),
        ("b", [1], 0, "empty"),
        ("b", [1] * 140, 5, "too long"),
        ("b", [1, 260], 1, "vocabulary"),
        ("b", [-1], 1, "vocabulary"),
    ):
        with pytest.raises(MisuseError, match=words):
            engine.add_request(request_id, tokens, count)
    with pytest.raises(MisuseError, match="under way"):
        engine.generate([[1]])
    with pytest.raises(MisuseError, match="too long"):
        Engine(TINY, 500).add_request("b", [1] * 2048, 1)
    for blocks, budget in ((1, 8), (10, 0)):
        with pytest.raises(ConfigError):
            Engine(TINY, blocks, max_batched_tokens=budget)


def test_closing_ends_everything() -> None:
    engine = Engine(TINY, 16)
    engine.add_request("a", [1, 2, 3], 4)
    engine.step()
    engine.close()
    engine.close()
    assert_idle(engine)
    for call in (engine.step, lambda: engine.add_request("b", [1], 1)):
        with pytest.raises(MisuseError, match="closed"):
            call()


def test_halves_come_together_once_and_with_caching() -> None:
    engine = Engine(TINY, 16)
    scheduler, worker = create_autospec(SchedulerHalf), create_autospec(WorkerHalf)
    with pytest.raises(ConfigError, match="together"):
        Engine(TINY, 16, scheduler_half=scheduler)
    with pytest.raises(ConfigError, match="prefix caching"):
        Engine(TINY, 16, enable_prefix_caching=False).attach(scheduler, worker)
    engine.add_request("a", [1, 2], 1)
    with pytest.raises(MisuseError, match="before the first request"):
        engine.attach(scheduler, worker)
    engine.run()
    engine.attach(scheduler, worker)
    with pytest.raises(MisuseError, match="before the first request"):
        engine.attach(scheduler, worker)
    engine.close()
    engine.close()
    worker.close.assert_called_once_with()
    scheduler.close.assert_called_once_with()
