"""Reading traces: both formats, compressed or not, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from ebbtide.bench import trace
from ebbtide.bench.trace import Format, Request, read_header, read_requests
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HEADER = {"format": "kvtrace-1", "name": "small", "block_size": 64}
KV_ROWS = [
    {"t": 0, "i": 900, "o": 3, "b": [0, 3]},
    {"t": 5, "i": 900, "o": 3, "b": [0, 2, 7, 2], "s": 1},
    {"t": 9.5, "i": 0, "o": 0, "b": []},
]
MOONCAKE_ROWS = [
    {"timestamp": 0, "input_length": 900, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 5, "input_length": 900, "output_length": 3, "hash_ids": [0, 1, 7, 8]},
    {"timestamp": 9.5, "input_length": 0, "output_length": 0, "hash_ids": []},
]
EXPECTED = [Request(0, [0, 1, 2]), Request(5, [0, 1, 7, 8]), Request(9.5, [])]


def lines(*rows: object) -> bytes:
    """Return rows as JSON lines; text is taken as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return "".join(text + "\n" for text in texts).encode()


def written(path: Path, data: bytes) -> str:
    """Return the name of a file with `data`."""
    path.write_bytes(data)
    return str(path)


async def requests_of(path: str, limit: int | None = None) -> list[Request]:
    """Return all requests of a trace."""
    return [request async for request in read_requests(path, limit)]


FILES = {
    "kvtrace": lines(HEADER, *KV_ROWS),
    "kvtrace gz": gzip.compress(lines(HEADER, *KV_ROWS)),
    "mooncake": lines(*MOONCAKE_ROWS),
    "mooncake gz": gzip.compress(lines(*MOONCAKE_ROWS)),
    "blank lines": lines("", *MOONCAKE_ROWS[:1], "  ", *MOONCAKE_ROWS[1:], ""),
    "no last newline": lines(*MOONCAKE_ROWS).rstrip(b"\n"),
    "two members": gzip.compress(lines(HEADER)) + gzip.compress(lines(*KV_ROWS)),
    "padded gz": gzip.compress(lines(*MOONCAKE_ROWS)) + bytes(512),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES.keys())
@pytest.mark.parametrize("chunk_bytes", [1, 7, trace.CHUNK_BYTES])
async def test_both_formats_are_read_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, chunk_bytes: int
) -> None:
    monkeypatch.setattr(trace, "CHUNK_BYTES", chunk_bytes)
    assert await requests_of(written(tmp_path / "any.name", data)) == EXPECTED


async def test_the_header_says_what_a_trace_is(tmp_path: Path) -> None:
    kvtrace = written(tmp_path / "a.gz", gzip.compress(lines({**HEADER, "requests": 3}, *KV_ROWS)))
    assert await read_header(kvtrace) == (Format.KVTRACE, "small", 3, False)
    mooncake = written(tmp_path / "conversation.jsonl.gz", gzip.compress(lines(*MOONCAKE_ROWS)))
    assert await read_header(mooncake) == (Format.MOONCAKE, "conversation", None, False)


async def test_session_relative_times_order_the_requests(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"t": 0, "s": 0, "b": [0, 1]},
        {"t": 90, "s": 0, "b": [0, 2]},
        {"t": 0, "s": 1, "b": [10, 1]},
        {"t": 40, "s": 1, "b": [10, 2]},
    ]
    header = {**HEADER, "time": "relative to each session's start", "requests": 4}
    path = written(tmp_path / "t", lines(header, *rows))
    in_order = [[0], [10], [10, 11], [0, 1]]
    assert [request.block_ids for request in await requests_of(path)] == in_order
    # A limit counts what is replayed, not what lies first in the file.
    assert [request.block_ids for request in await requests_of(path, 3)] == in_order[:3]


async def test_a_limit_ends_the_reading(tmp_path: Path) -> None:
    broken_later = lines(HEADER, *KV_ROWS[:2], "{")
    path = written(tmp_path / "t", broken_later)
    assert await requests_of(path, 2) == EXPECTED[:2]
    with pytest.raises(ConfigError):
        await requests_of(path, 3)


