"""What LOCK says of an owner, and what of it is believed."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from tests.fake_store import FakeStore

from ebbtide.connectors.owner import OwnerClient, reach_owner
from ebbtide.errors import ConfigError
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.lock_file import Owner, find_owner, read_owner

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("", Owner("", "")),
        ("12\n", Owner("12", "")),
        ("12", Owner("12", "")),
        ("12\n/run/store\n", Owner("12", "/run/store")),
        ("12\n/run/a\nb\n", Owner("12", "/run/a\nb")),
        ("12\nrun/store\n", Owner("12", "")),
        ("12\ned 16384 99\n", Owner("12", "")),
        ("closed 16384 1700000000000000000\n", Owner("", "")),
        ("closed without an index\n", Owner("", "")),
    ],
)
def test_every_form_of_the_text_is_understood(text: str, owner: Owner) -> None:
    assert read_owner(text) == owner


def test_an_owner_is_found_while_it_holds_the_lock_and_not_after(tmp_path: Path) -> None:
    place = str(tmp_path / "disk")
    assert find_owner(place) is None
    directory = Directory(place, 16 * MIB)
    assert find_owner(place) == Owner(str(os.getpid()), "")
    directory.name_socket("/run/\udcff/s")  # a path that is no UTF-8
    assert find_owner(place) == Owner(str(os.getpid()), "/run/\udcff/s")
    directory.say_goodbye()
    assert find_owner(place) == Owner("", "")
    directory.close()
    assert find_owner(place) is None


def test_a_text_that_names_a_dead_owner_is_not_believed(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    Directory(str(place), 16 * MIB).close()
    (place / "LOCK").write_text(f"1\n{tmp_path}/s\n")
    assert find_owner(str(place)) is None
    assert reach_owner(str(place)) is None


def test_an_owner_that_does_not_listen_is_not_reached(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    directory = Directory(str(place), 16 * MIB)
    assert reach_owner(str(place)) is None
    directory.name_socket(str(tmp_path / "s"))
    assert reach_owner(str(place)) is None
    directory.close()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    place = str(tmp_path / "disk")
    directory = Directory(place, 16 * MIB)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "LOCK").symlink_to(tmp_path / "disk" / "LOCK")
    assert find_owner(str(tmp_path / "other")) is None
    directory.close()


def test_a_store_of_an_older_protocol_is_not_asked_what_it_does_not_know(tmp_path: Path) -> None:
    with closing(FakeStore(str(tmp_path / "s"))) as store:
        store.protocol = (1, 0)
        with pytest.raises(ConfigError, match="older than this command"):
            OwnerClient(store.path).__exit__()
