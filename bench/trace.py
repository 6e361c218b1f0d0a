"""Request traces as files, read a chunk at a time: kvtrace-1 and Mooncake's JSON lines.

Facts this module relies on. kvtrace-1: the first line is a header object with `format`; every
other line is a request with `t` (milliseconds) and `b`, its prefix-block ids run-length coded as
`[start, count, start, count, ...]`. Mooncake: every line is a request with `timestamp`
(milliseconds) and `hash_ids`. In both an id names a block and everything before it, so that an id
cannot come twice in one request. Both may be gzip'd, in one member or several.
"""

from __future__ import annotations

import zlib
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn, TypeVar

import aiofiles
import msgspec

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

CHUNK_BYTES = 64 << 10  # one read, and the most that one step of inflating yields
LINE_BYTES_MAX = 16 << 20
BLOCKS_MAX = 65_536  # of one request: what one message to the store may name
GZIP_MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31  # zlib's code for "a gzip member"

T = TypeVar("T")
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Format(StrEnum):
    """The formats that are read. Told apart by the first line, never by the file's name."""

    KVTRACE = "kvtrace-1"
    MOONCAKE = "mooncake"


class Request(NamedTuple):
    """One request: its arrival and its chain of blocks, first block first."""

    at_ms: float
    block_ids: list[int]


class TraceHeader(NamedTuple):
    """What a trace says of itself. `relative`: times count from the start of each session."""

    format: Format
    name: str
    requests: int | None
    relative: bool


class _FirstLine(msgspec.Struct):
    format: str | None = None
    name: str = ""
    requests: int | None = None
    time: str = ""
    timestamp: float | None = None
    hash_ids: list[BlockId] | None = None


class _KvRow(msgspec.Struct):
    t: float
    b: list[BlockId]


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    hash_ids: list[BlockId]


class _BadLineError(Exception):
    """What is wrong with a line; the reader adds which one."""


class _Row(NamedTuple):
    """A request whose ids are still run-length coded: some traces have 1,850 ids a request."""

    at_ms: float
    runs: list[int]


async def read_header(path: str) -> TraceHeader:
    """Read what the first line says. Raises ConfigError for what is no trace."""
    async with aclosing(_lines(path)) as lines:
        async for number, line in lines:
            return _header(path, number, line)
    raise _empty(path)


async def read_requests(path: str, limit: int | None = None) -> AsyncGenerator[Request, None]:
    """Yield the requests in the order in which they are replayed, at most `limit`.

    That is the file's order, except for session-relative traces: those are ordered by their time,
    as if all sessions had started together, and are held in memory, run-length coded, until the
    last line has been read. Raises ConfigError with file and line for everything malformed, and
    when there are more or fewer requests than the header says.
    """
    header: TraceHeader | None = None
    held: list[_Row] = []
    count = 0
    async with aclosing(_lines(path)) as lines:
        async for number, line in lines:
            if header is None:
                header = _header(path, number, line)
                if header.format is Format.KVTRACE:
                    continue
            if count == limit and not header.relative:
                return
            count += 1
            row = _parsed(_PARSERS[header.format], path, number, line)
            if header.relative:
                held.append(row)
            else:
                yield Request(row.at_ms, expand(row.runs))
    if header is None:
        raise _empty(path)
    if header.requests is not None and header.requests != count:
        raise ConfigError(
            f"The trace has {count} requests, and its header says {header.requests}",
            next_step="Get the file again: it was cut or changed.",
            file=path,
        )
    held.sort(key=lambda row: row.at_ms)  # stable: requests of one moment keep the file's order
    for row in held[:limit]:
        yield Request(row.at_ms, expand(row.runs))


def expand(runs: list[int]) -> list[int]:
    """Block ids from their run-length code."""
    ids: list[int] = []
    for start, count in zip(runs[::2], runs[1::2], strict=True):
        ids.extend(range(start, start + count))
    return ids


# -- one line -------------------------------------------------------------------------------------


def _header(path: str, number: int, line: bytes) -> TraceHeader:
    first = _parsed(_FIRST.decode, path, number, line)
    if first.timestamp is not None and first.hash_ids is not None:
        return TraceHeader(Format.MOONCAKE, Path(path).name.partition(".")[0], None, False)
    if first.format != Format.KVTRACE:
        raise ConfigError(
            "The first line is neither a kvtrace-1 header nor a Mooncake request",
            next_step='Give a file with "format": "kvtrace-1", or with `timestamp` and `hash_ids`.',
            file=path,
            line=number,
        )
    return TraceHeader(
        Format.KVTRACE, first.name, first.requests, first.time.startswith("relative")
    )


