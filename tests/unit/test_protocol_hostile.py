"""Bytes that no honest peer sends: ProtocolError and nothing else, in bounded memory."""

from __future__ import annotations

import contextlib
import datetime
import pickle
import random
import struct
import tracemalloc
import uuid

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.strict_cbor import DEPTH_MAX, ITEMS_MAX, read_cbor
from ebbtide.errors import ProtocolError

KEY = bytes(range(36))
MUTATIONS = 20_000

HONEST: list[wire.Message] = [
    wire.Hello(bytes(16), "worker", True),
    wire.OpenNamespace([["model", "m"], ["layers", ["a", "b"]], ["block_size", 16]], True),
    wire.Lookup(3, (KEY, KEY)),
    wire.Touch(3, (KEY[:20],)),
    wire.Reserve(3, 4096, (KEY,)),
    wire.Commit((1, 2, 3)),
    wire.Abort((9,)),
    wire.LoadKeys(0, (KEY,)),
    wire.Ack(1, 2),
    wire.Release(3),
    wire.Reset(),
    wire.Pin(1, (KEY,)),
    wire.Unpin(1, (KEY,)),
    wire.Stats(),
    wire.Events(5),
    wire.Flush(),
    wire.Describe(7),
    wire.Check(1 << 40),
    wire.Purge(bytes(range(32))),
    wire.Find(bytes(range(32))),
    wire.PinRecords(bytes(32), (KEY,)),
    wire.UnpinRecords(bytes(32)),
    wire.CommitDigests(((1, bytes(16)), (2, bytes(range(16))))),
    wire.LoadToVerify(0, (KEY,)),
    wire.Dispute(1, 2, (0, 3)),
    wire.Welcome(bytes(16), 1, 2, 3, 4, 5),
    wire.NamespaceOpened(1, bytes(32), 2, 3),
    wire.States(bytes(9)),
    wire.Grants(1, ((0, 1),)),
    wire.Settled(bytes(3)),
    wire.Batch(1, ((0, 1, 2, 3),)),
    wire.BatchToVerify(1, ((0, 1, 2, 3, bytes(16)),)),
    wire.Failed(((1, 16),)),
    wire.Done(),
    wire.Ok(3),
    wire.Report({"memory": {"records": 3, "ratio": 0.5, "down": None}}),
    wire.Failure("EbbtideError", "p", "n"),
]


def _frame(
    kind: int, body: bytes, *, size: int | None = None, zeros: tuple[int, int] = (0, 0)
) -> bytes:
    return wire.HEADER.pack(len(body) if size is None else size, kind, *zeros, 1) + body


def _refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.Decoder().feed(stream)


def test_all_kinds_are_mutated() -> None:
    assert {type(message) for message in HONEST} == {*wire.REQUESTS, *wire.REPLIES}


def test_20_000_mutated_frames_raise_nothing_but_protocol_errors() -> None:
    chance = random.Random(72)
    frames = [wire.encode(number, message) for number, message in enumerate(HONEST)]
    refused = 0
    for _ in range(MUTATIONS):
        stream = bytearray(chance.choice(frames))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(stream)) if stream else 0
            match chance.randrange(5):
                case 0 if stream:
                    stream[at] = chance.randrange(256)
                case 1 if stream:
                    stream[at] ^= 1 << chance.randrange(8)
                case 2:
                    del stream[at : at + chance.randint(1, 8)]
                case 3:
                    stream[at:at] = chance.randbytes(chance.randint(1, 8))
                case _:
                    stream += chance.choice(frames)
        decoder = wire.Decoder()
        try:
            decoder.feed(bytes(stream))
        except ProtocolError:
            refused += 1
        assert decoder.buffered_bytes <= len(stream)
    assert refused > MUTATIONS // 4


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_protocol_errors(garbage: bytes) -> None:
    for kind in (1, 2, 17, 18, 19, 23, 24, 25, 65, 66, 69, 72, 76, 77, 127):
        for stream in (garbage, _frame(kind, garbage)):
            with contextlib.suppress(ProtocolError):
                wire.Decoder().feed(stream)


