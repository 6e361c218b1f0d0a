"""The algorithms that name blocks: the four built in, and those that users register."""

import hashlib
from typing import Any

import pytest

from ebbtide.allocator import (
    algorithms,
    cbor,
    hash_algorithm,
    hash_blocks,
    none_hash,
    register_algorithm,
    root_seed,
)
from ebbtide.errors import ConfigError, MisuseError

pytestmark = pytest.mark.usefixtures("both_paths")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    monkeypatch.setattr(algorithms, "_ALGORITHMS", dict(algorithms._ALGORITHMS))


def shake(data: bytes) -> Any:
    return hashlib.blake2s(data, person=b"blocks")


SHAKE: dict[str, Any] = {
    "width": 32,
    "serialise": cbor.encode,
    "new": shake,
    "reproducible_root": True,
}


@pytest.mark.parametrize("name", ["builtin", "md5", "", "SHA256"])
def test_unknown_algorithms_are_refused_with_the_choices(name: str) -> None:
    for call in (hash_algorithm, none_hash, lambda n: hash_blocks([1], 1, algorithm=n)):
        with pytest.raises(ConfigError, match="sha256_cbor, sha256, xxhash_cbor, xxhash"):
            call(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("sha256-cbor", "sha256_cbor"), ("sha265", "sha256"), ("xxhash_cobr", "xxhash_cbor")],
)
def test_a_slip_is_answered_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'\\?"):
        hash_algorithm(name)
    with pytest.raises(ConfigError) as caught:
        hash_algorithm("builtin")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("num_blocks", [2, 40])
def test_a_registered_algorithm_names_blocks(num_blocks: int) -> None:
    added = register_algorithm("blake2s_cbor", **SHAKE)
    assert hash_algorithm("blake2s_cbor") is added
    tokens = list(range(4 * num_blocks))
    parent = root = none_hash("blake2s_cbor", "s")
    assert root == shake(cbor.encode("s")).digest()
    for at, name in enumerate(hash_blocks(tokens, 4, algorithm="blake2s_cbor", root=root)):
        run = tuple(tokens[4 * at : 4 * at + 4])
        parent = shake(cbor.encode((parent, run, None))).digest()
        assert name == parent
    with pytest.raises(ConfigError, match="Did you mean 'blake2s_cbor'"):
        hash_algorithm("blake2_cbor")


def test_a_registered_serialiser_gets_the_seed_and_the_blocks() -> None:
    seen: list[object] = []

    def serialise(item: object) -> bytes:
        seen.append(item)
        return repr(item).encode()

    register_algorithm("text", width=32, serialise=serialise, new=shake, reproducible_root=True)
    seen.clear()
    root = none_hash("text", "s")
    names = hash_blocks(range(4), 2, algorithm="text", root=root, cache_salt="pepper")
    assert seen == [
        "s",
        (root, (0, 1), (("cache_salt", "pepper"),)),
        (names[0], (2, 3), None),
    ]


def test_a_root_is_as_reproducible_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    register_algorithm("one", **SHAKE)
    register_algorithm("other", **{**SHAKE, "reproducible_root": False})
    assert root_seed("one") == "vllm-none-hash"
    assert len(root_seed("other")) == 64


@pytest.mark.parametrize("name", ["sha256_cbor", "sha256", "xxhash_cbor", "xxhash", "mine"])
def test_a_name_is_given_once(name: str) -> None:
    register_algorithm("mine", **SHAKE)
    before = hash_algorithm(name)
    with pytest.raises(MisuseError, match="of this name is registered"):
        register_algorithm(name, **SHAKE)
    assert hash_algorithm(name) is before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"width": 20, "new": hashlib.sha1}, "16 or 32 bytes"),
        ({"width": 64, "new": hashlib.sha512}, "16 or 32 bytes"),
        ({"width": True}, "16 or 32 bytes"),
        ({"width": 32.0}, "16 or 32 bytes"),
        ({"width": 16}, "not as wide"),
        ({"width": 32, "new": hashlib.md5}, "not as wide"),
    ],
)
def test_wrong_widths_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        register_algorithm("mine", **{**SHAKE, **wrong})
    with pytest.raises(ConfigError):
        hash_algorithm("mine")


@pytest.mark.parametrize("name", ["", None, 7])
def test_an_algorithm_has_a_name(name: Any) -> None:
    with pytest.raises(MisuseError, match="has a name"):
        register_algorithm(name, **SHAKE)
