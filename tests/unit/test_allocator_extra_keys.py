"""What names a block apart from its tokens: extra keys, and the salt that nobody may see."""

import ast
import hashlib
import logging
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide import allocator
from ebbtide.allocator import (
    LoraAdapter,
    MultiModalItem,
    Request,
    block_extra_keys,
    check_cache_salt,
    embeds_token_ids,
    hash_blocks,
)
from ebbtide.errors import EbbtideError, MisuseError

pytestmark = pytest.mark.usefixtures("both_paths")

quick = settings(max_examples=60, deadline=None, derandomize=True)


def overlapping(items: list[MultiModalItem], start: int, end: int) -> list[tuple[str, str, int]]:
    return [
        ("mm", i.identifier, i.offset - start)
        for i in items
        if i.offset < end and i.offset + i.length > start
    ]


@quick
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=6),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_images_are_in_every_block_they_overlap(
    gaps: list[tuple[int, int]], block_size: int, first: int
) -> None:
    items, position = [], 0
    for number, (gap, length) in enumerate(gaps):
        items.append(MultiModalItem(f"image{number}", position + gap, length))
        position += gap + length
    found = block_extra_keys(first, first + 12, block_size, mm_items=items)
    for block, keys in enumerate(found, first):
        start = block * block_size
        assert list(keys or ()) == overlapping(items, start, start + block_size)


def test_extra_keys_stand_in_their_order() -> None:
    embeds = np.arange(8, dtype=np.float32).reshape(8, 1)
    first, second = block_extra_keys(
        0, 2, 4,
        lora=LoraAdapter("n", "/p"),
        mm_items=[MultiModalItem("i", 3, 2)],
        cache_salt="s",
        prompt_embeds=embeds,
    )  # fmt: skip
    digests = [hashlib.sha256(embeds[a : a + 4].tobytes()).digest() for a in (0, 4)]
    lora = ("lora", "n", "/p")
    assert first == (lora, ("mm", "i", 3), ("cache_salt", "s"), ("prompt_embeds", digests[0]))
    assert second == (lora, ("mm", "i", -1), ("prompt_embeds", digests[1]))
    assert block_extra_keys(1, 2, 4, cache_salt="s") == [None]
    assert block_extra_keys(0, 1, 4, cache_salt="") == [None]


def test_p11_images_that_differ_anywhere_or_stand_elsewhere_never_share() -> None:
    tail = "beef"
    prompt = [9] * 128  # placeholders all carry one token id
    names = {}
    for label, items in {
        "one": [MultiModalItem("a" * 60 + tail, 40, 50)],
        "two": [MultiModalItem("b" * 60 + tail, 40, 50)],
        "shifted": [MultiModalItem("a" * 60 + tail, 41, 50)],
        "text": [],
    }.items():
        names[label] = hash_blocks(prompt, 16, mm_items=items)
    for label in ("two", "shifted", "text"):
        same = [a == b for a, b in zip(names["one"], names[label], strict=True)]
        assert same == [True] * 2 + [False] * 6


@pytest.mark.parametrize(
    "extras",
    [
        {"cache_salt": b"bytes"},
        {"lora": LoraAdapter("name", 7)},  # type: ignore[arg-type]
        {"mm_items": [MultiModalItem(12, 0, 4)]},  # type: ignore[arg-type]
        {"mm_items": [MultiModalItem("i", 0.0, 4)]},  # type: ignore[arg-type]
        {"cache_salt": "\ud800"},  # a lone surrogate, which JSON lets through
    ],
)
def test_extras_that_cannot_be_named_are_rejected(extras: dict[str, Any]) -> None:
    with pytest.raises(MisuseError):
        hash_blocks(range(8), 4, **extras)


def test_embeds_are_hashed_under_zeros_where_no_token_id_stands() -> None:
    assert embeds_token_ids(3) == [0, 0, 0]
    assert embeds_token_ids(3, [7, 8, 9]) == [7, 8, 9]
    assert embeds_token_ids(3, [7, 8, 9], [True, False, True]) == [7, 0, 9]
    for ids, mask in (([7, 8], None), ([7, 8, 9], [True])):
        with pytest.raises(MisuseError, match="differ in length"):
            embeds_token_ids(3, ids, mask)


# ------------------------------------------------------------------------------ salts

SECRET = "hunter2-and-more"


@pytest.mark.parametrize("salt", ["a", "x" * 128, "tenant-7", "s\xe5lt", "a b", "\U0001f30a" * 128])
def test_salts_that_a_request_may_have(salt: str) -> None:
    assert check_cache_salt(salt) == salt


