"""The configuration: its defaults, its four doors, and the words for each mistake."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import msgspec
import pytest

from ebbtide import config as config_module
from ebbtide.config import Door, load_config, variable_name, written_value
from ebbtide.config_cli import as_toml
from ebbtide.config_schema import DERIVED, FIELDS, Kind
from ebbtide.errors import ConfigError
from ebbtide.sizes import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MEMORY = {"memory": {"capacity": "8GiB"}}
HTTP: dict[str, dict[str, object]] = {"http": {"port": 9400}}
DISK = {"disk": {"path": "/cache", "capacity": "200GiB"}}


def refusal(
    extra: Mapping[str, object] | str | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> str:
    """Return the one line with which this configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(extra, environ or {}, file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_those_of_the_design() -> None:
    config = load_config(MEMORY | DISK, {}).config
    assert config.disk is not None
    assert msgspec.structs.asdict(config.memory) == {
        "capacity_bytes": 8 * GIB,
        "load_window_bytes": 256 * MIB,
        "load_reserve_ratio": 0.05,
        "verify": "all",
        "populate": True,
    }
    assert msgspec.structs.asdict(config.disk) == {
        "path": "/cache",
        "capacity_bytes": 200 * GIB,
        "dirty_max_bytes": GIB,
        "commit_batch_bytes": 64 * MIB,
        "commit_interval_s": 0.05,
        "write_after_s": 30.0,
        "admission": "all",
        "read_threads": 8,
        "write_threads": 8,
        "lru_save_interval_s": 60.0,
    }
    assert msgspec.structs.asdict(config.limits) == {
        "drain_timeout_s": 10.0,
        "lookup_timeout_s": 0.05,
        "ghost_entries": 1_000_000,
        "frame_max_bytes": 4 * MIB,
        "connections_max": 256,
        "write_queue_bytes": 128 * MIB,
        "store_window_bytes": GIB,
    }
    assert msgspec.structs.asdict(config.fairness) == {"floor": 0.0, "cap": 1.0, "namespace": ()}
    assert msgspec.structs.asdict(config.connector) == {
        "stores": "eager",
        "prompt_only": False,
        "copy": "auto",
        "layerwise": "auto",
        "always_load": False,
        "compute_margin_ratio": 0.9,
        "store_budget_bytes": 64 * MIB,
        "load_timeout_s": 10.0,
        "store_timeout_s": 5.0,
        "weights_revision": None,
    }
    assert msgspec.structs.asdict(config.server) == {"allow_uids": (), "socket_group": None}
    assert config.socket is None


def test_a_list_is_a_list_in_each_door_and_parts_with_commas_in_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "ebbtide.toml"
    file.write_text('[memory]\ncapacity = "8GiB"\n[server]\nallow_uids = [7, 8]\n')
    assert load_config(None, {}, file).config.server.allow_uids == (7, 8)
    for text, uids in (("9", (9,)), (" 9, 10 ", (9, 10)), ("[11,12]", (11, 12)), ("", ())):
        environ = {"EBBTIDE_SERVER__ALLOW_UIDS": text}
        config = load_config(None, environ, file).config
        assert config.server.allow_uids == uids
        assert written_value(config, "server.allow_uids") == list(uids)
    for wrong in ("nobody", "-1", "1,,2", "4294967295"):
        assert "server.allow_uids" in refusal(MEMORY, {"EBBTIDE_SERVER__ALLOW_UIDS": wrong})
    assert "server.allow_uids" in refusal(MEMORY | {"server": {"allow_uids": "7"}})
    assert "server.allow_uids" in refusal(MEMORY | {"server": {"allow_uids": ["7"]}})


def test_derived_defaults_follow_small_capacities() -> None:
    extra = {
        "memory": {"capacity": "64MiB"},
        "disk": {"path": "/cache", "capacity": "640MiB"},
    }
    config = load_config(extra, {}).config
    assert config.disk is not None
    assert config.memory.load_window_bytes == 16 * MIB
    assert config.disk.dirty_max_bytes == 32 * MIB
    assert config.disk.commit_batch_bytes == 20 * MIB


def test_without_disk_values_there_is_no_disk_tier() -> None:
    loaded = load_config(MEMORY, {})
    assert loaded.config.disk is None
    assert not [path for path in loaded.origins if path.startswith("disk.")]


def test_the_configuration_cannot_be_changed() -> None:
    config = load_config(MEMORY, {}).config
    with pytest.raises(AttributeError):
        config.memory.capacity_bytes = 1  # type: ignore[misc]


def test_doors_have_a_fixed_precedence_and_every_origin_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "ebbtide.toml"
    file.write_text(
        'socket = "/run/file"\n[memory]\ncapacity = "1GiB"\npopulate = false\n'
        '[limits]\nconnections_max = 3\ndrain_timeout = "3s"\n'
    )
    environ = {
        "EBBTIDE_CONFIG": str(file),
        "EBBTIDE_MEMORY__CAPACITY": "2GiB",
        "EBBTIDE_LIMITS__CONNECTIONS_MAX": "7",
        "PATH": "/bin",
    }
    loaded = load_config('{"memory": {"capacity": "4GiB"}}', environ)
    config, origins = loaded
    assert config.memory.capacity_bytes == 4 * GIB
    assert config.limits.connections_max == 7
    assert config.memory.populate is False
    assert config.limits.lookup_timeout_s == 0.05
    assert str(origins["memory.capacity"]) == "engine kv_connector_extra_config"
    assert str(origins["limits.connections_max"]) == "environment EBBTIDE_LIMITS__CONNECTIONS_MAX"
    assert str(origins["socket"]) == f"file {file}"
    assert origins["limits.lookup_timeout"].door is Door.DEFAULT
    assert str(origins["memory.load_window"]) == "default min(memory.capacity / 4, 256MiB)"


def test_the_connector_is_set_through_every_door(tmp_path: Path) -> None:
    file = tmp_path / "ebbtide.toml"
    file.write_text('[connector]\nstores = "lazy"\nprompt_only = true\nload_timeout = "1m"\n')
    environ = {
        "EBBTIDE_CONNECTOR__PROMPT_ONLY": "false",
        "EBBTIDE_CONNECTOR__COMPUTE_MARGIN_RATIO": "0.25",
        "EBBTIDE_CONNECTOR__STORE_BUDGET": "1MiB",
    }
    extra = MEMORY | {"connector": {"store_budget": "2MiB", "weights_revision": "r7"}}
    connector = load_config(extra, environ, file).config.connector
    assert (connector.stores, connector.prompt_only, connector.load_timeout_s) == (
        "lazy",
        False,
        60.0,
    )
    assert connector.compute_margin_ratio == 0.25
    assert connector.store_budget_bytes == 2 * MIB
    assert connector.weights_revision == "r7"


def test_the_named_file_wins_over_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "named.toml"
    file.write_text('[memory]\ncapacity = "1GiB"\n')
    environ = {"EBBTIDE_CONFIG": str(tmp_path / "absent.toml")}
    assert load_config(None, environ, file).config.memory.capacity_bytes == GIB
    assert "cannot be read" in refusal(MEMORY, environ)


def test_variables_are_text_of_every_type() -> None:
    environ = {
        "EBBTIDE_SOCKET": "/run/ebbtide.sock",
        "EBBTIDE_MEMORY__CAPACITY": "1GiB",
        "EBBTIDE_MEMORY__POPULATE": "false",
        "EBBTIDE_MEMORY__VERIFY": "disk",
        "EBBTIDE_MEMORY__LOAD_RESERVE_RATIO": "0.1",
        "EBBTIDE_LIMITS__GHOST_ENTRIES": "5",
        "EBBTIDE_LOG": "debug",
        "EBBTIDE_TRACES": "/traces",
    }
    config = load_config(None, environ).config
    assert config.socket == "/run/ebbtide.sock"
    assert config.memory.populate is False
    assert config.memory.verify == "disk"
    assert config.memory.load_reserve_ratio == 0.1
    assert config.limits.ghost_entries == 5


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_documented_and_has_a_variable_that_reaches_it(path: str) -> None:
    field = FIELDS[path]
    assert field.doc.endswith(".")
    loaded = load_config({**MEMORY, **DISK, **HTTP}, {})
    value = written_value(loaded.config, path)
    text = "/run/s" if value is None else json.dumps(value) if value is True else str(value)
    environ = {
        "EBBTIDE_MEMORY__CAPACITY": "8GiB",
        "EBBTIDE_DISK__PATH": "/cache",
        "EBBTIDE_DISK__CAPACITY": "200GiB",
        "EBBTIDE_HTTP__PORT": "9400",
        variable_name(path): text,
    }
    again = load_config(None, environ)
    assert again.origins[path].detail == variable_name(path)
    if value is not None:
        assert written_value(again.config, path) == value


def test_units_are_in_the_names_of_all_fields_that_have_one() -> None:
    plain = {path for path, field in FIELDS.items() if field.kind is Kind.PLAIN}
    assert plain == {
        "socket",
        "memory.load_reserve_ratio",
        "memory.verify",
        "memory.populate",
        "disk.path",
        "disk.admission",
        "disk.read_threads",
        "disk.write_threads",
        "limits.ghost_entries",
        "limits.connections_max",
        "server.socket_group",
        "http.port",
        "http.host",
        "http.token_file",
        "fairness.floor",
        "fairness.cap",
        "connector.stores",
        "connector.prompt_only",
        "connector.copy",
        "connector.layerwise",
        "connector.always_load",
        "connector.compute_margin_ratio",
        "connector.weights_revision",
    }
    assert set(DERIVED) <= set(FIELDS)


@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        ({"memory": {"capacty": "8GiB"}}, "unknown key 'memory.capacty' (door=engine"),
        ({"memory": {"capacty": "8GiB"}}, "Did you mean 'memory.capacity'?"),
        ({"memmory": {"capacity": "8GiB"}}, "Did you mean 'memory'?"),
        ({"connections_max": 3}, "Did you mean 'limits.connections_max'?"),
        ({"memory": {"size": "8GiB"}}, "Known are capacity, load_reserve_ratio"),
        ({"xyzzy": 1}, "Known are"),
        ({"limits": {"drain_timeout_s": "3s"}}, "Did you mean 'limits.drain_timeout'?"),
        ({"memory.capacity": "8GiB"}, "Write it as a nested table"),
        ({"memory": "8GiB"}, "memory is not a table"),
        ({"disk": None}, "disk is not a table"),
        ({7: 1}, "unknown key '7'"),
        ({"connector": {"store": "lazy"}}, "Did you mean 'connector.stores'?"),
        ({"connector": {"layer_wise": "on"}}, "Did you mean 'connector.layerwise'?"),
        ({"layerwise": "on"}, "Did you mean 'connector.layerwise'?"),
        ({"conector": {"stores": "lazy"}}, "Did you mean 'connector'?"),
        ({"prompt_only": True}, "Did you mean 'connector.prompt_only'?"),
    ],
)
def test_p86_an_unknown_key_is_an_error_with_the_nearest_name(
    extra: dict[str, object], hint: str
) -> None:
    assert hint in refusal(extra)


