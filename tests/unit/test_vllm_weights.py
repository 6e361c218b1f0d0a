"""What the digest of weights is made of, and what it must not depend on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.model_directory import (
    count_reads,
    digest_of,
    make_model,
    names,
    never,
    remember_young_files,
    settled,
)

from ebbtide.connectors.vllm import weights
from ebbtide.connectors.vllm.digest_cache import DigestCache
from ebbtide.connectors.vllm.weights import (
    WeightsError,
    WeightsIdentity,
    weights_digest,
    weights_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def young_files_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_young_files(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "weights.json")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return count_reads(monkeypatch)


def identity_of(directory: Path | None) -> str | None:
    return settled(WeightsIdentity(directory, DigestCache(None))).poll()


# Which files count


def test_weights_configs_indexes_and_code_count_and_nothing_else(tmp_path: Path) -> None:
    deciding = [
        "a.safetensors", "b.bin", "c.pt", "d.pth", "e.gguf", "model.safetensors.index.json",
        "config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json",
        "quantization_config.json", "preprocessor_config.json", "params.json", "modeling_own.py",
    ]  # fmt: skip
    others = [
        "README.md", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin.index.json",
        "optimizer.pt", "training_args.bin", "trainer_state.json", ".hidden.safetensors",
    ]  # fmt: skip
    for name in deciding + others:
        (tmp_path / name).touch()
    (tmp_path / "folder.bin").mkdir()
    assert names(tmp_path) == sorted(deciding)


def test_subdirectories_count_hidden_ones_do_not(model: Path) -> None:
    before = digest_of(model)
    for folder in (".git", ".cache", "lost+found"):
        (model / folder).mkdir()
        (model / folder / "x.bin").touch()
    assert digest_of(model) == before
    (model / "encoder").mkdir()
    (model / "encoder" / "model.safetensors").write_bytes(b"encoder")
    assert "encoder/model.safetensors" in names(model)
    assert digest_of(model) != before


def test_a_link_back_up_ends(model: Path) -> None:
    before = names(model)
    (model / "loop").symlink_to(model)
    assert names(model) == before


def test_a_tree_that_is_no_model_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "TREE_ENTRIES_MAX", 2)
    with pytest.raises(WeightsError, match="too many files"):
        weights_files(model)


def test_a_single_gguf_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    assert weights_files(path) == [path]
    before = digest_of(path)
    path.write_bytes(b"two")
    assert digest_of(path) != before


def test_one_part_of_a_split_gguf_stands_for_all(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"part")
    assert weights_files(parts[0]) == parts
    parts[1].unlink()
    with pytest.raises(WeightsError, match="cannot be read"):
        digest_of(parts[0])


# P16: content and nothing but content


def test_p16_other_bytes_of_the_same_size_are_another_identity(
    model: Path, cache: DigestCache
) -> None:
    before = digest_of(model, cache)
    path = model / "model-00002-of-00002.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=times)  # as a copy that keeps times does
    assert digest_of(model, cache) != before


def test_p16_another_config_value_is_another_identity(model: Path, cache: DigestCache) -> None:
    before = digest_of(model, cache)
    (model / "config.json").write_text('{"rope_theta": 50000.0}')
    assert digest_of(model, cache) != before


def test_p16_a_copy_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "other-name")
    assert digest_of(copy) == digest_of(model)
    assert identity_of(copy) == identity_of(model) == f"sha256/{digest_of(model)}"


def test_p16_links_are_the_same(model: Path, tmp_path: Path) -> None:
    """A link to the directory, and a hub snapshot: a directory of links to blobs."""
    (tmp_path / "link").symlink_to(model)
    assert digest_of(tmp_path / "link") == digest_of(model)
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, path in enumerate(weights_files(model)):
        shutil.copy(path, blobs / f"blob{9 - number}")
        (snapshot / path.name).symlink_to(f"../blobs/blob{9 - number}")
    assert digest_of(snapshot) == digest_of(model)


def test_p16_a_link_that_moves_on_is_another_identity(model: Path, cache: DigestCache) -> None:
    path = model / "model-00001-of-00002.safetensors"
    (model.parent / "old").write_bytes(b"old!")
    (model.parent / "new").write_bytes(b"new!")
    path.unlink()
    path.symlink_to(model.parent / "old")
    before = digest_of(model, cache)
    path.unlink()
    path.symlink_to(model.parent / "new")
    assert digest_of(model, cache) != before


def test_p16_names_belong_to_the_identity(model: Path) -> None:
    before = digest_of(model)
    first, second = sorted(model.glob("*.safetensors"))
    first.rename(model / "swap")
    second.rename(first)
    (model / "swap").rename(second)
    swapped = digest_of(model)
    second.rename(model / "model-z.safetensors")  # the order stays
    assert len({before, swapped, digest_of(model)}) == 3


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_p16_unreadable_weights_switch_persistence_off(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).symlink_to(model / "pruned-blob")  # root reads any mode, but not this
    identity = settled(WeightsIdentity(model, DigestCache(None)))
    assert identity.poll() is None
    assert identity.failed is not None
    assert "cannot be read" in identity.failed
    assert name in identity.failed
    assert "weights_revision" in identity.failed


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads any file")
def test_p16_forbidden_weights_switch_persistence_off(model: Path) -> None:
    (model / "config.json").chmod(0)
    assert "Permission denied" in str(settled(WeightsIdentity(model, DigestCache(None))).failed)


def test_p16_remote_weights_switch_persistence_off() -> None:
    identity = WeightsIdentity(None)
    assert identity.poll() is None
    assert identity.failed is not None
    assert "not on this machine" in identity.failed
    assert "weights_revision" in identity.failed
    identity.close()


def test_p16_a_directory_without_weights_has_no_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    failed = settled(WeightsIdentity(tmp_path, DigestCache(None))).failed
    assert "no weight files" in str(failed)


def test_a_directory_that_is_gone_has_no_identity(tmp_path: Path) -> None:
    failed = settled(WeightsIdentity(tmp_path / "gone.gguf", DigestCache(None))).failed
    assert "No such file" in str(failed)


def test_a_pipe_in_the_place_of_weights_hangs_nobody(model: Path) -> None:
    os.mkfifo(model / "pipe.bin")
    assert "no regular file" in str(settled(WeightsIdentity(model, DigestCache(None))).failed)


def test_p08_place_and_time_are_no_content(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(model)
    monkeypatch.setenv("HOSTNAME", "other")
    monkeypatch.chdir(model)
    for path in model.iterdir():
        os.utime(path, ns=(1, 1))
    assert weights_digest(weights_files(Path(".")), DigestCache(None), never) == before


def test_p09_adapters_beside_the_model_change_nothing(model: Path) -> None:
    """Requests name their adapter in every key; a new one must not empty the base model's cache."""
    before = digest_of(model)
    (model / "adapter_model.safetensors").write_bytes(b"version 1")
    (model / "adapter_config.json").write_text("{}")
    assert digest_of(model) == before


