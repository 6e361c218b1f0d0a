"""A small model directory, and what tests of its identity ask about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.connectors.vllm import weights
from ebbtide.connectors.vllm.digest_cache import DigestCache
from ebbtide.connectors.vllm.weights import WeightsIdentity, weights_digest, weights_files

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

PATIENCE_S = 20.0


def make_model(place: Path) -> Path:
    """The directory of field case P16: a config and two weight files."""
    place.mkdir()
    (place / "config.json").write_text('{"rope_theta": 10000.0}')
    (place / "model-00001-of-00002.safetensors").write_bytes(b"first" * 1000)
    (place / "model-00002-of-00002.safetensors").write_bytes(b"second" * 1000)
    return place


def remember_young_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of tests are younger than what is remembered otherwise."""
    monkeypatch.setattr(weights, "SETTLED_NS", -(10**15))


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content is read from now on."""
    seen: list[str] = []
    real = weights._content_digest

    def counted(file: Any, size: int, cancelled: Callable[[], bool]) -> tuple[str, int] | None:
        seen.append(Path(file.name).name)
        return real(file, size, cancelled)

    monkeypatch.setattr(weights, "_content_digest", counted)
    return seen


def never() -> bool:
    """Nobody cancels."""
    return False


def digest_of(directory: Path, cache: DigestCache | None = None) -> str:
    """The digest of a model directory, without a memory of other calls by default."""
    found = weights_digest(weights_files(directory), cache or DigestCache(None), never)
    assert found is not None
    return found


def names(directory: Path) -> list[str]:
    """The deciding files, relative to the directory."""
    return [str(path.relative_to(directory)) for path in weights_files(directory)]


def settled(identity: WeightsIdentity) -> WeightsIdentity:
    """Wait until the identity is known or has failed."""
    deadline = time.monotonic() + PATIENCE_S
    while identity.poll() is None and identity.failed is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    identity.close()
    return identity
