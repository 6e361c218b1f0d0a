"""`ebbtide reset`, `pin` and `unpin` against a store that runs: by its socket or its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S
from tests.live.programs.engine import RECORD_BYTES, key_of
from tests.live.test_commands_live import RECORDS, Writer, answer_of, command, place_of, start

from ebbtide.tiers.reasons import Place

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

SHARE_BYTES = 8 << 20  # half of the memory of these stores


@pytest.mark.parametrize("by", ["socket", "directory"])
def test_reset_forgets_one_namespace_and_leaves_the_other(house: House, by: str) -> None:
    start(house)
    where = house.socket if by == "socket" else str(place_of(house))
    client = house.client(arena=True)
    one, two = Writer(client, "one"), Writer(client, "two")
    one.put(0, RECORDS)
    two.put(0, 3)
    found = answer_of("reset", where, "--namespace", one.name)
    assert found == {"namespaces": [{"name": one.name, "digest": one.digest.hex()}]}
    assert Place.MEMORY not in one.states(0, RECORDS)
    assert two.states(0, 3) == bytes([Place.MEMORY]) * 3
    said = command("reset", where, "--all")
    assert sorted(said.stdout.splitlines()) == sorted(
        f"{writer.name}: forgotten" for writer in (one, two)
    )
    assert Place.MEMORY not in two.states(0, 3)


def test_reset_by_digest_also_reaches_a_namespace_that_no_engine_has_opened(house: House) -> None:
    store = start(house)
    writer = Writer(house.client(arena=True), "m")
    writer.put(0, RECORDS)
    store.terminate()
    assert store.wait(PATIENCE_S) == 0
    start(house)
    assert answer_of("stats", house.socket)["namespaces"][0]["disk_records"] == RECORDS
    answer_of("reset", house.socket, "--namespace", writer.name)
    assert answer_of("stats", house.socket)["namespaces"][0]["disk_records"] == 0


def test_pinned_records_stay_while_everything_else_comes_and_goes(house: House) -> None:
    house.start()  # of memory only: what is evicted is gone
    writer, other = Writer(house.client(arena=True), "one"), Writer(house.client(arena=True), "two")
    put(writer, 0, RECORDS)
    found = answer_of("pin", house.socket, "--namespace", writer.name)
    assert (found["pinned"], found["not_in_memory"]) == (RECORDS, 0)
    assert (found["kept_bytes"], found["kept_max_bytes"]) == (RECORDS * RECORD_BYTES, SHARE_BYTES)
    put(other, 0, 200)
    assert writer.states(0, RECORDS) == bytes([Place.MEMORY]) * RECORDS
    again = command("pin", house.socket, "--namespace", writer.name)
    assert again.stdout == f"{writer.name}: 0 records pinned\npinned in all: 2.5MiB of 8MiB\n"
    found = answer_of("unpin", house.socket, "--namespace", writer.name)
    assert (found["unpinned"], found["kept_bytes"]) == (RECORDS, 0)
    put(other, 1000, 200)
    assert Place.MEMORY not in writer.states(0, RECORDS)


def test_records_are_pinned_by_key(house: House) -> None:
    house.start()
    writer, other = Writer(house.client(arena=True), "one"), Writer(house.client(arena=True), "two")
    put(writer, 0, 6)
    keys = [word for number in (1, 3, 99) for word in ("--key", key_of(number).hex())]
    found = answer_of("pin", house.socket, "--namespace", writer.name, *keys)
    assert (found["pinned"], found["not_in_memory"]) == (2, 1)
    put(other, 0, 200)
    held = [code == Place.MEMORY for code in writer.states(0, 6)]
    assert held == [False, True, False, True, False, False]
    found = answer_of("unpin", house.socket, "--namespace", writer.name, *keys[:2])
    assert found["unpinned"] == 1
    assert found["kept_bytes"] == RECORD_BYTES


def test_more_than_the_share_is_refused_with_the_figures_and_pins_nothing(house: House) -> None:
    house.start()
    writer = Writer(house.client(arena=True), "m")
    put(writer, 0, 100)
    held = writer.states(0, 100).count(Place.MEMORY)
    assert held * RECORD_BYTES > SHARE_BYTES
    ended = command("pin", house.socket, "--namespace", writer.name, "--json")
    assert ended.returncode == 1
    assert ended.stdout == ""
    for figure in (f"wanted_bytes={held * RECORD_BYTES}", f"kept_max_bytes={SHARE_BYTES}"):
        assert figure in ended.stderr
    assert answer_of("unpin", house.socket, "--namespace", writer.name)["unpinned"] == 0


def test_a_reset_ends_pins(house: House) -> None:
    house.start()
    writer = Writer(house.client(arena=True), "m")
    put(writer, 0, RECORDS)
    answer_of("pin", house.socket, "--namespace", writer.name)
    answer_of("reset", house.socket, "--namespace", writer.name)
    found = answer_of("unpin", house.socket, "--namespace", writer.name)
    assert (found["unpinned"], found["kept_bytes"]) == (0, 0)


@pytest.mark.parametrize("verb", ["reset", "pin", "unpin"])
def test_without_a_store_that_runs_there_is_nothing_to_ask(house: House, verb: str) -> None:
    ended = command(verb, str(house.directory), "--namespace", "0" * 12)
    assert ended.returncode == 2
    assert "No store runs there" in ended.stderr
    house.start().kill()
    house.stores[0].wait(PATIENCE_S)
    ended = command(verb, house.socket, "--namespace", "0" * 12)
    assert ended.returncode == 1
    assert "No store listens" in ended.stderr


@pytest.mark.parametrize(
    ("key", "words"),
    [("zz", "not hexadecimal"), ("00" * 35, "36 bytes or 20"), ("", "36 bytes or 20")],
)
def test_a_key_that_is_none_is_refused(house: House, key: str, words: str) -> None:
    ended = command("pin", house.socket, "--namespace", "0" * 12, "--key", key)
    assert ended.returncode == 2
    assert words in ended.stderr


def put(writer: Writer, first: int, count: int) -> None:
    """Store records in a store without disk: nothing becomes clean."""
    writer._clean = lambda: True  # type: ignore[method-assign]
    writer.put(first, count)
