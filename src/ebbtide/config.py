"""The configuration: one schema, four doors, and the origin of every value.

Precedence, highest first: the JSON of the engine (`kv_connector_extra_config`), the environment
(`EBBTIDE_MEMORY__CAPACITY=8GiB`), a TOML file (named by the caller or by `EBBTIDE_CONFIG`), the
defaults. A key that nobody knows is an error in each of them, so that a typing error can never
mean "use the default".
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from ebbtide.config_checks import (
    capacity_table,
    check_consistent,
    check_disk_fits,
    check_fits,
    check_memory_fits,
    check_record_fits,
)
from ebbtide.config_schema import (
    DERIVED,
    FIELDS,
    OPTIONAL_SECTIONS,
    SECTIONS,
    Config,
    ConnectorConfig,
    DiskConfig,
    FairnessConfig,
    Field,
    HttpConfig,
    Kind,
    LimitsConfig,
    MemoryConfig,
    ServerConfig,
)
from ebbtide.errors import ConfigError, unknown_name
from ebbtide.sizes import exact_duration, exact_size, parse_duration, parse_size

__all__ = [
    "Config",
    "ConnectorConfig",
    "DiskConfig",
    "Door",
    "FairnessConfig",
    "HttpConfig",
    "LimitsConfig",
    "LoadedConfig",
    "MemoryConfig",
    "Origin",
    "ServerConfig",
    "capacity_table",
    "check_consistent",
    "check_disk_fits",
    "check_fits",
    "check_memory_fits",
    "check_record_fits",
    "load_config",
    "written_value",
]

_log = logging.getLogger(__name__)

PREFIX = "EBBTIDE_"
# Variables with our prefix that are no configuration: the file, the log level, whether compiled
# code is left out, and test data.
RESERVED = frozenset(
    PREFIX + name
    for name in ("CONFIG", "LOG", "PURE", "HTTP_TOKEN", "GOLDEN", "TRACES", "ORACLE_TRACES")
)
TEST_PREFIX = PREFIX + "TEST_"  # how long a test runs: never a setting
# Old spelling -> present spelling, both as paths. An old one still works, with one warning.
RENAMED: dict[str, str] = {}


Written = str | int | float | bool | list[Any] | None  # as a configuration spells a value


class Door(StrEnum):
    """Where a value came in."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class Origin(NamedTuple):
    """A door, and within it the variable, the file or the formula."""

    door: Door
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.door.value} {self.detail}" if self.detail else self.door.value


class LoadedConfig(NamedTuple):
    """A resolved configuration and, for each written path in it, where the value came from."""

    config: Config
    origins: Mapping[str, Origin]


class _Given(NamedTuple):
    value: object
    origin: Origin


def _unknown(prefix: str, key: str, known: Iterable[str], origin: Origin) -> NoReturn:
    """Refuse `prefix + key`, and name the nearest of `known`, which are spelled without prefix."""
    # First the right key in the wrong section, then one that is spelled alike.
    close = [path for path in FIELDS if path.rpartition(".")[2] == key]
    close += [prefix + name for name in difflib.get_close_matches(key, known, n=1)]
    hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(sorted(known))}"
    raise ConfigError(f"unknown key {prefix + key!r}", next_step=hint, door=origin)


def _renamed(path: str, origin: Origin) -> str:
    if path not in RENAMED:
        return path
    _log.warning("%s is now spelled %s (%s); the old name will go", path, RENAMED[path], origin)
    return RENAMED[path]


def _flatten(tree: Mapping[Any, object], origin: Origin, prefix: str = "") -> dict[str, _Given]:
    """Return the values of `tree` by path. Raises `ConfigError` at the first unknown key."""
    found: dict[str, _Given] = {}
    for key, value in tree.items():
        path = _renamed(f"{prefix}{key}", origin)
        if not prefix and key in SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{key} is not a table of keys", next_step="Leave it out", door=origin
                )
            new = _flatten(value, origin, f"{key}.")
        elif "." in str(key):
            raise ConfigError(
                f"key {key!r} has a dot", next_step="Write it as a nested table", door=origin
            )
        elif path in FIELDS:
            new = {path: _Given(value, origin)}
        else:
            here = [name.removeprefix(prefix) for name in FIELDS if name.startswith(prefix)]
            known = {*(name for name in here if "." not in name), *([] if prefix else SECTIONS)}
            _unknown(prefix, str(key), known, origin)
        if twice := found.keys() & new.keys():
            raise ConfigError(
                f"{min(twice)} is given under an old and a new name",
                next_step="Remove the old one",
                door=origin,
            )
        found.update(new)
    return found


def _from_file(file: str | os.PathLike[str]) -> dict[str, _Given]:
    origin = Origin(Door.FILE, os.fspath(file))
    try:
        tree = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration file cannot be read: {error.strerror}",
            next_step="Check the path and its permissions",
            file=file,
        ) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(
            f"the configuration file is not TOML: {error}", next_step="Correct it", file=file
        ) from error
    return _flatten(tree, origin)


def variable_name(path: str) -> str:
    """Return the environment variable of a written path."""
    return PREFIX + path.upper().replace(".", "__")


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    paths = {variable_name(path): path for path in (*FIELDS, *RENAMED)}
    found: dict[str, _Given] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in RESERVED or name.startswith(TEST_PREFIX):
            continue
        origin = Origin(Door.ENVIRONMENT, name)
        if name not in paths:
            known = [variable.removeprefix(PREFIX) for variable in (*paths, *RESERVED)]
            _unknown(PREFIX, name.removeprefix(PREFIX), known, Origin(Door.ENVIRONMENT))
        path = _renamed(paths[name], origin)
        if path in found:
            raise ConfigError(
                f"{path} is given under an old and a new name",
                next_step="Remove the old one",
                door=origin,
            )
        found[path] = _Given(environ[name], origin)
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key is given twice in one object")
    return tree