def test_p86_an_unknown_key_is_an_error_in_every_door(tmp_path: Path) -> None:
    file = tmp_path / "ebbtide.toml"
    file.write_text('[memory]\ncapacity = "8GiB"\n[limits]\ndrain_timout = "3s"\n')
    line = refusal(file=file)
    assert "limits.drain_timout" in line
    assert str(file) in line
    assert "Did you mean 'limits.drain_timeout'?" in line
    line = refusal(MEMORY, {"EBBTIDE_MEMORY__CAPACTY": "1GiB"})
    assert "Did you mean 'EBBTIDE_MEMORY__CAPACITY'?" in line
    assert "environment" in line
    assert "EBBTIDE_MEMORY__CAPACITY" in refusal(MEMORY, {"EBBTIDE_MEMORY_CAPACITY": "1GiB"})
    assert "EBBTIDE_SOCKET" in refusal(MEMORY, {"EBBTIDE_SOKCET": "/run/s"})


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"memory": {"capacity": 8}}, "memory.capacity: 8 is not a size"),
        ({"memory": {"capacity": "8"}}, "memory.capacity: size '8' has no unit"),
        ({"memory": {"capacity": "2g"}}, "Write '2GiB' or '2GB'"),
        ({"memory": {"capacity": None}}, "memory.capacity: None is not a size"),
        ({"memory": {"capacity": True}}, "memory.capacity: True is not a size"),
        ({"limits": {"drain_timeout": 3}}, "limits.drain_timeout: 3 is not a duration"),
        ({"limits": {"connections_max": "2g"}}, "limits.connections_max: Expected `int`"),
        ({"limits": {"connections_max": "2"}}, "limits.connections_max: Expected `int`"),
        ({"limits": {"connections_max": 2.5}}, "limits.connections_max: Expected `int`"),
        ({"limits": {"connections_max": True}}, "limits.connections_max: Expected `int`"),
        ({"limits": {"connections_max": 0}}, "limits.connections_max: Expected `int` >= 1"),
        ({"limits": {"lookup_timeout": "0s"}}, "limits.lookup_timeout: Expected `float` > 0"),
        ({"memory": {"verify": "none"}}, "memory.verify: unknown value 'none'"),
        ({"memory": {"populate": 1}}, "memory.populate: Expected `bool`"),
        ({"memory": {"load_reserve_ratio": 0.9}}, "memory.load_reserve_ratio: Expected"),
        ({"socket": 1}, "socket: Expected `str | null`"),
        ({"fairness": {"cap": 0}}, "fairness.cap: Expected `float` > 0"),
        ({"fairness": {"floor": 1.5}}, "fairness.floor: Expected `float` <= 1"),
        ({"fairness": {"namespace": [{"floor": 0.1}]}}, "missing required field `match`"),
        ({"fairness": {"namespace": [{"match": "m", "flor": 1}]}}, "unknown field `flor`"),
        ({"fairness": {"namespace": {"match": "m"}}}, "fairness.namespace: Expected `array`"),
        ({"connector": {"stores": "later"}}, "Choose one of eager, lazy"),
        ({"disk": {"admission": "secnd_use"}}, "Did you mean 'second_use'? Choose one of all"),
        ({"connector": {"layerwise": True}}, "connector.layerwise: Expected `str`"),
        ({"connector": {"layerwise": "maybe"}}, "connector.layerwise: unknown value 'maybe'"),
        ({"connector": {"compute_margin_ratio": 0}}, "connector.compute_margin_ratio: Expected"),
        ({"connector": {"compute_margin_ratio": 1.1}}, "connector.compute_margin_ratio: Expected"),
        ({"connector": {"store_budget": 64}}, "connector.store_budget: 64 is not a size"),
        ({"connector": {"store_budget": "0B"}}, "connector.store_budget: Expected `int` >= 1"),
        ({"connector": {"load_timeout": "10"}}, "connector.load_timeout: duration '10' has no"),
        ({"connector": {"store_timeout": "0s"}}, "connector.store_timeout: Expected `float` > 0"),
        ({"connector": {"weights_revision": ""}}, "connector.weights_revision: Expected `str`"),
    ],
)
def test_p86_a_wrong_type_names_path_and_door(extra: dict[str, object], problem: str) -> None:
    line = refusal(extra)
    assert problem in line
    assert "kv_connector_extra_config" in line


