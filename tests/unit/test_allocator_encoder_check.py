"""The self-test of the encoder: what it lets pass, what it refuses, when it runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import pytest

from ebbtide.allocator import cbor, check_encoder, encoder_check, hash_blocks, none_hash
from ebbtide.errors import ConfigError

HONEST = cbor2.dumps


def changed(change: Callable[[bytes], bytes]) -> Callable[..., bytes]:
    return lambda item, **options: change(HONEST(item, **options))


def option(**more: Any) -> Callable[..., bytes]:
    return lambda item, **options: HONEST(item, **{**options, **more})


def only(value: object, found: bytes) -> Callable[..., bytes]:
    def dumps(item: object, **options: Any) -> bytes:
        return found if type(item) is type(value) and item == value else HONEST(item, **options)

    return dumps


def fails(error: Exception) -> Callable[..., bytes]:
    def dumps(item: object, **options: Any) -> bytes:
        raise error

    return dumps


BROKEN = {
    "bytes past 4096 are lost": changed(
        lambda raw: raw[:4096] + raw[:-4096] if len(raw) > 8192 else raw
    ),
    "ints in a longer form": only(23, b"\x18\x17"),
    "ints of 64 bits": only(2**63 - 1, b"\xfb" + bytes(8)),
    "negative ints": only(-25, b"\x38\x19"),
    "heads of long texts": changed(lambda raw: raw.replace(b"\x79\x01\x00", b"\x7a\0\0\x01\0")),
    "heads of long tuples": changed(lambda raw: raw.replace(b"\x99\x01\0", b"\x9a\0\0\x01\0")),
    "heads of four bytes": changed(
        lambda raw: raw.replace(b"\x9a\0\1\0\0", b"\x9b\0\0\0\0\0\1\0\0")
    ),
    "heads of long bytes": changed(
        lambda raw: raw.replace(b"\x5a\0\1\0\0", b"\x5b\0\0\0\0\0\1\0\0")
    ),
    "None": only(None, b"\xf7"),
    "an empty tuple": only((), b"\xf6"),
    "lists of unknown length": lambda item, **options: (
        b"\x9f\x01\x81\x02\xff" if item == [1, (2,)] else HONEST(item, **options)
    ),
    "values are shared": option(value_sharing=True),
    "strings are referred to": option(string_referencing=True),
    "another signature": fails(TypeError("dumps() got an unexpected keyword argument")),
    "an error": fails(cbor2.CBOREncodeError("no")),
}


def test_p06_self_test_passes_here() -> None:
    check_encoder()


@pytest.mark.parametrize("broken", BROKEN)
def test_p06_self_test_refuses_another_encoder(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(cbor2, "dumps", BROKEN[broken])
    with pytest.raises(ConfigError, match="hash self-test failed") as caught:
        check_encoder()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("part", ["as_words", "encode_runs", "head"])
def test_p06_self_test_refuses_a_broken_fast_path(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    broken: dict[str, Any] = {
        "as_words": lambda tokens: None,
        "encode_runs": lambda words, run: (b"", []),
        "head": lambda major, length: b"",
    }
    monkeypatch.setattr(cbor, part, broken[part])
    with pytest.raises(ConfigError, match="hash self-test failed"):
        check_encoder()


def test_it_runs_before_the_first_name_until_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(encoder_check, "check_encoder", lambda: runs.append(1))
    encoder_check.check_encoder_once.cache_clear()
    none_hash("sha256")
    hash_blocks(range(4), 2, algorithm="xxhash")
    assert runs == []  # nothing of CBOR yet
    hash_blocks(range(4), 2, root=bytes(32))
    none_hash("xxhash_cbor", "s")
    assert runs == [1]
    encoder_check.check_encoder_once.cache_clear()


DOCTORED = """
import importlib, sys
before, me = sys.path[:], sys.modules.pop(__name__)
sys.path[:] = [place for place in before if place != DIRECTORY]
real = importlib.import_module(__name__)
sys.path[:], sys.modules[__name__] = before, me
globals().update({name: value for name, value in vars(real).items() if name[:2] != "__"})
def dumps(item, **options):
    return real.dumps(item, **{**options, "value_sharing": True})
"""

START = """
import cbor2
from ebbtide.allocator import hash_blocks, none_hash
from ebbtide.errors import ConfigError
assert hasattr(cbor2, "DIRECTORY")
print(len(none_hash("sha256")))
for begin in (none_hash, none_hash, lambda: hash_blocks(range(16), 16, root=bytes(32))):
    try:
        begin()
    except ConfigError as error:
        print(str(error)[:21])
"""


def test_p06_a_process_with_another_cbor2_names_no_block(tmp_path: Path) -> None:
    path = str(tmp_path)
    (tmp_path / "cbor2.py").write_text(f"DIRECTORY = {path!r}\n{DOCTORED}")
    search = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["32", *["hash self-test failed"] * 3]