@pytest.mark.parametrize("kind", [0, 26, 64, 68, 71, 78, 126, 128, 255])
def test_an_unknown_kind_is_refused_before_its_body_has_come(kind: int) -> None:
    _refused(_frame(kind, b"", size=1000))


def test_a_body_that_claims_too_much_is_refused_before_it_is_buffered() -> None:
    _refused(_frame(3, b"", size=wire.FRAME_BYTES_MAX + 1))
    _refused(_frame(3, b"", size=2**32 - 1))
    with pytest.raises(ProtocolError):
        wire.Decoder(4096).feed(_frame(3, b"", size=4097))


@pytest.mark.parametrize("zeros", [(1, 0), (0, 1), (255, 0), (0, 65_535)])
def test_reserved_header_bytes_must_be_zero(zeros: tuple[int, int]) -> None:
    _refused(_frame(14, b"", zeros=zeros))


@pytest.mark.parametrize("kind", [message.kind for message in (*wire.REQUESTS, *wire.REPLIES)])
def test_every_kind_refuses_an_odd_body(kind: int) -> None:
    if kind in (67, 70):  # any bytes are codes
        return
    _refused(_frame(kind, bytes(7)))


def test_no_body_of_zeros_raises_anything_but_a_protocol_error() -> None:
    for message in (*wire.REQUESTS, *wire.REPLIES):
        for size in range(65):
            with contextlib.suppress(ProtocolError):
                wire.Decoder().feed(_frame(message.kind, bytes(size)))
    _refused(_frame(wire.Grants.kind, b""))


@pytest.mark.parametrize("kind", [3, 4, 8, 12, 13, 24])
@pytest.mark.parametrize(
    ("width", "size"),
    [(0, 36), (1, 36), (32, 64), (35, 70), (36, 35), (36, 71), (20, 36), (65_535, 0)],
)
def test_ragged_or_foreign_key_widths_are_refused(kind: int, width: int, size: int) -> None:
    _refused(_frame(kind, struct.pack("<IH", 0, width) + bytes(size)))


@pytest.mark.parametrize(
    ("kind", "head", "row"), [(6, 0, 8), (23, 0, 24), (25, 12, 4), (77, 4, 36)]
)
def test_packed_lists_with_a_ragged_end_are_refused(kind: int, head: int, row: int) -> None:
    for rest in (1, row - 1):
        _refused(_frame(kind, bytes(head + 2 * row + rest)))
    if head:
        _refused(_frame(kind, bytes(head - 1)))


def test_more_keys_or_sequences_than_the_bound_are_refused() -> None:
    _refused(_frame(3, struct.pack("<IH", 0, 20) + bytes(20 * (wire.KEYS_MAX + 1))))
    _refused(_frame(6, bytes(8 * (wire.KEYS_MAX + 1))))
    _refused(_frame(23, bytes(24 * (wire.KEYS_MAX + 1))))
    _refused(_frame(25, bytes(12 + 4 * (wire.KEYS_MAX + 1))))


# -- CBOR -----------------------------------------------------------------------------------------


def _cbor_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_cbor(data)


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**64), 2**64 - 1)
        | st.text()
        | st.binary()
        | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_the_strict_reader_reads_what_the_encoder_writes(value: object) -> None:
    assert read_cbor(cbor2.dumps(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        uuid.UUID(int=1),
        2**64,
        -(2**64) - 1,
        cbor2.CBORTag(28, []),  # a shareable
        cbor2.CBORTag(29, 0),  # a reference to it
        cbor2.CBORTag(256, []),
        cbor2.CBORTag(55799, {}),
        cbor2.undefined,
        cbor2.CBORSimpleValue(99),
        {1: 2},
        {b"bytes": 1},
    ],
)
def test_tags_references_and_odd_values_are_refused(value: object) -> None:
    _cbor_refused(cbor2.dumps(value))
    _cbor_refused(cbor2.dumps([value]))


@pytest.mark.parametrize(
    "data",
    [
        "",  # nothing
        "9f0102ff",  # indefinite array
        "bf616101ff",  # indefinite map
        "5f4101ff",  # indefinite bytes
        "7f6161ff",  # indefinite text
        "ff",  # break
        "1c",  # reserved lengths
        "3d",
        "1e",
        "19",  # ends in a number
        "1b00",
        "4401",  # shorter than it says
        "626a",
        "62c328",  # no UTF-8
        "61ff",
        "820001ff",  # goes on
        "0000",
        "a2616101616102",  # a key twice
        "a1",
        "f818",
        "fb00",
    ],
)
def test_malformed_cbor_is_refused(data: str) -> None:
    _cbor_refused(bytes.fromhex(data))