@pytest.mark.parametrize(
    "salt",
    ["", SECRET + "x" * 113, *(SECRET + char for char in "@/\\\0\ud800\udfff"), SECRET.encode(), 7],
)
def test_salts_that_a_request_may_not_have(salt: Any) -> None:
    with pytest.raises(MisuseError) as caught:
        check_cache_salt(salt)
    assert "hunter2" not in str(caught.value) + repr(caught.value.context)


def test_blocks_are_named_under_any_text_as_vllms_engine_does() -> None:
    for salt in ("x" * 256, "a@b/c", "\0"):
        assert hash_blocks(range(8), 4, cache_salt=salt) != hash_blocks(range(8), 4)


def failures() -> Iterator[Callable[[], object]]:
    """Calls that fail while they have the salt at hand."""
    tokens = list(range(8))
    salted: dict[str, Any] = {"cache_salt": SECRET}
    wrong: Any = [True] * 8
    number: Any = 7
    lora = LoraAdapter("name", number)
    for arguments in (
        {"token_ids": wrong, "block_size": 4, **salted},
        {"token_ids": tokens, "block_size": 0, **salted},
        {"token_ids": tokens, "block_size": 4, "root": bytes(3), **salted},
        {"token_ids": tokens, "block_size": 4, "algorithm": "md5", **salted},
        {"token_ids": tokens, "block_size": 4, "known": [bytes(32)] * 3, **salted},
        {"token_ids": tokens, "block_size": 4, "lora": lora, **salted},
        {"token_ids": tokens, "block_size": 4, "cache_salt": SECRET.encode()},
        {"token_ids": tokens, "block_size": 4, "cache_salt": SECRET + "\ud800"},
        {"token_ids": tokens * 20, "block_size": 4, "cache_salt": SECRET + "\ud800"},
        {"token_ids": tokens, "block_size": 4, "cache_salt": [SECRET]},
    ):
        yield partial(hash_blocks, **arguments)
    for salt in (SECRET + "@", SECRET * 20, SECRET + "\udfff", SECRET.encode()):
        yield partial(check_cache_salt, salt)
    yield lambda: Request("r", tokens, hash_block_size=4, cache_salt=SECRET + "\ud800")
    yield lambda: Request("r", tokens, hash_block_size=4, cache_salt=SECRET).append_output(wrong)


def chained(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that hang on it, shown in a traceback or not."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_no_error_and_no_log_line_shows_a_salt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for fail in failures():
        with pytest.raises(EbbtideError) as caught:
            fail()
        for error in chained(caught.value):
            seen = [str(error), repr(error), repr(error.args), repr(vars(error))]
            # Not in a field either: UnicodeEncodeError.object is the whole text.
            seen += [repr(getattr(error, name)) for name in dir(error) if not name.startswith("_")]
            assert "hunter2" not in " ".join(seen), type(error)
        shown = "".join(traceback.format_exception_only(caught.value))
        assert "hunter2" not in shown
    assert "hunter2" not in caplog.text


def test_nothing_that_holds_a_salt_shows_it() -> None:
    request = Request("r", list(range(8)), hash_block_size=4, cache_salt=SECRET)
    assert "hunter2" not in repr(request) + str(request) + f"{request}"


def shows(node: ast.expr) -> bool:
    """Whether this is a log line, an error, or a text made of values."""
    if isinstance(node, ast.JoinedStr):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return "logger" in called or called.endswith("Error") or called in ("print", "repr", "str")


def names_in(node: ast.AST) -> Iterator[str]:
    """All names in it, but those of which it takes the type or the length alone."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "len"):
        return
    if isinstance(node, ast.Name | ast.Attribute):
        yield node.id if isinstance(node, ast.Name) else node.attr
    for inner in ast.iter_child_nodes(node):
        yield from names_in(inner)


def shown_salts(text: str) -> list[int]:
    """The lines that show a name with "salt" in it. A constant in capitals is not the salt."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    shown = [node for node in found if shows(node)]
    return [node.lineno for node in shown if any("salt" in name for name in names_in(node))]


def test_no_line_of_the_allocator_shows_a_salt() -> None:
    sources = sorted(Path(allocator.__file__).parent.glob("*.py"))
    assert len(sources) > 10
    assert {p.name: lines for p in sources if (lines := shown_salts(p.read_text()))} == {}


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("logger.info('%s', cache_salt)", True),
        ("logger.info('%s', request.cache_salt)", True),
        ("raise MisuseError('x', salt=cache_salt)", True),
        ("text = f'{self._salt!r}'", True),
        ("raise MisuseError('x', type=type(cache_salt).__name__, length=len(cache_salt))", False),
        ("raise MisuseError(f'{SALT_MAX}')", False),
        ("hash_blocks(tokens, cache_salt=cache_salt)", False),
    ],
)
def test_the_guard_sees_a_shown_salt(code: str, seen: bool) -> None:
    assert bool(shown_salts(code)) is seen
