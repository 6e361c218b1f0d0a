"""The packed form of a block's key, the 64-bit form of its hash, the names of longer blocks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.allocator import event_hash, group_hashes, hash_blocks, pack_key, unpack_key
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.integers(0, 40), st.slices(8))
def test_a_longer_block_has_the_last_of_its_hash_blocks_names(
    ratio: int, count: int, cut: slice
) -> None:
    fine = hash_blocks(range(2 * count), 2)
    view = group_hashes(fine, ratio)
    expected = [fine[(j + 1) * ratio - 1] for j in range(count // ratio)]
    assert list(view) == expected
    assert [view[j] for j in range(len(view))] == expected
    assert [view[-1 - j] for j in range(len(view))] == expected[::-1]
    assert list(view[cut]) == expected[cut]
    assert list(reversed(view)) == expected[::-1]
    for outside in (len(view), -1 - len(view)):
        with pytest.raises(IndexError):
            view[outside]


def test_the_names_of_longer_blocks_are_a_view() -> None:
    fine = hash_blocks(range(14), 2)
    view = group_hashes(fine, 4)
    assert len(view) == 1
    fine += hash_blocks(range(16), 2, known=fine)
    assert list(view) == [fine[3], fine[7]]
    assert group_hashes(fine, 1) is fine


@pytest.mark.parametrize("ratio", [0, -1, True, 2.0])
def test_a_longer_block_is_whole_hash_blocks(ratio: Any) -> None:
    with pytest.raises(MisuseError, match="whole number of hash blocks"):
        group_hashes([bytes(32)], ratio)