def test_p86_a_wrong_type_in_a_variable_names_the_variable() -> None:
    line = refusal(MEMORY, {"EBBTIDE_LIMITS__CONNECTIONS_MAX": "2g"})
    assert "limits.connections_max" in line
    assert "EBBTIDE_LIMITS__CONNECTIONS_MAX" in line


def test_p86_a_deprecated_name_works_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(config_module.RENAMED, "memory.size", "memory.capacity")
    with caplog.at_level(logging.WARNING):
        loaded = load_config({"memory": {"size": "1GiB"}}, {})
    assert loaded.config.memory.capacity_bytes == GIB
    assert [record.getMessage() for record in caplog.records] == [
        "memory.size is now spelled memory.capacity (engine kv_connector_extra_config); "
        "the old name will go"
    ]
    assert load_config(None, {"EBBTIDE_MEMORY__SIZE": "2GiB"}).config.memory.capacity_bytes
    both = {"memory": {"size": "1GiB", "capacity": "2GiB"}}
    assert "memory.capacity is given under an old and a new name" in refusal(both)
    variables = {"EBBTIDE_MEMORY__SIZE": "1GiB", "EBBTIDE_MEMORY__CAPACITY": "1GiB"}
    assert "memory.capacity is given under an old and a new name" in refusal(None, variables)