def _kvtrace_row(line: bytes) -> _Row:
    row = _KVTRACE.decode(line)
    if len(row.b) % 2:
        raise _BadLineError("`b` is not a list of pairs of start and count")
    _check_count(sum(row.b[1::2]))
    runs = sorted(zip(row.b[::2], row.b[1::2], strict=True))
    end = -1
    for start, count in runs:
        if start < end:
            raise _BadLineError(f"block {start} comes twice")
        end = start + count
    return _Row(row.t, row.b)


def _mooncake_row(line: bytes) -> _Row:
    row = _MOONCAKE.decode(line)
    _check_count(len(row.hash_ids))
    if len(set(row.hash_ids)) != len(row.hash_ids):
        raise _BadLineError("a block comes twice: ids must name a block and all blocks before it")
    runs = [1] * (2 * len(row.hash_ids))
    runs[::2] = row.hash_ids
    return _Row(row.timestamp, runs)


def _check_count(blocks: int) -> None:
    if blocks > BLOCKS_MAX:
        raise _BadLineError(f"{blocks} blocks in one request, and {BLOCKS_MAX} are allowed")


_FIRST = msgspec.json.Decoder(_FirstLine)
_KVTRACE = msgspec.json.Decoder(_KvRow)
_MOONCAKE = msgspec.json.Decoder(_MooncakeRow)
_PARSERS: dict[Format, Callable[[bytes], _Row]] = {
    Format.KVTRACE: _kvtrace_row,
    Format.MOONCAKE: _mooncake_row,
}


def _parsed(parse: Callable[[bytes], T], path: str, number: int, line: bytes) -> T:
    try:
        return parse(line)
    except (msgspec.DecodeError, UnicodeDecodeError, _BadLineError) as error:
        _malformed(path, number, error)


def _malformed(path: str, number: int, error: object) -> NoReturn:
    raise ConfigError(
        f"A line of the trace is malformed: {error}",
        next_step="Correct or remove that line, or get the file again.",
        file=path,
        line=number,
    )


def _empty(path: str) -> ConfigError:
    return ConfigError("The trace is empty", next_step="Get the file again.", file=path)


# -- lines out of a file --------------------------------------------------------------------------


async def _lines(path: str) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the lines that are not blank, with their numbers from 1 on."""
    number = 0
    rest = b""
    try:
        async with aclosing(_pieces(path)) as pieces:
            async for piece in pieces:
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    number += 1
                    if line.strip():
                        yield number, line
                if len(rest) > LINE_BYTES_MAX:
                    _malformed(path, number + 1, f"it has more than {LINE_BYTES_MAX} bytes")
    except OSError as error:
        raise ConfigError(
            f"The trace cannot be read: {error.strerror}",
            next_step="Check the path and its permissions.",
            file=path,
        ) from error
    except (zlib.error, EOFError) as error:
        _malformed(path, number + 1, f"the compressed data is damaged ({error})")
    if rest.strip():
        yield number + 1, rest


async def _pieces(path: str) -> AsyncGenerator[bytes, None]:
    """Yield the file's bytes, inflated when they start as gzip does."""
    async with aiofiles.open(path, "rb") as file:
        chunk = await file.read(len(GZIP_MAGIC))
        inflater = _Inflater() if chunk == GZIP_MAGIC else None
        while chunk:
            if inflater is None:
                yield chunk
            else:
                for piece in inflater.feed(chunk):
                    yield piece
            chunk = await file.read(CHUNK_BYTES)
    if inflater is not None and not inflater.between_members:
        raise EOFError("it ends in the middle")


class _Inflater:
    """Gzip members one behind the other, fed in chunks. Zeros between and behind them are skipped,
    as gzip does."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(GZIP_WINDOW)
        self.between_members = True

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """What the chunk inflates to, in bounded pieces. Raises zlib.error for damaged data."""
        pending = chunk
        while True:
            if self.between_members:
                pending = pending.lstrip(b"\0")
                if not pending:
                    return
                self._member = zlib.decompressobj(GZIP_WINDOW)
            yield self._member.decompress(pending, CHUNK_BYTES)
            self.between_members = self._member.eof
            pending = self._member.unused_data or self._member.unconsumed_tail
            if not pending:  # output that is left comes with the next chunk: the trailer at last
                return