# Files that change meanwhile, and cancelling


def changing(times: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rewrite `path` behind each of the first reads of it."""
    real, rounds = weights._content_digest, [0]

    def read(file: Any, size: int, cancelled: Callable[[], bool]) -> tuple[str, int] | None:
        found = real(file, size, cancelled)
        if Path(file.name) == path and rounds[0] < times:
            rounds[0] += 1
            path.write_bytes(b"%06d" % rounds[0] * 1000)
        return found

    monkeypatch.setattr(weights, "_content_digest", read)
    return rounds


def test_a_file_that_changes_while_it_is_read_is_read_again(
    model: Path, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model-00002-of-00002.safetensors"
    rounds = changing(1, path, monkeypatch)
    found = digest_of(model, cache)
    assert rounds == [1]
    monkeypatch.undo()
    assert found == digest_of(model)
    kept = json.loads((tmp_path / "cache" / "weights.json").read_text())["files"]
    assert len(kept) == 3  # the first reading of the changed file is not among them


def test_a_file_that_never_holds_still_has_no_identity(
    model: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model-00002-of-00002.safetensors"
    rounds = changing(1000, path, monkeypatch)
    with pytest.raises(WeightsError, match=r"change while they are read.*model-00002"):
        digest_of(model, cache)
    assert rounds == [weights.HASH_TRIES_MAX]
    assert cache.get(path.stat()) is None


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "config.json"
    counted = weights._content_digest

    def read(file: Any, size: int, cancelled: Callable[[], bool]) -> tuple[str, int] | None:
        found = counted(file, size, cancelled)
        if reads.count("config.json") == 1:
            (model / "new").write_text('{"rope_theta": 77777.0}')
            (model / "new").rename(path)
        return found

    monkeypatch.setattr(weights, "_content_digest", read)
    found = digest_of(model)
    assert reads.count("config.json") >= 2
    monkeypatch.undo()
    assert found == digest_of(model)


def test_a_file_that_grows_is_not_followed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100)
    path = model / "config.json"
    looks = [0]

    def grow() -> bool:
        looks[0] += 1
        with path.open("ab") as file:
            file.write(b" " * 200)
        return looks[0] > 1000

    with pytest.raises(WeightsError, match="change while they are read"):
        weights_digest(weights_files(model), DigestCache(None), grow)


def test_cancelled_between_chunks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100)
    looks = [0]

    def soon() -> bool:
        looks[0] += 1
        return looks[0] > 5

    assert weights_digest(weights_files(model), DigestCache(None), soon) is None
    assert looks == [6]


def test_chunks_do_not_change_the_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(model)
    monkeypatch.setattr(weights, "CHUNK_BYTES", 7)
    assert digest_of(model) == before
