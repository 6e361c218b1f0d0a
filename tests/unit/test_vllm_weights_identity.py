"""The identity's thread, identities that need none, and where a model lies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.model_directory import (
    PATIENCE_S,
    count_reads,
    digest_of,
    make_model,
    settled,
)

from ebbtide.connectors.vllm import weights
from ebbtide.connectors.vllm.digest_cache import DigestCache
from ebbtide.connectors.vllm.weights import (
    WeightsIdentity,
    hub_cache_dir,
    resolve_local,
)
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return count_reads(monkeypatch)


def hashing_threads() -> int:
    return sum(thread.name == "ebbtide-weights" for thread in threading.enumerate())


class Gate:
    """Holds the reader back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        real = weights._content_digest

        def held(file: Any, size: int, cancelled: Callable[[], bool]) -> tuple[str, int] | None:
            self.reached.set()
            while not self.open.wait(0.002):
                if cancelled():
                    break
            return real(file, size, cancelled)

        monkeypatch.setattr(weights, "_content_digest", held)


def test_unknown_until_one_daemon_thread_has_read_all(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    identity = WeightsIdentity(model, DigestCache(None))
    assert gate.reached.wait(PATIENCE_S)
    assert identity.poll() is None
    assert identity.failed is None
    assert hashing_threads() == 1
    assert all(t.daemon for t in threading.enumerate() if t.name == "ebbtide-weights")
    gate.open.set()
    assert settled(identity).poll() == f"sha256/{digest_of(model)}"
    assert identity.failed is None
    assert hashing_threads() == 0


def test_close_cancels_and_joins(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    identity = WeightsIdentity(model, DigestCache(None))
    assert gate.reached.wait(PATIENCE_S)
    identity.close()
    identity.close()
    assert hashing_threads() == 0
    assert identity.poll() is None
    assert identity.failed is None


def test_close_does_not_wait_for_a_read_that_hangs(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "CLOSE_PATIENCE_S", 0.05)
    hangs, reached = threading.Event(), threading.Event()

    def hanging(file: Any, size: int, cancelled: Callable[[], bool]) -> None:
        reached.set()
        hangs.wait(PATIENCE_S)

    monkeypatch.setattr(weights, "_content_digest", hanging)
    identity = WeightsIdentity(model, DigestCache(None))
    assert reached.wait(PATIENCE_S)
    started = time.monotonic()
    identity.close()
    assert time.monotonic() - started < PATIENCE_S / 2
    assert "hangs" in caplog.text
    hangs.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_is_a_failure_not_a_wait(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(weights, "_content_digest", broken)
    identity = settled(WeightsIdentity(model, DigestCache(None)))
    assert identity.poll() is None
    assert "fault of its own" in str(identity.failed)


def test_no_thread_to_be_had_is_a_failure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    identity = WeightsIdentity(model, DigestCache(None))
    assert "No thread" in str(identity.failed)
    identity.close()


def test_a_process_that_forgets_to_close_still_exits(model: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from ebbtide.connectors.vllm import weights\n"
        "weights._content_digest = lambda *_: time.sleep(3600)\n"
        "identity = weights.WeightsIdentity(\n"
        "    pathlib.Path(sys.argv[1]), weights.DigestCache(None))\n"
        "assert identity._thread.is_alive()\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(model)], check=True, timeout=60)


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys, ebbtide.connectors.vllm.weights\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_an_explicit_revision_wins_and_starts_no_thread(model: Path, reads: list[str]) -> None:
    threads = threading.active_count()
    for identity in (
        WeightsIdentity.of_revision("v7 final"),
        WeightsIdentity.choose(model, weights_revision="v7 final", dummy_seed=3),
        WeightsIdentity.choose(None, weights_revision="v7 final"),
    ):
        assert identity.poll() == "revision/v7 final"
        assert identity.failed is None
        assert threading.active_count() == threads
        identity.close()
        assert identity.poll() == "revision/v7 final"
    assert reads == []


def test_random_weights_are_named_by_their_seed(model: Path) -> None:
    assert WeightsIdentity.of_dummy(1234).poll() == "dummy/1234"
    chosen = WeightsIdentity.choose(model, dummy_seed=0)
    assert chosen.poll() == "dummy/0"
    assert hashing_threads() == 0


def test_choose_hashes_when_nothing_else_is_said(model: Path) -> None:
    chosen = settled(WeightsIdentity.choose(model, DigestCache(None)))
    assert chosen.poll() == f"sha256/{digest_of(model)}"


@pytest.mark.parametrize("text", ["", "  ", "a\nb", "x" * 201])
def test_a_revision_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="weights_revision"):
        WeightsIdentity.of_revision(text)


# Finding the directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, at main and at a pull request."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "VLLM_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    place = tmp_path / "hf" / "hub"
    repository = place / "models--org--name"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "snapshots" / "other").mkdir()
    (repository / "refs" / "refs" / "pr").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "refs" / "pr" / "1").write_text("other")
    (repository / "refs" / "ahead").write_text("not-downloaded")
    (repository / "refs" / "evil").write_text("../../x")
    (place / "x").mkdir()
    (place / "stray").write_text(COMMIT)
    return place


def test_a_path_is_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_local(str(model), None) == model
    monkeypatch.chdir(model.parent)
    assert resolve_local("model", "v1") == model
    file = model / "model-00001-of-00002.safetensors"
    assert resolve_local(str(file), None) == file
    assert resolve_local(str(model / "config.json"), None) is None


def test_a_hub_id_is_its_snapshot(hub: Path) -> None:
    snapshots = hub / "models--org--name" / "snapshots"
    assert resolve_local("org/name", None) == snapshots / COMMIT
    assert resolve_local("org/name", "main") == snapshots / COMMIT
    assert resolve_local("org/name", COMMIT) == snapshots / COMMIT
    assert resolve_local("org/name", "refs/pr/1") == snapshots / "other"
    assert resolve_local("org/name", None, hub) == snapshots / COMMIT
    assert resolve_local("org/name", None, hub.parent) is None


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("org/absent", None),
        ("org/name", "ahead"),
        ("org/name", "unknown"),
        ("org/name", "evil"),
        ("org/name", "../../../x"),
        ("org/name", "../../stray"),
        ("org/name", "a\0b"),
        ("../x", None),
        ("a/b/c", None),
        ("s3://bucket/name", None),
        ("org/name:Q4_K_M", None),
        ("org/" + "n" * 300, None),
        ("", None),
    ],
)
def test_what_is_not_here_is_none(hub: Path, name: str, revision: str | None) -> None:
    assert resolve_local(name, revision) is None


def test_another_hubs_model_is_not_taken_for_this_hubs(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert resolve_local("org/name", None) is None


def test_where_the_hubs_cache_lies() -> None:
    every = {"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}
    assert hub_cache_dir(every) == Path("/a")
    assert hub_cache_dir({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}) == Path("/b")
    assert hub_cache_dir({"HF_HOME": "/c"}) == Path("/c/hub")
    assert hub_cache_dir({"XDG_CACHE_HOME": "/d"}) == Path("/d/huggingface/hub")
    assert hub_cache_dir({}) == Path.home() / ".cache" / "huggingface" / "hub"
