"""The digest that is taken on the way of a copy is that of the whole, of the bytes one says."""

from __future__ import annotations

import os

import pytest

from ebbtide.tiers.digest import PIECE_BYTES, copy_and_digest, record_digest, record_seed

SEED = record_seed(bytes(32), bytes(36))


@pytest.mark.parametrize(
    "size", [1, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 4095]
)
def test_a_copy_of_any_size_is_whole_and_so_is_its_digest(size: int) -> None:
    source, target = os.urandom(size), bytearray(size)
    view = memoryview(target)
    assert copy_and_digest(view, memoryview(source), view, SEED) == record_digest(source, SEED)
    assert target == source


def test_the_digest_is_of_the_bytes_that_nobody_else_can_write() -> None:
    size = 2 * PIECE_BYTES + 1
    shared, mine = memoryview(os.urandom(size)), memoryview(os.urandom(size))
    target = memoryview(bytearray(size))
    assert copy_and_digest(target, shared, mine, SEED) == record_digest(mine, SEED)
    assert target == shared
