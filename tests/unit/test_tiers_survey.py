"""`ebbtide stats`: every record counted under its namespace, and what became of those that left."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tests.disk_rig import DiskRig
from tests.index_rows import changed_index

from ebbtide.errors import ConfigError, EbbtideError, NoSpaceError
from ebbtide.testing.conformance import key_of
from ebbtide.tiers import survey as survey_module
from ebbtide.tiers.directory import Directory
from ebbtide.tiers.disk_record import DiskState
from ebbtide.tiers.offline import survey_directory
from ebbtide.tiers.record_table import RecordTable
from ebbtide.tiers.survey import Held, count_rows, describe

if TYPE_CHECKING:
    from pathlib import Path

    from ebbtide.testing import SimStore

PAGE = 4096
LENGTH = PAGE - 100
MIB = 1 << 20


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def survey(sim: SimStore) -> dict[bytes, dict[str, Any]]:
    found: dict[bytes, dict[str, Any]] = {}
    start: int | None = 0
    while start is not None:
        answers: list[dict[str, Any] | EbbtideError] = []
        sim.store.care.surveys.describe(start, answers.append)
        sim.runtime.run_until(lambda answers=answers: bool(answers))  # type: ignore[misc]
        (answer,) = answers
        assert isinstance(answer, dict)
        found.update({one["digest"]: one for one in answer["namespaces"]})
        start = answer["next"]
    return found


def test_p61_records_are_counted_under_their_namespace_in_both_tiers(tiered: SimStore) -> None:
    one, two = tiered.namespace("one"), tiered.namespace("two")
    tiered.put(one, keys_of(*range(8)), LENGTH)
    tiered.put(two, keys_of(*range(4)), PAGE)
    second = survey(tiered)[two.digest]
    assert (second["memory_records"], second["memory_bytes"]) == (4, 4 * PAGE)
    assert (second["disk_records"], second["disk_bytes"]) == (0, 0)
    assert second["oldest_s"] is None
    assert tiered.drain()
    found = survey(tiered)
    first, second = found[one.digest], found[two.digest]
    assert first["open"]
    assert (first["disk_records"], first["disk_bytes"]) == (8, 8 * LENGTH)
    assert (first["memory_records"], first["memory_bytes"]) == (8, 8 * LENGTH)
    assert (second["disk_records"], second["disk_bytes"]) == (4, 4 * PAGE)
    assert second["oldest_s"] is not None
    tiered.store.check_integrity()


def test_the_count_comes_out_the_same_in_pieces(
    tiered: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = [tiered.namespace(name) for name in "abcde"]
    for number, space in enumerate(spaces):
        tiered.put(space, keys_of(*range(3 + number)), LENGTH)
        assert tiered.drain()
    whole = survey(tiered)
    assert [whole[space.digest]["disk_records"] for space in spaces] == [3, 4, 5, 6, 7]
    monkeypatch.setattr(survey_module, "ROWS", 4)
    monkeypatch.setattr(survey_module, "NAMESPACES_MAX", 2)
    assert survey(tiered) == whole


def test_ages_are_those_of_the_oldest_and_the_newest_and_survive_a_restart(
    tiered: SimStore,
) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(1), LENGTH)
    assert tiered.drain()
    tiered.runtime.pass_time(36_000.0)
    tiered.put(space, keys_of(2), LENGTH)
    assert tiered.drain()
    tiered.runtime.pass_time(1200.0)
    found = survey(tiered)[space.digest]
    assert found["oldest_s"] == pytest.approx(37_200, abs=400)  # a drain takes a minute or two
    assert found["newest_s"] == pytest.approx(1200, abs=400)
    index = tiered.store.disk.index if tiered.store.disk else None
    assert index is not None
    minutes = sorted(record.minute for record in index.records_of(space.epoch))
    assert minutes[1] - minutes[0] == pytest.approx(600, abs=5)
    assert tiered.restart()
    index = tiered.store.disk.index if tiered.store.disk else None
    assert index is not None
    space = tiered.namespace()
    assert sorted(record.minute for record in index.records_of(space.epoch)) == minutes


def test_hits_are_counted_by_the_tier_they_came_from(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(*range(4)), LENGTH)
    assert tiered.restart()
    space = tiered.namespace()
    tiered.get(space, keys_of(0, 1, 2))
    tiered.get(space, keys_of(0, 99))
    found = survey(tiered)[space.digest]
    assert found["hits"] == {"disk": 3, "memory": 1}
    assert found["failed_loads"] == {"never_seen": 1}
    assert found["misses"] == {}


def test_what_is_stored_was_missed_for_a_reason(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(1, 2), LENGTH)
    tiered.store.reset(space, lambda ok: None)
    tiered.put(space, keys_of(1, 3), LENGTH)
    tiered.put(space, keys_of(1, 3), LENGTH)  # held already: no miss
    found = survey(tiered)[space.digest]
    assert found["misses"] == {"never_seen": 3, "reset": 1}


def test_a_drop_is_counted_once_also_of_a_record_that_two_tiers_held(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(*range(5)), LENGTH)
    assert tiered.drain()
    tiered.store.reset(space, lambda ok: None)
    tiered.runtime.settle()
    assert survey(tiered)[space.digest]["drops"] == {"reset": 5}


def test_a_record_that_leaves_memory_is_no_drop_while_the_disk_holds_it(tiered: SimStore) -> None:
    space = tiered.namespace()
    for start in range(0, 32, 8):
        tiered.put(space, keys_of(*range(start, start + 8)), LENGTH)
        assert tiered.drain()
    found = survey(tiered)[space.digest]
    assert found["left_memory"]["evicted"] > 0
    assert (found["disk_records"], found["drops"]) == (32, {})


def test_p61_what_the_disk_evicts_of_a_namespace_that_nobody_opened_is_counted(
    tiered: SimStore,
) -> None:
    old = tiered.namespace("old").digest
    tiered.put(tiered.namespace("old"), keys_of(*range(64)), LENGTH)
    assert tiered.restart()
    before = survey(tiered)[old]["disk_records"]
    tiered.put(tiered.namespace("new"), keys_of(*range(20)), LENGTH)
    assert tiered.drain()
    found = survey(tiered)[old]
    assert not found["open"]
    assert found["drops"]["evicted"] == before - found["disk_records"] > 0


def test_too_many_surveys_at_a_time_are_refused(tiered: SimStore) -> None:
    answers: list[object] = []
    for _ in range(survey_module.RUNNING_MAX):
        tiered.store.care.surveys.describe(0, answers.append)
    with pytest.raises(NoSpaceError):
        tiered.store.care.surveys.describe(0, answers.append)
    tiered.runtime.run_until(lambda: len(answers) == survey_module.RUNNING_MAX)
    assert survey(tiered) == {}


@pytest.mark.parametrize("start", [1, 1 << 40, (1 << 64) - 1])
def test_behind_the_last_namespace_there_is_nothing(tiered: SimStore, start: int) -> None:
    tiered.namespace()
    answers: list[Any] = []
    tiered.store.care.surveys.describe(start, answers.append)
    tiered.runtime.run_until(lambda: bool(answers))
    assert (answers[0]["namespaces"], answers[0]["next"]) == ([], None)


def test_a_tier_that_is_down_says_why_in_the_totals(tiered: SimStore) -> None:
    space = tiered.namespace()
    tiered.put(space, keys_of(1), LENGTH)
    assert tiered.store.disk is not None
    tiered.store.disk.go_down("made up")
    answers: list[Any] = []
    tiered.store.care.surveys.describe(0, answers.append)
    tiered.runtime.run_until(lambda: bool(answers))
    assert answers[0]["store"]["disk"]["down"] == "made up"


def test_of_a_descriptor_only_short_telling_words_are_shown() -> None:
    pairs: list[list[object]] = [
        ["model", "m" * 500],
        ["weights", "w"],
        ["kv_dtype", ["a", "list"]],
        ["block_size", 16],
        ["tensor_parallel", 2],
    ]
    assert describe(pairs) == {"model": "m" * 120, "block_size": 16, "tensor_parallel": 2}


# -- without a store ------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with DiskRig(tmp_path / "disk", 16 * MIB, LENGTH) as rig:
        rig.put(range(10))
        assert rig.flush()
    return tmp_path / "disk"


def test_without_a_store_the_index_is_read(place: Path) -> None:
    found = survey_directory(str(place))
    (namespace,) = found["namespaces"]
    assert (namespace["disk_records"], namespace["disk_bytes"]) == (10, 10 * LENGTH)
    assert 0 <= namespace["oldest_s"] < 300
    assert found["store"]["disk"]["used_bytes"] == 10 * PAGE
    with closing(Directory.existing(str(place))) as directory:
        assert directory.index_is_untouched  # a look costs the next store no probe


def test_records_of_an_older_ebbtide_have_no_age(place: Path) -> None:
    with changed_index(place / "index") as rows:
        rows["head"] = 0
    (namespace,) = survey_directory(str(place))["namespaces"]
    assert (namespace["oldest_s"], namespace["newest_s"]) == (None, None)
    assert "10 records" in command(str(place)).stdout
    assert "of unknown age" in command(str(place)).stdout


def test_an_index_that_cannot_be_read_is_an_error_with_a_way_out(place: Path) -> None:
    (place / "index" / "data.mdb").write_bytes(b"\xff" * 50_000)
    with pytest.raises(ConfigError, match="index cannot be read"):
        survey_directory(str(place))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ebbtide", "stats", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_names_a_namespace_by_its_first_12_digits(place: Path) -> None:
    found = json.loads(command(str(place), "--json").stdout)
    (namespace,) = found["namespaces"]
    assert namespace["name"] == namespace["digest"][:12]
    assert not found["by_store"]
    said = command(str(place))
    assert said.returncode == 0
    assert said.stdout.startswith(namespace["name"])
    assert "model=made-up" in said.stdout
    assert "No store runs" in said.stdout
    missing = command(str(place / "nothing"))
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_records_without_an_age_do_not_make_the_others_older() -> None:
    table = RecordTable(6)
    rows = table.take(5)
    table.fill(
        rows,
        7,
        [key_of(number) for number in rows],
        length=LENGTH,
        offsets=rows,
        sequences=range(5),
        digests=[bytes(16)] * 5,
        minute=0,
        state=DiskState.WHOLE,
    )
    table.minute[rows] = [0, 500, 0, 300, 100]
    table.state[rows[-1]] = DiskState.LEAVING
    held: dict[int, Held] = {}
    count_rows(table, 0, held)
    assert held == {7: Held(4, 4 * LENGTH, 300, 500)}
    count_rows(table, 0, held)
    assert held == {7: Held(8, 8 * LENGTH, 300, 500)}
    held[7].add(1, 1, 0, 0)
    assert (held[7].oldest, held[7].newest) == (300, 500)
