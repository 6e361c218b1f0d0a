"""What is part of a namespace's identity, and what never is."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from random import Random
from typing import Any

import pytest

from ebbtide.errors import MisuseError, NoSpaceError
from ebbtide.testing import SimStore, descriptor
from ebbtide.testing.conformance import key_of
from ebbtide.tiers.index import StoredNamespace
from ebbtide.tiers.lookups import OTHERS_MAX, REASONS_MAX
from ebbtide.tiers.namespace import INSTANCE_FIELDS, Descriptor, namespace_digest
from ebbtide.tiers.namespaces import Namespaces
from ebbtide.tiers.reasons import Miss, Place

# Every field, in digest order, with a value that means other bytes. A new field fails the tests
# below until it stands here; a process's own property belongs into INSTANCE_FIELDS instead.
CONTENT: dict[str, Any] = {
    "format": 2,
    "engine": "testing/2",
    "model": "another",
    "weights": "seed:1",
    "kv_dtype": "fp8_e4m3",
    "block_size": 32,
    "layers": ("0", "1"),
    "layout": "heads first",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "shard_rule": "by head",
    "attention_isa": "amx",
    "hash_algorithm": "sha256",
    "hash_root": "01",
    "pickle_minors": "3.11/0.19",
}
GOLDEN = "13011bea6cc464da2e69bd273c57779e4c656f1975ac4de17042f11f7cd89edd"


def test_every_field_is_listed_in_digest_order() -> None:
    assert [field.name for field in fields(Descriptor)] == list(CONTENT)


@pytest.mark.parametrize("field", CONTENT)
def test_p13_p15_any_other_value_is_another_namespace(field: str) -> None:
    """Dtype, parallel sizes and all the rest: equal-sized records of other bytes."""
    changed = replace(descriptor(), **{field: CONTENT[field]})
    assert namespace_digest(changed.pairs()) != namespace_digest(descriptor().pairs())


def test_all_changes_are_different_namespaces() -> None:
    digests = {
        namespace_digest(replace(descriptor(), **{field: value}).pairs())
        for field, value in CONTENT.items()
    }
    assert len(digests) == len(CONTENT)


def test_p07_the_digest_is_these_bytes_whatever_order_the_values_came_in() -> None:
    values = {field.name: getattr(descriptor(), field.name) for field in fields(Descriptor)}
    for seed in range(10):
        names = list(values)
        Random(seed).shuffle(names)
        shuffled = Descriptor(**{name: values[name] for name in names})
        assert namespace_digest(shuffled.pairs()).hex() == GOLDEN


def test_p07_no_map_is_hashed() -> None:
    for name, value in descriptor().pairs():
        assert isinstance(name, str)
        assert not isinstance(value, dict | set | float)


def test_a_change_of_order_or_of_type_is_another_digest() -> None:
    pairs = descriptor().pairs()
    assert namespace_digest(pairs[::-1]) != namespace_digest(pairs)
    assert namespace_digest([["a", 1]]) != namespace_digest([["a", "1"]])
    assert namespace_digest([["a", ["1"]]]) != namespace_digest([["a", "1"]])


@pytest.mark.parametrize("field", sorted(INSTANCE_FIELDS))
def test_p08_a_property_of_the_process_is_refused(field: str) -> None:
    with pytest.raises(MisuseError, match=f"field={field}"):
        namespace_digest([*descriptor().pairs(), [field, 4096]])


def test_p08_no_field_is_content_and_instance() -> None:
    assert not INSTANCE_FIELDS & CONTENT.keys()


@pytest.mark.parametrize("pair", ["ab", ["a"], ["a", 1, 2], [1, 2], ("a", 1), None])
def test_what_is_no_pair_is_refused(pair: Any) -> None:
    with pytest.raises(MisuseError, match=r"\[name, value\] pairs"):
        namespace_digest([pair])


def test_only_the_last_fields_have_defaults() -> None:
    """A field is added at the end, so that old descriptors keep their digest order."""
    optional = [field.default is not MISSING for field in fields(Descriptor)]
    assert optional == sorted(optional)


# -- open namespaces ------------------------------------------------------------------------------


def test_the_same_descriptor_is_the_same_namespace() -> None:
    with SimStore(1, 1 << 20) as sim:
        space = sim.namespace()
        assert sim.namespace() is space
        assert sim.store.namespace(space.handle) is space
        assert sim.store.namespace(space.handle + 1) is None
        assert sim.store.namespace(-1) is None
        assert space.readable()["weights"] == "seed:0"


def test_a_pending_namespace_stores_and_serves_nothing_until_it_is_final() -> None:
    with SimStore(1, 1 << 20) as sim:
        pairs = descriptor().pairs()
        space = sim.store.open_namespace(pairs, pending=True)
        assert sim.store.lookup(space, [key_of(1)]) == bytes([Miss.NAMESPACE_PENDING])
        assert sim.store.reserve(b"e", space, [key_of(1)], 10) == ([], Miss.NAMESPACE_PENDING)
        assert sim.store.open_namespace(pairs) is space
        sim.put(space, [key_of(1)], 100)
        sim.store.open_namespace(pairs, pending=True)  # somebody else is late: still final
        assert sim.store.lookup(space, [key_of(1)]) == bytes([Place.MEMORY])


def test_a_missing_key_is_looked_for_in_the_namespaces_opened_last_and_in_no_more(
    sim: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sim.namespace("old")
    sim.put(old, [key_of(1)], 4096)
    others = [sim.namespace(str(number)) for number in range(OTHERS_MAX - 1)]
    assert sim.store.miss_reason(others[0], key_of(1)) is Miss.OTHER_NAMESPACE
    others += [sim.namespace(str(number)) for number in range(OTHERS_MAX, 300)]
    assert sim.store.miss_reason(others[0], key_of(1)) is Miss.NEVER_SEEN
    asked = 0
    index = sim.store.memory.index

    def counted(epoch: int) -> Any:
        nonlocal asked
        asked += 1
        return index(epoch)

    monkeypatch.setattr(sim.store.memory, "index", counted)
    sim.store.lookup(others[0], [key_of(number) for number in range(200)])
    assert asked <= REASONS_MAX * OTHERS_MAX + 2


def test_namespaces_are_bounded_those_of_the_directory_included() -> None:
    known = [StoredNamespace(bytes([number]) * 32, number, []) for number in range(3)]
    namespaces = Namespaces(known, 4)
    first = namespaces.open([["model", "a"]], pending=False)
    with pytest.raises(NoSpaceError, match="as many namespaces"):
        namespaces.open([["model", "b"]], pending=False)
    assert namespaces.open([["model", "a"]], pending=False) is first