def test_p86_contradictory_sizes_are_refused_with_both_numbers() -> None:
    line = refusal({"memory": {"capacity": "1GiB", "load_window": "2GiB"}})
    assert "memory.load_window is 2GiB, more than memory.capacity with 1GiB" in line
    disk = {"path": "/cache", "capacity": "4GiB", "dirty_max": "3GiB"}
    line = refusal({"memory": {"capacity": "2GiB"}, "disk": disk})
    assert "disk.dirty_max is 3GiB, more than memory.capacity with 2GiB" in line
    disk = {"path": "/cache", "capacity": "4GiB", "commit_batch": "5GiB"}
    assert "disk.commit_batch is 5GiB" in refusal(MEMORY | {"disk": disk})


def test_p86_a_disk_smaller_than_memory_is_allowed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_config(MEMORY | {"disk": {"path": "/cache", "capacity": "4GiB"}}, {})
    assert "disk.capacity is below memory.capacity" in caplog.text


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ("{", "the engine's text is not JSON"),
        ('{"memory": {}, "memory": {}}', "a key is given twice"),
        ("[]", "is not an object"),
        ({}, "memory.capacity is not set"),
        ({"disk": {"path": "/cache"}} | MEMORY, "disk.capacity is not set"),
        ({"disk": {"read_threads": 2}} | MEMORY, "disk.path is not set"),
        ({"socket": "run/s"} | MEMORY, "socket is not an absolute path"),
        ({"socket": ""} | MEMORY, "socket is not an absolute path"),
        ({"socket": "/" + "s" * 107} | MEMORY, "108 bytes, and Linux allows 107"),
        (MEMORY | {"disk": {"path": "~/c", "capacity": "1GiB"}}, "disk.path is not an absolute"),
        ({"memory": {"capacity": "16383B"}}, "memory.capacity is 16383B, and the least that works"),
        (MEMORY | {"disk": {"path": "/c", "capacity": "1MiB"}}, "the least that works is 16MiB"),
    ],
)
def test_other_mistakes_are_named(extra: dict[str, object] | str, problem: str) -> None:
    assert problem in refusal(extra)


