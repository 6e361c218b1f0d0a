"""Fixtures of tests inside a real vLLM: models, plain answers, tiers, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine import environment
from tests.leaks import leaks_since, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.models import Models
    from tests.engine.prompts import Answer, Prompt

os.environ.update(environment.IN_PROCESS)  # here, because torch reads some of it when imported


def pytest_configure(config: pytest.Config) -> None:
    """Say what is wrong when these tests are started in an environment without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/engine needs vLLM: run `make test-engine`")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny models by name, each made when first asked for."""
    from tests.engine.models import Models

    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def what_lasts(models: Models) -> None:
    """Build one plain engine, so that what vLLM opens once per process is no test's leak."""
    from tests.engine.in_process import Engine

    with Engine(models["llama"]):
        pass


@pytest.fixture(autouse=True)
def nothing_leaks(what_lasts: None) -> Iterator[None]:
    """As for every other test, with what a first vLLM leaves behind taken for granted."""
    before = take_snapshot()
    yield
    leaks = leaks_since(before)
    if leaks:
        pytest.fail("the test leaked " + "; ".join(leaks), pytrace=False)


class Plain:
    """What vLLM without a connector answers: each question is asked once per session."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[tuple[object, ...], Answer] = {}

    def __call__(
        self,
        prompts: list[Prompt],
        model: str = "llama",
        *,
        max_tokens: int = 16,
        together: bool = False,
        **flags: Any,
    ) -> list[Answer]:
        """The answers to `prompts`, asked one by one, or `together` in one batch."""
        from tests.engine.in_process import Engine
        from tests.engine.prompts import USERS

        how = (model, max_tokens, tuple(sorted(flags.items())), tuple(prompts) if together else ())
        missing = [each for each in prompts if (how, each) not in self._known]
        if missing:
            if model == "llama" and not together:
                missing = list(dict.fromkeys([*missing, *USERS]))  # somebody will ask them
            with Engine(self._models[model], **flags) as engine:
                ask = engine.generate if together else engine.one_by_one
                answers = ask(missing, max_tokens=max_tokens)
            self._known.update(((how, each), a) for each, a in zip(missing, answers, strict=True))
        return [self._known[how, each] for each in prompts]


@pytest.fixture(scope="session")
def plain(models: Models) -> Plain:
    """Answers of vLLM without a connector."""
    return Plain(models)


class Tiers:
    """A directory for a disk tier, and `kv_transfer_config`s that name it."""

    def __init__(self, directory: Path) -> None:
        self.disk_path = directory / "disk"

    def __call__(
        self,
        *,
        memory: str = "64MiB",
        disk: bool = True,
        role: str = "kv_both",
        policy: str = "recompute",
        socket: str | None = None,
        **connector: Any,
    ) -> dict[str, Any]:
        """With a private store unless `socket` names one. `connector`: its section's keys."""
        extra: dict[str, Any] = {
            "memory": {"capacity": memory},
            "connector": {"always_load": True, **connector},
            "limits": {"lookup_timeout": "2s"},  # what is restored must not hang on the load
        }
        if disk:
            extra["disk"] = {"path": str(self.disk_path), "capacity": "256MiB"}
        if socket is not None:
            extra["socket"] = socket
        return {
            "kv_connector": "EbbtideConnector",
            "kv_connector_module_path": "ebbtide.connectors.vllm",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra,
        }


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    """Configurations with a disk tier that lasts as long as the test."""
    return Tiers(tmp_path)


@pytest.fixture
def zeros_restored(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, every restored block holds zeros: the control of the identity tests."""

    def begin() -> None:
        from tests.engine.copies import zeros_restored

        zeros_restored(monkeypatch)

    return begin
