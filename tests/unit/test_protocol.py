"""The wire protocol: what goes in comes out, byte for byte as documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.connectors import protocol as wire
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.sampled_from((20, 36)).flatmap(
    lambda width: st.lists(st.binary(min_size=width, max_size=width), max_size=40).map(tuple)
)
SEQUENCES = st.lists(U64, max_size=40).map(tuple)
VERSIONS = st.tuples(st.integers(0, 99), st.integers(0, 99))
VALUES = st.recursive(
    st.none() | st.booleans() | U64 | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=9,
)
DESCRIPTORS = st.lists(st.tuples(st.text(max_size=9), VALUES).map(list), max_size=9)
REPORTS = st.dictionaries(
    st.text(max_size=9), VALUES | st.floats(allow_nan=False) | st.integers(-(2**64), -1), max_size=9
)


DIGEST = st.binary(min_size=16, max_size=16)


def _rows(*columns: SearchStrategy[Any]) -> SearchStrategy[tuple[tuple[Any, ...], ...]]:
    return st.lists(st.tuples(*columns), max_size=40).map(tuple)


MESSAGES: dict[type[wire.Message], SearchStrategy[wire.Message]] = {
    wire.Hello: st.builds(
        wire.Hello,
        st.binary(min_size=16, max_size=16),
        st.text(max_size=64),
        st.booleans(),
        VERSIONS,
    ),
    wire.OpenNamespace: st.builds(wire.OpenNamespace, DESCRIPTORS, st.booleans()),
    wire.Lookup: st.builds(wire.Lookup, U32, KEYS),
    wire.Touch: st.builds(wire.Touch, U32, KEYS),
    wire.Reserve: st.builds(wire.Reserve, U32, U32, KEYS),
    wire.Commit: st.builds(wire.Commit, SEQUENCES),
    wire.Abort: st.builds(wire.Abort, SEQUENCES),
    wire.LoadKeys: st.builds(wire.LoadKeys, U32, KEYS),
    wire.Ack: st.builds(wire.Ack, U64, U32),
    wire.Release: st.builds(wire.Release, U64),
    wire.Reset: st.builds(wire.Reset, U32),
    wire.Pin: st.builds(wire.Pin, U32, KEYS),
    wire.Unpin: st.builds(wire.Unpin, U32, KEYS),
    wire.Stats: st.just(wire.Stats()),
    wire.Events: st.builds(wire.Events, U64),
    wire.Flush: st.just(wire.Flush()),
    wire.Describe: st.builds(wire.Describe, U64),
    wire.Check: st.builds(wire.Check, U64),
    wire.Purge: st.builds(wire.Purge, st.binary(min_size=32, max_size=32)),
    wire.Find: st.builds(wire.Find, st.binary(min_size=32, max_size=32)),
    wire.PinRecords: st.builds(wire.PinRecords, st.binary(min_size=32, max_size=32), KEYS),
    wire.UnpinRecords: st.builds(wire.UnpinRecords, st.binary(min_size=32, max_size=32), KEYS),
    wire.CommitDigests: st.builds(wire.CommitDigests, _rows(U64, DIGEST)),
    wire.LoadToVerify: st.builds(wire.LoadToVerify, U32, KEYS),
    wire.Dispute: st.builds(wire.Dispute, U64, U32, st.lists(U32, max_size=40).map(tuple)),
    wire.Welcome: st.builds(
        wire.Welcome, st.binary(min_size=16, max_size=16), U64, U64, U32, U64, U32, VERSIONS
    ),
    wire.NamespaceOpened: st.builds(wire.NamespaceOpened, U32, st.binary(max_size=32), U64, U64),
    wire.States: st.builds(wire.States, st.binary(max_size=99)),
    wire.Grants: st.builds(wire.Grants, st.integers(0, 255), _rows(U64, U64)),
    wire.Settled: st.builds(wire.Settled, st.binary(max_size=99)),
    wire.Batch: st.builds(wire.Batch, U32, _rows(U32, U32, U32, U64)),
    wire.BatchToVerify: st.builds(wire.BatchToVerify, U32, _rows(U32, U32, U32, U64, DIGEST)),
    wire.Failed: st.builds(wire.Failed, _rows(U32, U32)),
    wire.Done: st.just(wire.Done()),
    wire.Ok: st.builds(wire.Ok, U64),
    wire.Report: st.builds(wire.Report, REPORTS),
    wire.Failure: st.builds(wire.Failure, st.text(), st.text(), st.text()),
}
ANY = st.one_of(*MESSAGES.values())

KEY = bytes(range(36))
GOLDEN: list[tuple[int, wire.Message, str]] = [
    (7, wire.Lookup(3, (KEY,)), "2a000000 03 00 0000 0700000000000000 03000000 2400" + KEY.hex()),
    (
        8,
        wire.Reserve(1, 4096, (KEY[:20],)),
        "1e000000 05 00 0000 0800000000000000 01000000 1400 00100000" + KEY[:20].hex(),
    ),
    (
        9,
        wire.Commit((1, 2)),
        "10000000 06 00 0000 0900000000000000 0100000000000000 0200000000000000",
    ),
    (0, wire.Ack(258, 3), "0c000000 09 00 0000 0000000000000000 0201000000000000 03000000"),
    (1, wire.Reset(), "04000000 0b 00 0000 0100000000000000 ffffffff"),
    (1, wire.Stats(), "00000000 0e 00 0000 0100000000000000"),
    (2, wire.States(b"\x01\x10"), "02000000 43 00 0000 0200000000000000 01 10"),
    (
        2,
        wire.Grants(34, ((4096, 5), (0, 0))),
        "21000000 45 00 0000 0200000000000000 22"
        "0010000000000000 0500000000000000 0000000000000000 0000000000000000",
    ),
    (
        3,
        wire.Batch(1, ((0, 9, 2, 8192),)),
        "18000000 48 00 0000 0300000000000000 01000000 00000000 09000000 02000000 0020000000000000",
    ),
    (3, wire.Failed(((4, 16),)), "08000000 49 00 0000 0300000000000000 04000000 10000000"),
    (3, wire.Done(), "00000000 4a 00 0000 0300000000000000"),
    (
        0,
        wire.Hello(bytes(16), "worker", True, (1, 0)),
        "38000000 01 00 0000 0000000000000000 a4 68"
        + b"protocol".hex()
        + "820100 66"
        + b"engine".hex()
        + "50"
        + bytes(16).hex()
        + "64"
        + b"role".hex()
        + "66"
        + b"worker".hex()
        + "65"
        + b"arena".hex()
        + "f5",
    ),
    (5, wire.Describe(), "08000000 11 00 0000 0500000000000000 a1 65" + b"start".hex() + "00"),
    (5, wire.Check(24), "09000000 12 00 0000 0500000000000000 a1 65" + b"start".hex() + "1818"),
    (
        5,
        wire.Purge(bytes(range(32))),
        "2d000000 13 00 0000 0500000000000000 a1 69"
        + b"namespace".hex()
        + "5820"
        + bytes(range(32)).hex(),
    ),
    (
        6,
        wire.CommitDigests(((5, KEY[:16]), (258, KEY[16:32]))),
        "30000000 17 00 0000 0600000000000000"
        "0500000000000000 " + KEY[:16].hex() + "0201000000000000" + KEY[16:32].hex(),
    ),
    (
        7,
        wire.LoadToVerify(3, (KEY,)),
        "2a000000 18 00 0000 0700000000000000 03000000 2400" + KEY.hex(),
    ),
    (
        0,
        wire.Dispute(258, 3, (0, 7)),
        "14000000 19 00 0000 0000000000000000 0201000000000000 03000000 00000000 07000000",
    ),
    (
        3,
        wire.BatchToVerify(1, ((0, 9, 2, 8192, KEY[:16]),)),
        "28000000 4d 00 0000 0300000000000000 01000000 00000000 09000000 02000000"
        "0020000000000000" + KEY[:16].hex(),
    ),
    (
        4,
        wire.Failure("NoSpaceError", "full"),
        "2c000000 7f 00 0000 0400000000000000 a3 65"
        + b"error".hex()
        + "6c"
        + b"NoSpaceError".hex()
        + "67"
        + b"problem".hex()
        + "64"
        + b"full".hex()
        + "69"
        + b"next_step".hex()
        + "60",
    ),
]


def test_every_kind_has_a_strategy() -> None:
    assert set(MESSAGES) == {*wire.REQUESTS, *wire.REPLIES}


@settings(max_examples=400, deadline=None)
@given(U64, ANY)
def test_a_message_survives_its_frame(ticket: int, message: wire.Message) -> None:
    assert wire.Decoder().feed(wire.encode(ticket, message)) == [(ticket, message)]


@settings(max_examples=60, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=6))
def test_frames_may_arrive_byte_by_byte(messages: list[wire.Message]) -> None:
    stream = b"".join(wire.encode(number, message) for number, message in enumerate(messages))
    decoder = wire.Decoder()
    found = [pair for byte in stream for pair in decoder.feed(bytes([byte]))]
    assert found == list(enumerate(messages))
    assert decoder.buffered_bytes == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY, min_size=2, max_size=6), st.data())
def test_frames_may_be_cut_anywhere(messages: list[wire.Message], data: st.DataObject) -> None:
    stream = b"".join(wire.encode(number, message) for number, message in enumerate(messages))
    cut = data.draw(st.integers(0, len(stream)))
    decoder = wire.Decoder()
    found = decoder.feed(memoryview(stream)[:cut]) + decoder.feed(memoryview(stream)[cut:])
    assert found == list(enumerate(messages))


@pytest.mark.parametrize(("ticket", "message", "golden"), GOLDEN)
def test_the_bytes_of_a_frame_never_change(ticket: int, message: wire.Message, golden: str) -> None:
    assert wire.encode(ticket, message) == bytes.fromhex(golden)


def test_the_documentation_lists_every_kind_under_its_name_and_number() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", page.read_text(), re.MULTILINE)
    documented = {int(kind) for kind, _ in rows}
    assert documented == {message.kind for message in (*wire.REQUESTS, *wire.REPLIES)}
    assert len(rows) == len(documented)


def test_a_frame_of_65536_keys_is_carried() -> None:
    keys = tuple(number.to_bytes(36, "big") for number in range(wire.KEYS_MAX))
    frame = wire.encode(1, wire.Reserve(0, 1, keys))
    decoder = wire.Decoder()
    found = [
        pair
        for at in range(0, len(frame), 65_536)
        for pair in decoder.feed(frame[at : at + 65_536])
    ]
    assert found == [(1, wire.Reserve(0, 1, keys))]


def test_a_frame_of_exactly_the_limit_is_carried_and_one_byte_more_is_refused() -> None:
    full = wire.States(bytes(wire.FRAME_BYTES_MAX))
    assert wire.Decoder().feed(wire.encode(1, full)) == [(1, full)]
    with pytest.raises(MisuseError, match="too large"):
        wire.encode(1, wire.States(bytes(wire.FRAME_BYTES_MAX + 1)))


@pytest.mark.parametrize(
    "key", [b"", bytes(8), bytes(19), bytes(32), bytes(33), bytes(35), bytes(37), bytes(72)]
)
def test_a_key_of_another_width_is_refused_and_never_padded_or_cut(key: bytes) -> None:
    for message in (wire.Lookup(0, (key,)), wire.Reserve(0, 1, (KEY, key))):
        with pytest.raises(MisuseError, match="width"):
            wire.encode(1, message)


@pytest.mark.parametrize("key", [123456789, "a" * 36, bytearray(36), memoryview(bytes(36)), None])
def test_a_key_that_is_no_bytes_is_refused_by_the_name_of_its_type(key: object) -> None:
    with pytest.raises(MisuseError, match=type(key).__name__):
        wire.encode(1, wire.Touch(0, (KEY, key)))  # type: ignore[arg-type]


def test_keys_of_both_widths_in_one_message_are_refused() -> None:
    with pytest.raises(MisuseError, match="all the same"):
        wire.encode(1, wire.LoadKeys(0, (KEY, KEY[:20])))


@pytest.mark.parametrize(
    "message",
    [
        wire.Lookup(-1, ()),
        wire.Reserve(0, 2**32, ()),
        wire.Commit((2**64,)),
        wire.Commit((0,) * (wire.KEYS_MAX + 1)),
        wire.CommitDigests(((0, bytes(16)),) * (wire.KEYS_MAX + 1)),
        wire.CommitDigests(((0, bytes(16)), (1, bytes(15)))),
        wire.Dispute(0, 0, (0,) * (wire.KEYS_MAX + 1)),
        wire.Lookup(0, (KEY,) * (wire.KEYS_MAX + 1)),
        wire.Ok(-1),
        wire.Grants(256, ()),
        wire.Grants(0, ((2**64, 0),)),
        wire.Failed(((0, -1),)),
        wire.Check(-1),
        wire.Describe(2**64),
        wire.Purge(bytes(31)),
        wire.Hello(bytes(15), "worker", True),
        wire.Hello(bytes(16), "w" * 65, True),
        wire.Report({"unknown": object()}),
        wire.Failure("\ud800", ""),
    ],
)
def test_what_the_wire_cannot_carry_is_misuse_on_this_side(message: wire.Message) -> None:
    with pytest.raises(MisuseError):
        wire.encode(1, message)


def test_a_ticket_out_of_range_is_misuse() -> None:
    with pytest.raises(MisuseError):
        wire.encode(2**64, wire.Stats())
