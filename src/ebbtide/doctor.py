"""`ebbtide doctor`: look at a set-up before an engine starts with it, one line for each check."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.allocator.hashing import SEED_VARIABLE
from ebbtide.config import PREFIX, RESERVED, TEST_PREFIX, load_config
from ebbtide.doctor_checks import (
    Finding,
    Verdict,
    check_ebbtide,
    check_hash_algorithm,
    check_hash_seed,
    check_memfd,
    check_memory,
    check_memory_lock,
    check_python,
    check_shared_memory,
    check_torch,
    check_transfer_config,
    check_vllm,
    ok,
    refused,
    warning,
)
from ebbtide.doctor_places import check_disk, check_socket
from ebbtide.errors import ConfigError
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from ebbtide.config import Config

FILE_VARIABLE = PREFIX + "CONFIG"
MOUNTS = Path("/proc/self/mountinfo")


class Setup(NamedTuple):
    """What is to be checked. `config` is None when there is none, or none that loads."""

    transfer: Mapping[str, object] | None  # vLLM's --kv-transfer-config
    config: Config | None
    configuration: Finding
    hash_algorithm: str | None
    hash_seed: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--kv-transfer-config", metavar="JSON", help="what vLLM is given under that name"
    )
    source.add_argument("--config", metavar="FILE", help="TOML configuration of a store")
    source.add_argument("--extra", metavar="JSON", help="the connector's own settings")
    parser.add_argument(
        "--prefix-caching-hash-algo", metavar="NAME", help="what vLLM is given under that name"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _object(text: str, option: str) -> dict[str, object]:
    """Raises `ConfigError` for text that is no JSON object: of that nothing can be checked."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{option} is not JSON: {error}", next_step="Quote it as one word of the shell"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{option} is not a JSON object", next_step="Write {...}")
    return tree


def _is_setting(variable: str) -> bool:
    ours = variable.startswith(PREFIX) and not variable.startswith(TEST_PREFIX)
    return ours and (variable == FILE_VARIABLE or variable not in RESERVED)


def _read_setup(args: argparse.Namespace, environ: Mapping[str, str]) -> Setup:
    transfer = extra = None
    if args.kv_transfer_config is not None:
        transfer = _object(args.kv_transfer_config, "--kv-transfer-config")
        extra = transfer.get("kv_connector_extra_config") or {}
    elif args.extra is not None:
        extra = _object(args.extra, "--extra")
    config, finding = _load(extra, environ, args.config)
    return Setup(
        transfer, config, finding, args.prefix_caching_hash_algo, environ.get(SEED_VARIABLE)
    )


def _load(
    extra: object, environ: Mapping[str, str], file: str | None
) -> tuple[Config | None, Finding]:
    check = "configuration"
    if extra is None and file is None and not any(map(_is_setting, environ)):
        return None, warning(
            check,
            "none is given: sizes, disk and socket are not checked",
            "Give --kv-transfer-config, --config or --extra",
        )
    try:
        # Whatever it is instead of a mapping, the loader refuses it in its own words.
        config = load_config(extra, environ, file).config  # type: ignore[arg-type]
    except ConfigError as error:
        return None, refused(check, error)
    parts = [f"memory {format_size(config.memory.capacity_bytes)}"]
    if config.disk is not None:
        parts.append(f"disk {format_size(config.disk.capacity_bytes)} in {config.disk.path}")
    parts.append("private store" if config.socket is None else f"store at {config.socket}")
    return config, ok(check, ", ".join(parts))


def _lasts(config: Config | None) -> bool:
    """Whether blocks are meant for other processes than the one that made them."""
    return config is None or config.disk is not None or config.socket is not None


def examine(setup: Setup) -> list[Finding]:
    """Run every check that `setup` allows. Reads the machine; starts and leaves nothing."""
    config = setup.config
    findings = [
        check_python(sys.version_info[:3]),
        check_ebbtide(),
        check_vllm(),
        check_torch(),
        setup.configuration,
    ]
    if setup.transfer is not None:
        findings += check_transfer_config(setup.transfer)
    findings += [
        check_hash_algorithm(setup.hash_algorithm, setup.hash_seed, lasting=_lasts(config)),
        check_hash_seed(setup.hash_seed),
        check_memfd(),
        check_shared_memory(),
    ]
    if config is None:
        return findings
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    findings += [check_memory(config.memory), check_memory_lock(config.memory, limit_bytes)]
    if config.disk is not None:
        findings += check_disk(
            config.disk, Path("/proc/self/mountinfo").read_text(errors="replace")
        )
    return [*findings, *check_socket(config.socket)]


def as_text(findings: Sequence[Finding]) -> str:
    """One line for each check: verdict, name, what was found and what to do."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for check, verdict, found, next_step in findings:
        words = f"{found}. {next_step}" if next_step else found
        lines.append(f"{verdict:<8} {check:<{width}}  {' '.join(words.split())}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Check and print. 0 without a problem, else 1; `ConfigError` for what cannot be read."""
    findings = examine(_read_setup(args, os.environ))
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        print(as_text(findings))
    return 1 if any(finding.verdict is Verdict.PROBLEM for finding in findings) else 0