def _from_engine(extra: Mapping[str, object] | str) -> dict[str, _Given]:
    origin = Origin(Door.ENGINE, "kv_connector_extra_config")
    tree: object = extra
    if isinstance(extra, str):
        try:
            tree = json.loads(extra, object_pairs_hook=_unique)
        except ValueError as error:
            raise ConfigError(
                f"the engine's text is not JSON: {error}", next_step="Correct it", door=origin
            ) from error
    if not isinstance(tree, Mapping):
        raise ConfigError(
            "the engine's configuration is not an object",
            next_step='Write {"memory": {"capacity": "8GiB"}}',
            door=origin,
        )
    return _flatten(tree, origin)


def parse_list(text: str) -> list[str]:
    """Return the parts of "1000, 1001", or of "[1000, 1001]"."""
    inside = text.strip().removeprefix("[").removesuffix("]")
    return [part.strip() for part in inside.split(",")] if inside.strip() else []


def _convert(field: Field, given: _Given) -> object:
    """Return the value as the program uses it. Raises `ConfigError` that names path and door."""
    value = given.value
    # Everything in the environment is text; in the other doors a quoted number is a mistake.
    text_only = given.origin.door is Door.ENVIRONMENT
    try:
        if field.kind is Kind.LIST and text_only:
            value = parse_list(str(value))
        elif field.kind is Kind.TABLES and text_only:
            return msgspec.json.decode(str(value), type=field.type)
        elif field.kind in (Kind.SIZE, Kind.DURATION):
            if not isinstance(value, str):
                example = "8GiB" if field.kind is Kind.SIZE else "250ms"
                raise ConfigError(
                    f"{value!r} is not {field.kind.value}",
                    next_step=f"Write a number and a unit as text, like {example!r}",
                )
            value = parse_size(value) if field.kind is Kind.SIZE else parse_duration(value)
        if field.choices and isinstance(value, str) and value not in field.choices:
            raise unknown_name("value", value, field.choices)
        return msgspec.convert(value, field.type, strict=not text_only)
    except msgspec.DecodeError as error:  # not JSON, or not what it should be
        raise ConfigError(
            f"{field.path}: {error}, was {given.value!r}", next_step=field.doc, door=given.origin
        ) from error
    except ConfigError as error:
        raise ConfigError(
            f"{field.path}: {error.problem}", next_step=error.next_step, door=given.origin
        ) from error


def _required(path: str) -> NoReturn:
    raise ConfigError(
        f"{path} is not set",
        next_step=f"Set it in the engine's extra config, in {variable_name(path)} or in the file",
    )


def load_config(
    extra: Mapping[str, object] | str | None = None,
    environ: Mapping[str, str] = os.environ,
    file: str | os.PathLike[str] | None = None,
) -> LoadedConfig:
    """Return the configuration that the four doors give together, and the origin of each value.

    `extra` is the engine's JSON, as text or decoded. `file` wins over `EBBTIDE_CONFIG`. Raises
    `ConfigError` for anything unknown, malformed, missing or contradictory; looks at no machine.
    """
    given: dict[str, _Given] = {}
    named = file if file is not None else environ.get(PREFIX + "CONFIG")
    if named:
        given.update(_from_file(named))
    given.update(_from_environment(environ))
    if extra is not None:
        given.update(_from_engine(extra))

    sections = {path.partition(".")[0] for path in given}
    absent = [name for name in OPTIONAL_SECTIONS if name not in sections]
    fields = {path: field for path, field in FIELDS.items() if path.partition(".")[0] not in absent}
    # What is there is judged before what is missing.
    values: dict[str, Any] = {path: _convert(fields[path], value) for path, value in given.items()}
    origins: dict[str, Origin] = {}
    for path, field in fields.items():
        if path in given:
            origins[path] = given[path].origin
        elif path in DERIVED:
            origins[path] = Origin(Door.DEFAULT, DERIVED[path].formula)
        elif field.default is not msgspec.NODEFAULT:
            values[path], origins[path] = field.default, Origin(Door.DEFAULT)
        else:
            _required(path)
    for path, derived in DERIVED.items():
        if path in fields and path not in values:
            values[path] = derived.compute(values)

    config = _assemble(fields, values)
    check_consistent(config)
    if config.disk is not None and config.disk.capacity_bytes < config.memory.capacity_bytes:
        _log.warning("disk.capacity is below memory.capacity: a restart loses what exceeds it")
    return LoadedConfig(config, origins)


def _assemble(fields: Mapping[str, Field], values: Mapping[str, Any]) -> Config:
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for path, field in fields.items():
        section = path.rpartition(".")[0]
        place = sections.setdefault(section, {}) if section else top
        place[field.attribute] = values[path]
    for name, attributes in sections.items():
        top[name] = SECTIONS[name](**attributes)
    return Config(**top)


def written_value(config: Config, path: str) -> Written:
    """Return the value at `path` as a configuration spells it: sizes and durations as text."""
    field = FIELDS[path]
    section = path.rpartition(".")[0]
    value = getattr(getattr(config, section) if section else config, field.attribute)
    if field.kind is Kind.SIZE:
        return exact_size(value)
    if field.kind is Kind.TABLES:
        tables = [msgspec.structs.asdict(table) for table in value]
        return [{k: v for k, v in table.items() if v is not None} for table in tables]
    if field.kind is Kind.LIST:
        return list(value)
    written: Written = exact_duration(value) if field.kind is Kind.DURATION else value
    return written
