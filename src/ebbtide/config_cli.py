"""`ebbtide config`: check a file before a start does, and show what a start would use."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from ebbtide.config import LoadedConfig, check_fits, load_config, written_value
from ebbtide.config_schema import FIELDS

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `check` and `show`."""
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


def _literal(value: object) -> str:
    # TOML's strings, numbers and truth values are spelled as in JSON, but for this one character.
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


def run(args: argparse.Namespace) -> int:
    """Do what was asked. Returns 0; what is wrong raises `ConfigError`."""
    if args.action == "check":
        config = load_config(environ=os.environ, file=args.file).config
        if not args.any_machine:
            check_fits(config)
        print(f"{args.file}: ok")
        return 0
    loaded = load_config(environ=os.environ, file=args.file)
    render = as_json if args.json else as_toml
    print(render(loaded, origin=args.origin))
    return 0