MALFORMED: dict[str, tuple[Sequence[object], int, str]] = {
    "no JSON": ([HEADER, KV_ROWS[0], '{"t": 1, "b": ['], 3, "malformed"),
    "no object": ([HEADER, "[1]"], 2, "malformed"),
    "not UTF-8": (['{"format": "\udcff"}'], 1, "malformed"),
    "no time": ([HEADER, {"b": [0, 1]}], 2, "`t`"),
    "no blocks": ([HEADER, {"t": 1}], 2, "`b`"),
    "odd runs": ([HEADER, {"t": 1, "b": [0, 1, 2]}], 2, "pairs"),
    "negative id": ([HEADER, {"t": 1, "b": [-1, 1]}], 2, ">= 0"),
    "huge id": ([HEADER, {"t": 1, "b": [2**63, 1]}], 2, "malformed"),
    "text as id": ([HEADER, {"t": 1, "b": ["0", 1]}], 2, "Expected `int`"),
    "endless run": ([HEADER, {"t": 1, "b": [0, 10**15]}], 2, "are allowed"),
    "overlapping runs": ([HEADER, {"t": 1, "b": [5, 3, 0, 6]}], 2, "twice"),
    "other format": ([{"format": "kvtrace-9"}], 1, "neither"),
    "first line": (["{"], 1, "malformed"),
    "no trace": ([{"hello": 1}], 1, "neither"),
    "mooncake twice": ([MOONCAKE_ROWS[0], {"timestamp": 1, "hash_ids": [3, 3]}], 2, "twice"),
    "mooncake cut": ([MOONCAKE_ROWS[0], '{"timestamp": 1, "hash_'], 2, "malformed"),
    "mixed": ([MOONCAKE_ROWS[0], KV_ROWS[0]], 2, "`timestamp`"),
}


@pytest.mark.parametrize(("rows", "line", "words"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_line_is_named(
    tmp_path: Path, rows: Sequence[object], line: int, words: str
) -> None:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    data = "\n".join(texts).encode("utf-8", "surrogateescape")
    path = written(tmp_path / "t", data)
    with pytest.raises(ConfigError, match=words) as raised:
        await requests_of(path)
    assert raised.value.context == {"file": path, "line": line}
    assert path in str(raised.value)


async def test_damaged_compression_is_named(tmp_path: Path) -> None:
    rows = [{**MOONCAKE_ROWS[0], "timestamp": number} for number in range(400)]
    whole = gzip.compress(lines(*rows))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10
    for name, data in {"cut": whole[:-9], "flipped": bytes(flipped)}.items():
        path = written(tmp_path / name, data)
        with pytest.raises(ConfigError, match="compressed data is damaged") as raised:
            await requests_of(path)
        assert raised.value.context["file"] == path


@pytest.mark.parametrize("data", [b"", b"\n \n", gzip.compress(b"")])
async def test_an_empty_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path / "t", data)
    for read in (requests_of, read_header):
        with pytest.raises(ConfigError, match="empty"):
            await read(path)


async def test_a_trace_that_was_cut_between_lines_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t", lines({**HEADER, "requests": 4}, *KV_ROWS))
    with pytest.raises(ConfigError, match="has 3 requests, and its header says 4"):
        await requests_of(path)
    assert len(await requests_of(path, 2)) == 2


async def test_a_line_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CHUNK_BYTES", 64)
    monkeypatch.setattr(trace, "LINE_BYTES_MAX", 1000)
    path = written(tmp_path / "t", lines(HEADER) + b" " * 5000)
    with pytest.raises(ConfigError, match="more than 1000 bytes") as raised:
        await requests_of(path)
    assert raised.value.context["line"] == 2


async def test_what_inflates_enormously_is_inflated_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    class Watched(trace._Inflater):
        def feed(self, chunk: bytes) -> Iterator[bytes]:
            for piece in super().feed(chunk):
                sizes.append(len(piece))
                yield piece

    monkeypatch.setattr(trace, "_Inflater", Watched)
    monkeypatch.setattr(trace, "LINE_BYTES_MAX", 1 << 20)
    bomb = gzip.compress(lines(HEADER) + b" " * (32 << 20))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        await requests_of(written(tmp_path / "t", bomb))
    assert max(sizes) <= trace.CHUNK_BYTES
    assert sum(sizes) < 2 << 20


@pytest.mark.parametrize("name", ["absent", "."])
async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        await requests_of(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "requests", "blocks"),
    [("mooncake_conversation", 12_031, 288_500), ("ragpulse", 7_106, 329_439)],
)
async def test_recorded_traces_have_what_their_readme_says(
    traces_dir: Path, name: str, requests: int, blocks: int
) -> None:
    path = str(traces_dir / f"{name}.kvtrace.jsonl.gz")
    assert (await read_header(path)).requests == requests
    assert sum([len(request.block_ids) async for request in read_requests(path)]) == blocks
