"""`ebbtide config`: check a file before a start does, show what a start would use, write vLLM's."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import msgspec

from ebbtide.config import LoadedConfig, check_fits, load_config, parse_list, written_value
from ebbtide.config_schema import (
    FIELDS,
    VLLM_CONNECTOR,
    VLLM_HASH_FLAG,
    VLLM_LOAD_FAILURE_POLICY,
    VLLM_MODULE_PATH,
    VLLM_ROLES,
    Kind,
)
from ebbtide.connectors.http.token import read_token
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `check`, `show` and `vllm`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="check a TOML file together with the environment", allow_abbrev=False
    )
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--any-machine",
        action="store_true",
        help="do not compare the sizes with this machine's memory and disk",
    )
    show = actions.add_parser(
        "show", help="print the effective configuration as TOML", allow_abbrev=False
    )
    show.add_argument("--file", metavar="FILE", help="instead of the one EBBTIDE_CONFIG names")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    _add_vllm_arguments(
        actions.add_parser(
            "vllm",
            help="print the JSON for vLLM's --kv-transfer-config",
            description='Use it as: vllm serve MODEL --kv-transfer-config "$(ebbtide config vllm '
            f'--memory 16GiB)" {VLLM_HASH_FLAG}',
            allow_abbrev=False,
        )
    )


def _add_vllm_arguments(vllm: argparse.ArgumentParser) -> None:
    vllm.add_argument(
        "--memory", metavar="SIZE", required=True, help="size of the arena, all ranks together"
    )
    vllm.add_argument("--disk", metavar="SIZE", help="size of the disk tier; needs --dir")
    vllm.add_argument("--dir", metavar="PATH", help="directory of the disk tier; needs --disk")
    vllm.add_argument("--socket", metavar="PATH", help="of a store that engines share")
    vllm.add_argument("--role", choices=VLLM_ROLES, default=VLLM_ROLES[0], help="kv_role")
    vllm.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other setting, like connector.stores=lazy; may be repeated",
    )


def _literal(value: object) -> str:
    # TOML's strings, numbers and truth values are spelled as in JSON, but for this one character.
    if isinstance(value, list):
        tables = (", ".join(f"{k} = {_literal(v)}" for k, v in table.items()) for table in value)
        return f"[{', '.join(f'{{{table}}}' for table in tables)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_toml(loaded: LoadedConfig, *, origin: bool) -> str:
    """Return the configuration as TOML that loads to the same; each line says what it is for."""
    rows = []
    section = ""
    for path, came_from in loaded.origins.items():
        head, _, name = path.rpartition(".")
        if head != section:
            section = head
            rows += [("", ""), (f"[{section}]", "")]
        value = written_value(loaded.config, path)
        line = f"# {name} is not set" if value is None else f"{name} = {_literal(value)}"
        rows.append((line, str(came_from) if origin else FIELDS[path].doc))
    width = max(len(line) for line, _ in rows)
    return "\n".join(f"{line:<{width}}  # {comment}" if comment else line for line, comment in rows)


def as_json(loaded: LoadedConfig, *, origin: bool) -> str:
    """Return the configuration as JSON that the engine's door takes; with origins, a list."""
    if origin:
        rows = [
            {
                "path": path,
                "value": written_value(loaded.config, path),
                "origin": str(came_from),
                "doc": FIELDS[path].doc,
            }
            for path, came_from in loaded.origins.items()
        ]
        return json.dumps(rows, indent=2)
    tree: dict[str, object] = {}
    for path in loaded.origins:
        section, _, name = path.rpartition(".")
        place = tree.setdefault(section, {}) if section else tree
        if isinstance(place, dict):
            place[name] = written_value(loaded.config, path)
    return json.dumps(tree, indent=2)


def _absolute(path: str, option: str) -> str:
    if not path:  # would be the working directory
        raise ConfigError(f"{option} is empty", next_step="Name a path")
    return os.path.abspath(os.path.expanduser(path))


def _typed(path: str, text: str) -> object:
    """Return `text` as JSON has to spell it; what does not convert is refused when it is loaded."""
    field = FIELDS.get(path)
    if field is None or field.kind in (Kind.SIZE, Kind.DURATION):
        return text
    given = parse_list(text) if field.kind is Kind.LIST else text
    try:
        return msgspec.convert(given, field.type, strict=False)
    except msgspec.ValidationError:
        return text


def _vllm_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return what the options give, by path. Raises `ConfigError` for half a disk or a repeat."""
    if (args.disk is None) != (args.dir is None):
        given, lacking = ("--dir", "--disk") if args.disk is None else ("--disk", "--dir")
        raise ConfigError(
            f"{given} is given without {lacking}",
            next_step="A disk tier needs both: --disk 200GiB --dir /var/cache/ebbtide",
        )
    settings: dict[str, object] = {"memory.capacity": args.memory}
    if args.disk is not None:
        settings["disk.path"] = _absolute(args.dir, "--dir")
        settings["disk.capacity"] = args.disk
    if args.socket is not None:
        settings["socket"] = _absolute(args.socket, "--socket")
    for pair in args.set:
        path, is_pair, text = pair.partition("=")
        if not is_pair:
            raise ConfigError(
                f"--set {pair!r} has no value", next_step="Write --set connector.stores=lazy"
            )
        if path in settings:
            raise ConfigError(f"{path} is given twice", next_step="Remove one of them")
        settings[path] = _typed(path, text)
    return settings


def vllm_transfer_config(settings: Mapping[str, object], role: str) -> dict[str, object]:
    """Return the object for vLLM's `--kv-transfer-config`. `settings` are ours, by written path."""
    extra: dict[str, object] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        # What is no section's key is unknown, and refused under the name it was given by.
        place = extra.setdefault(section, {}) if name else extra
        if isinstance(place, dict):
            place[name or section] = value
    return {
        "kv_connector": VLLM_CONNECTOR,
        "kv_connector_module_path": VLLM_MODULE_PATH,
        "kv_role": role,
        "kv_load_failure_policy": VLLM_LOAD_FAILURE_POLICY,
        "kv_connector_extra_config": extra,
    }


def _print_vllm(args: argparse.Namespace) -> None:
    wanted = vllm_transfer_config(_vllm_settings(args), args.role)
    # Together with this environment: vLLM is most often started from the same one.
    load_config(json.dumps(wanted["kv_connector_extra_config"]), os.environ)
    print(json.dumps(wanted, separators=(",", ":")))  # ASCII only: paths of any bytes survive
    if sys.stdout.isatty():
        print(f"Give vLLM also: {VLLM_HASH_FLAG}", file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Returns 0; what is wrong raises `ConfigError`."""
    if args.action == "vllm":
        _print_vllm(args)
        return 0
    if args.action == "check":
        config = load_config(environ=os.environ, file=args.file).config
        if not args.any_machine:
            check_fits(config)
            if config.http is not None:
                read_token(config.http)
        print(f"{args.file}: ok")
        return 0
    loaded = load_config(environ=os.environ, file=args.file)
    render = as_json if args.json else as_toml
    print(render(loaded, origin=args.origin))
    return 0