@pytest.mark.parametrize("nesting", [b"\x81", b"\xa1\x61a", b"\x82\x00"])
def test_p80_deep_nesting_is_refused_and_the_bound_itself_is_not(nesting: bytes) -> None:
    read_cbor(nesting * DEPTH_MAX + b"\x80")
    _cbor_refused(nesting * (DEPTH_MAX + 1) + b"\x80")
    _cbor_refused(nesting * 1_000_000)


@pytest.mark.parametrize("head", ["9b", "bb", "5b", "7b", "9a", "ba", "5a", "7a"])
def test_a_huge_claimed_length_allocates_nothing(head: str) -> None:
    width = 8 if head.endswith("b") else 4
    tracemalloc.start()
    try:
        _cbor_refused(bytes.fromhex(head) + b"\x7f" * width + bytes(64))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_swarm_of_items_is_refused_before_it_costs_memory() -> None:
    swarm = b"\x9a\x00\x3f\x00\x00" + b"\x80" * 0x3F0000  # 4 million empty arrays
    tracemalloc.start()
    try:
        _refused(_frame(2, swarm))
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    _cbor_refused(cbor2.dumps([0] * ITEMS_MAX))
    read_cbor(cbor2.dumps([0] * (ITEMS_MAX - 1)))


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle ran')",))


def test_p80_p83_a_pickle_is_only_garbage() -> None:
    for kind in (1, 2, 65, 66, 76, 127):
        _refused(_frame(kind, pickle.dumps(_Trap())))
    _refused(pickle.dumps(_Trap()) * 4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (1, {"engine": bytes(16), "role": "worker", "arena": True}),
        (1, {"engine": bytes(15), "role": "worker", "arena": True, "protocol": [1, 0]}),
        (1, {"engine": "a" * 16, "role": "worker", "arena": True, "protocol": [1, 0]}),
        (1, {"engine": bytes(16), "role": "w" * 65, "arena": True, "protocol": [1, 0]}),
        (1, {"engine": bytes(16), "role": "worker", "arena": 1, "protocol": [1, 0]}),
        (1, {"engine": bytes(16), "role": "worker", "arena": True, "protocol": [1]}),
        (1, {"engine": bytes(16), "role": "worker", "arena": True, "protocol": [True, 0]}),
        (2, {"descriptor": {}, "pending": False}),
        (2, {"descriptor": [], "pending": None}),
        (17, {}),
        (17, {"start": -1}),
        (17, {"start": True}),
        (18, {"start": "0"}),
        (18, {"start": -(2**64)}),
        (18, {"start": None}),
        (19, {"namespace": bytes(31)}),
        (19, {"namespace": bytes(33)}),
        (19, {"namespace": "a" * 32}),
        (19, {"name": bytes(32)}),
        (20, {"namespace": bytes(31)}),
        (21, {"namespace": bytes(32)}),
        (21, {"namespace": bytes(32), "keys": [bytes(35)]}),
        (21, {"namespace": bytes(32), "keys": ["a" * 36]}),
        (22, {"namespace": bytes(33), "keys": []}),
        (22, {"namespace": bytes(32), "keys": [bytes(36)] * 1025}),
        (66, {"namespace": True, "digest": b"", "records": 0, "bytes": 0}),
        (76, {"report": []}),
        (127, {"error": "E", "problem": "p"}),
    ],
)
def test_control_fields_must_be_there_and_of_their_type(
    kind: int, fields: dict[str, object]
) -> None:
    _refused(_frame(kind, cbor2.dumps(fields)))


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    fields = {"engine": bytes(16), "role": "w", "arena": False, "protocol": [1, 7], "later": [1]}
    found = wire.Decoder().feed(_frame(1, cbor2.dumps(fields)))
    assert found == [(1, wire.Hello(bytes(16), "w", False, (1, 7)))]
