"""Who may share blocks: never across salts, adapters or weights; and a salt is written nowhere."""

from __future__ import annotations

import io
import logging
import shutil
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest
from tests.engine.adapters import write_adapter
from tests.engine.counters import assert_counters_add_up
from tests.engine.in_process import Engine
from tests.engine.prompts import LONG_RESTORED, USERS, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import Plain, Tiers
    from tests.engine.models import Models

SHARED = USERS[0]
SALT, OTHER_SALT = "tenant-4711-secret", "tenant-4712-secret"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that vLLM and ebbtide log in this process, at the most talkative level."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in ("", "vllm", "ebbtide")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield text
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_salts_do_not_share_and_are_written_nowhere(
    models: Models, plain: Plain, tiers: Tiers, log: io.StringIO, tmp_path: Path
) -> None:
    (expected,) = plain([SHARED])
    with Engine(models["llama"], transfer=tiers()) as engine:
        answers, restored = [], []
        for salt in (SALT, OTHER_SALT, None, SALT):
            assert engine.reset()
            before = engine.counters().restored_tokens
            answers += engine.one_by_one([SHARED], salt=salt)
            restored.append(engine.counters().restored_tokens - before)
        counters = engine.counters()
        metrics = generate_latest().decode()
    assert tokens_of(answers) == [expected.tokens] * 4
    assert restored == [0, 0, 0, LONG_RESTORED]
    assert_counters_add_up(counters, requests=4)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 0
    for salt in (SALT, OTHER_SALT):
        assert salt not in metrics
        assert salt not in log.getvalue()
        assert not [path for path in files if salt.encode() in path.read_bytes()]


def test_p16_equal_prompts_of_other_weights_behind_the_same_path_do_not_share(
    models: Models, plain: Plain, tiers: Tiers, tmp_path: Path
) -> None:
    (expected,) = plain([SHARED])
    (other,) = plain([SHARED], "other_llama")
    place = tmp_path / "model"
    asked = []
    for name in ("llama", "other_llama", "llama"):
        shutil.copytree(models[name], place, dirs_exist_ok=True)
        with Engine(place, transfer=tiers()) as engine:
            (answer,) = engine.one_by_one([SHARED])
            counters = engine.counters()
        assert_counters_add_up(counters, requests=1)
        asked.append((answer.tokens, counters.restored_tokens))
    assert expected.tokens != other.tokens
    assert asked == [(expected.tokens, 0), (other.tokens, 0), (expected.tokens, LONG_RESTORED)]


def test_p09_adapters_do_not_share_with_each_other_or_the_base(
    models: Models, tiers: Tiers, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    adapters = [
        LoRARequest(name, number, str(write_adapter(tmp_path / name, seed=number)))
        for number, name in enumerate(("red", "blue"), start=1)
    ]
    asked = [None, *adapters]
    flags = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    restored = {}
    with Engine(models["llama"], transfer=tiers(disk=False), **flags) as engine:
        first = [engine.one_by_one([SHARED], lora=lora)[0] for lora in asked]
        restored["first"] = engine.counters().restored_tokens
        assert engine.reset()
        again = [engine.one_by_one([SHARED], lora=lora)[0] for lora in asked]
        restored["again"] = engine.counters().restored_tokens
        assert_counters_add_up(engine.counters(), requests=6)
    assert len(set(tokens_of(first))) == 3
    assert tokens_of(again) == tokens_of(first)
    assert restored == {"first": 0, "again": 3 * LONG_RESTORED}
