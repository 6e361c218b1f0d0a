"""What vLLM is configured with, and what is refused or warned of before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.config_schema import VLLM_BELOW, VLLM_FIRST, VLLM_HASH_FLAG
from ebbtide.connectors.vllm import settings
from ebbtide.connectors.vllm.settings import read_settings
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import Tiers

SHARED = "/run/ebbtide/store.sock"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def config_of(
    tiers: Tiers,
    algorithm: str = "sha256_cbor",
    *,
    dcp: int = 1,
    pcp: int = 1,
    cache: dict[str, Any] | None = None,
    engine_id: str = "engine",
    **transfer: Any,
) -> Any:
    """The few fields that `read_settings` reads; KVTransferConfig is vLLM's own."""
    from vllm.config import KVTransferConfig

    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(engine_id=engine_id, **tiers(**transfer)),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, **(cache or {})),
    )


# ------------------------------------------------------------------ hash chains


def test_the_recommended_hash_is_taken_without_a_word(tiers: Tiers) -> None:
    found = read_settings(config_of(tiers))
    assert found.warnings == ()
    assert found.reproducible
    assert found.stores
    assert "disk" in found.store_settings()


def test_pickled_hashes_work_and_name_the_better_flag(tiers: Tiers) -> None:
    found = read_settings(config_of(tiers, "sha256"))
    assert found.reproducible
    assert "disk" in found.store_settings()
    (line,) = found.warnings
    assert VLLM_HASH_FLAG in line
    assert "--prefix-caching-hash-algo sha256_cbor" in line


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_p01_a_random_root_gets_no_disk_and_a_warning(tiers: Tiers, algorithm: str) -> None:
    found = read_settings(config_of(tiers, algorithm))
    assert not found.reproducible
    assert found.stores  # in a store of its own: memory serves as long as the engine lives
    assert "disk" in found.extra
    assert "disk" not in found.store_settings()
    assert "nothing is written to disk" in found.warnings[0]
    assert VLLM_HASH_FLAG in found.warnings[0]
    assert "PYTHONHASHSEED" in found.warnings[0]


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_p01_a_random_root_stores_nothing_where_others_do(tiers: Tiers, algorithm: str) -> None:
    found = read_settings(config_of(tiers, algorithm, socket=SHARED))
    assert not found.private
    assert not found.stores
    assert "nothing is stored" in found.warnings[0]


@pytest.mark.parametrize("seed", ["0", ""])  # vLLM takes an empty one for a seed
def test_p01_a_seed_makes_the_root_reproducible_and_is_named(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, seed: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    found = read_settings(config_of(tiers, "xxhash_cbor", socket=SHARED))
    assert found.reproducible
    assert found.stores
    (line,) = found.warnings
    assert "PYTHONHASHSEED" in line
    (line,) = read_settings(config_of(tiers)).warnings
    assert "PYTHONHASHSEED" in line
    both = read_settings(config_of(tiers, "xxhash")).warnings
    assert len(both) == 2


# ------------------------------------------------------------------ roles and sockets


@pytest.mark.parametrize(
    ("role", "stores", "loads"),
    [("kv_both", True, True), ("kv_producer", True, False), ("kv_consumer", False, True)],
)
def test_roles(tiers: Tiers, role: str, stores: bool, loads: bool) -> None:
    found = read_settings(config_of(tiers, role=role))
    assert (found.stores, found.loads) == (stores, loads)


def test_replicas_of_one_engine_share_a_private_store_and_nobody_else(tiers: Tiers) -> None:
    first = read_settings(config_of(tiers, engine_id="a_dp0"))
    second = read_settings(config_of(tiers, engine_id="a_dp1"))
    other = read_settings(config_of(tiers, engine_id="b_dp0"))
    assert first.socket == second.socket != other.socket
    assert first.engine != second.engine
    assert first.private
    assert len(first.engine) == 16


# ------------------------------------------------------------------ what is refused


def refused(config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_settings(config)
    assert caught.value.next_step
    return caught.value


def test_a_failed_load_must_not_fail_its_request(tiers: Tiers) -> None:
    error = refused(config_of(tiers, policy="fail"))
    assert '"kv_load_failure_policy":"recompute"' in error.next_step


def test_running_ahead_of_a_load_is_refused(tiers: Tiers) -> None:
    """Asked for by name; what the engine cannot do by itself is left out."""
    assert read_settings(config_of(tiers, layerwise="auto"))
    error = refused(config_of(tiers, layerwise="on"))
    assert "connector.layerwise" in error.next_step


@pytest.mark.parametrize("sizes", [{"dcp": 2}, {"pcp": 2}])
def test_context_parallelism_is_refused(tiers: Tiers, sizes: dict[str, Any]) -> None:
    error = refused(config_of(tiers, **sizes))
    assert "context-parallel sizes" in error.next_step


def test_scales_from_the_first_requests_are_refused(tiers: Tiers) -> None:
    error = refused(config_of(tiers, cache={"calculate_kv_scales": True}))
    assert "--calculate-kv-scales" in error.next_step


def test_p86_an_unknown_key_names_the_nearest(tiers: Tiers) -> None:
    error = refused(config_of(tiers, store="lazy"))
    assert "stores" in str(error)


@pytest.mark.parametrize(
    ("version", "works"),
    [
        (f"{VLLM_FIRST[0]}.{VLLM_FIRST[1]}.0", True),
        (f"{VLLM_BELOW[0]}.{VLLM_BELOW[1] - 1}.7+cpu", True),
        (f"{VLLM_FIRST[0]}.{VLLM_FIRST[1] - 1}.9", False),
        (f"{VLLM_BELOW[0]}.{VLLM_BELOW[1]}.0rc1", False),
        ("0.5.3", False),
        ("dev", False),
    ],
)
def test_p86_only_tested_versions_start(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, version: str, works: bool
) -> None:
    monkeypatch.setattr(settings, "version", lambda _: version)
    if works:
        read_settings(config_of(tiers))
    else:
        error = refused(config_of(tiers))
        assert version in str(error)
        assert "newer ebbtide" in error.next_step


def test_a_socket_directory_open_to_others_is_refused(tiers: Tiers, tmp_path: Path) -> None:
    import os

    read_settings(config_of(tiers))
    directory = tmp_path / f"ebbtide-{os.getuid()}"
    directory.chmod(0o755)
    assert "Remove it" in refused(config_of(tiers)).next_step
    directory.rmdir()
    directory.symlink_to(tmp_path)
    assert "Remove it" in refused(config_of(tiers)).next_step


def test_a_socket_directory_that_cannot_be_made_is_refused(tiers: Tiers, tmp_path: Path) -> None:
    import os

    (tmp_path / f"ebbtide-{os.getuid()}").write_text("in the way")
    assert "socket" in refused(config_of(tiers)).next_step
