"""The packed form of a block's key and the 64-bit form of its hash."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.allocator import event_hash, pack_key, unpack_key
from ebbtide.errors import MisuseError


def test_p03_event_form_is_of_the_hash_not_of_the_key() -> None:
    block_hash = bytes(range(32))
    for group in (0, 7):
        assert unpack_key(pack_key(block_hash, group)) == (block_hash, group)
        with pytest.raises(MisuseError, match="length=36"):
            event_hash(pack_key(block_hash, group))
    assert event_hash(block_hash) == int.from_bytes(bytes(range(24, 32)), "big")


@pytest.mark.parametrize(
    "wrong", [2**63, bytes(8), bytes(33), bytes(36), bytearray(32), "a" * 32, None]
)
def test_p04_other_types_and_widths_are_rejected_by_name(wrong: Any) -> None:
    for call in (lambda: pack_key(wrong, 0), lambda: event_hash(wrong)):
        with pytest.raises(MisuseError, match=f"type={type(wrong).__name__}"):
            call()
    if not (isinstance(wrong, bytes) and len(wrong) == 36):
        with pytest.raises(MisuseError, match=f"type={type(wrong).__name__}"):
            unpack_key(wrong)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([16, 32]), st.integers(0, 2**32 - 1), st.randoms())
def test_p04_packing_never_pads_or_cuts(width: int, group: int, random: Any) -> None:
    block_hash = random.randbytes(width)
    key = pack_key(block_hash, group)
    assert len(key) == width + 4
    assert unpack_key(key) == (block_hash, group)


@pytest.mark.parametrize("group", [-1, 2**32, True, 1.0])
def test_groups_that_do_not_fit_are_rejected(group: Any) -> None:
    with pytest.raises(MisuseError, match="KV group"):
        pack_key(bytes(32), group)
