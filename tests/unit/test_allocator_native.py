"""The compiled hasher: when it is taken, what it refuses, that both of its SHA-256 are right."""

import hashlib
import logging
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.allocator import cbor, hash_blocks, native, none_hash
from ebbtide.compiled import PURE_VARIABLE
from ebbtide.config import load_config
from ebbtide.errors import ConfigError

NONE = cbor.NONE
pytestmark = pytest.mark.usefixtures("compiled_afresh")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, compiled_hasher: native.Hasher) -> native.Hasher:
    """The hasher of this source, as if it had been installed."""
    module: Any = compiled_hasher
    monkeypatch.setitem(sys.modules, native.MODULE, module)
    return compiled_hasher


class Wrong(ModuleType):
    """Names blocks wrongly where `portable` is as said."""

    def __init__(self, honest: native.Hasher, portable: bool) -> None:
        super().__init__("wrong")
        self.honest, self.portable = honest, portable

    def hash_blocks(self, *args: Any) -> list[bytes] | None:
        names = self.honest.hash_blocks(*args)
        if names and args[-1] is self.portable:
            names[-1] = bytes(32)
        return names


def test_it_is_taken_where_it_is_built(installed: native.Hasher) -> None:
    assert native.hasher() is installed


def test_names_do_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, native.MODULE, None)  # as Python marks what is not there
    assert native.hasher() is None
    assert len(hash_blocks(range(64), 4)) == 16


@pytest.mark.parametrize("portable", [False, True])
def test_a_wrong_one_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    compiled_hasher: native.Hasher,
    portable: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, native.MODULE, Wrong(compiled_hasher, portable))
    assert native.hasher() is None
    assert native.hasher() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert PURE_VARIABLE in caplog.text


@pytest.mark.parametrize(("text", "is_pure"), [("1", True), ("0", False)])
def test_the_variable_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, installed: native.Hasher, text: str, is_pure: bool
) -> None:
    monkeypatch.setenv(PURE_VARIABLE, text)
    assert (native.hasher() is None) is is_pure


@pytest.mark.parametrize("text", ["", "yes", "2"])
def test_other_values_of_the_variable_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(PURE_VARIABLE, text)
    for call in (none_hash, lambda: hash_blocks(range(4), 4, root=bytes(32))):
        with pytest.raises(ConfigError, match="EBBTIDE_PURE is 0 or 1"):
            call()


def test_the_variable_is_no_unknown_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PURE_VARIABLE, "1")
    monkeypatch.setenv("EBBTIDE_MEMORY__CAPACITY", "1MiB")
    assert load_config().config.memory.capacity_bytes == 1 << 20


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.booleans())
def test_its_digests_are_hashlibs_for_all_lengths(
    compiled_hasher: native.Hasher, suffix: bytes, portable: bool
) -> None:
    parent = bytes(range(32))
    for tokens in ([7], [2**63 - 1, -(2**63)], [300] * 30):
        found = compiled_hasher.hash_blocks(tokens, len(tokens), 0, 1, parent, suffix, portable)
        encoded = cbor.encode((parent, tuple(tokens), None))[:-1] + suffix
        assert found == [hashlib.sha256(encoded).digest()]


def test_it_gives_no_verdict_on_what_is_no_int_of_64_bits(compiled_hasher: native.Hasher) -> None:
    wrong: Any
    for wrong in (True, np.int64(1), 1.0, None, "1", 2**63, -(2**63) - 1):
        assert compiled_hasher.hash_blocks([1, wrong], 2, 0, 1, bytes(32), NONE) is None
        assert compiled_hasher.hash_blocks((1, wrong), 2, 0, 1, bytes(32), NONE) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ([1, 2], 2, 0, 2, bytes(32), NONE),
        ([1, 2], 2, 1, 0, bytes(32), NONE),
        ([1, 2], 2, -1, 1, bytes(32), NONE),
        ([1, 2], 0, 0, 1, bytes(32), NONE),
        ([1, 2], -2, 0, 1, bytes(32), NONE),
        ([1, 2], 2**62, 0, 1, bytes(32), NONE),
        ([1, 2], 2, 0, 1, bytes(31), NONE),
        ([1, 2], 2, 0, 1, bytes(32), "x"),
        ([1, 2], 2, 0, 1, bytes(32), [NONE, NONE]),
        ([1, 2], 2, 0, 1, bytes(32), ["x"]),
        (np.array([1, 2], np.int32), 2, 0, 1, bytes(32), NONE),
        (np.array([1, 2], np.uint64), 2, 0, 1, bytes(32), NONE),
        (np.array([[1, 2]], np.int64), 2, 0, 1, bytes(32), NONE),
        (np.arange(4)[::2], 2, 0, 1, bytes(32), NONE),
        (range(2), 2, 0, 1, bytes(32), NONE),
        ([1, 2], 2),
    ],
)
def test_wrong_arguments_are_errors_and_no_crash(
    compiled_hasher: native.Hasher, arguments: Any
) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        compiled_hasher.hash_blocks(*arguments)


def test_no_reference_is_lost_or_kept(compiled_hasher: native.Hasher) -> None:
    tokens = [10**6 + i for i in range(4)]
    array, suffix = np.arange(4), bytes(100)
    before = [sys.getrefcount(x) for x in (tokens, tokens[0], array, suffix)]
    for _ in range(50):
        compiled_hasher.hash_blocks(tokens, 2, 0, 2, bytes(32), suffix)
        compiled_hasher.hash_blocks(array, 2, 0, 2, bytes(32), [suffix, suffix])
        wrong: Any = [*tokens, 1.0]
        compiled_hasher.hash_blocks(wrong, 5, 0, 1, bytes(32), suffix)
        with pytest.raises(ValueError, match="no such blocks"):
            compiled_hasher.hash_blocks(array, 2, 0, 3, bytes(32), suffix)
        del wrong
    assert [sys.getrefcount(x) for x in (tokens, tokens[0], array, suffix)] == before
    names = compiled_hasher.hash_blocks(tokens, 2, 0, 2, bytes(32), suffix)
    assert names is not None
    assert [sys.getrefcount(name) for name in names] == [2 + 1] * 2  # list, loop, argument