def test_a_missing_value_says_how_to_give_it() -> None:
    assert "EBBTIDE_MEMORY__CAPACITY" in refusal({})


@pytest.mark.parametrize("content", [b"memory = [", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ebbtide.toml"
    file.write_bytes(content)
    line = refusal(file=file)
    assert "is not TOML" in line
    assert str(file) in line


def test_a_variable_that_sizes_a_test_is_no_setting() -> None:
    environ = {"EBBTIDE_MEMORY__CAPACITY": "1GiB", "EBBTIDE_TEST_KILLS": "50"}
    assert load_config(environ=environ).config.memory.capacity_bytes == 1 << 30


# -- shares of the namespaces ---------------------------------------------------------------------

RULES = [{"match": "model=large", "floor": 0.5}, {"match": "test", "cap": 0.2, "floor": 0.0}]


def test_shares_of_namespaces_come_through_every_door(tmp_path: Path) -> None:
    file = tmp_path / "ebbtide.toml"
    file.write_text(
        '[fairness]\nfloor = 0.1\ncap = 0.8\n[[fairness.namespace]]\nmatch = "model=large"\n'
        'floor = 0.5\n[[fairness.namespace]]\nmatch = "test"\ncap = 0.2\nfloor = 0.0\n'
    )
    found = [
        load_config(MEMORY, {}, file),
        load_config(MEMORY | {"fairness": {"floor": 0.1, "cap": 0.8, "namespace": RULES}}, {}),
        load_config(
            MEMORY | {"fairness": {"floor": 0.1, "cap": 0.8}},
            {"EBBTIDE_FAIRNESS__NAMESPACE": json.dumps(RULES)},
        ),
    ]
    assert [loaded.config.fairness for loaded in found] == [found[0].config.fairness] * 3
    assert found[0].config.fairness.namespace[0].cap is None
    assert written_value(found[0].config, "fairness.namespace") == RULES


def test_shares_that_are_shown_load_to_the_same(tmp_path: Path) -> None:
    loaded = load_config(MEMORY | {"fairness": {"floor": 0.1, "namespace": RULES}}, {})
    file = tmp_path / "shown.toml"
    file.write_text(as_toml(loaded, origin=False))
    assert load_config(None, {}, file).config == loaded.config


def test_a_list_of_shares_that_is_no_json_names_the_variable() -> None:
    line = refusal(MEMORY, {"EBBTIDE_FAIRNESS__NAMESPACE": "model=large"})
    assert "fairness.namespace" in line
    assert "EBBTIDE_FAIRNESS__NAMESPACE" in line


def test_floors_that_do_not_add_up_are_refused() -> None:
    def with_shares(floor: float, *others: float) -> dict[str, object]:
        rules = [{"match": str(other), "floor": other} for other in others]
        return MEMORY | {"fairness": {"floor": floor, "namespace": rules}}

    load_config(with_shares(0.1, 0.2, 0.3, 0.4), {})
    assert "add up to 1.1, and the whole is 1" in refusal(with_shares(0.2, 0.2, 0.3, 0.4))
    load_config(with_shares(0.0, 1.0), {})


def test_a_floor_above_its_cap_is_refused() -> None:
    assert "fairness has a floor of 0.5, more than its cap of 0.4" in refusal(
        MEMORY | {"fairness": {"floor": 0.5, "cap": 0.4}}
    )
    rule = {"match": "m", "cap": 0.05}
    assert "fairness.namespace 'm' has a floor of 0.1" in refusal(
        MEMORY | {"fairness": {"floor": 0.1, "namespace": [rule]}}
    )
