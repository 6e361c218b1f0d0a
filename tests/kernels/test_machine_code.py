"""What the compiler makes of the kernels for real GPUs: wide accesses, no spills, matrix units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("triton", reason="NO TRITON: kernels are not compiled (pip install triton)")

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = Path(__file__).with_name("compile_kernels.py")
ARCHITECTURES = ("80", "90", "100")
# Bytes of shared memory that one program may have, by architecture.
SHARED_MAX = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}
MATRIX_UNITS = {"80": "HMMA", "90": "HMMA|HGMMA", "100": "HMMA|UTCHMMA"}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, dict[str, Any]]:
    """Kernel and architecture to what was made of it. Printed, whatever pytest captures."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    # Two processes: most of the time is the compiler's.
    halves = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *part],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in (ARCHITECTURES[:1], ARCHITECTURES[1:])
    ]
    found: dict[str, dict[str, Any]] = {}
    for process in halves:
        out, errors = process.communicate(timeout=110)
        assert process.returncode == 0, errors[-3000:]
        found |= json.loads(out)
    lines = [
        f"{name:<28} {one['registers']:>4} registers {one['shared_bytes']:>7} B shared"
        f" {one['spilled_bytes']} B spilled {one['instructions']}"
        for name, one in found.items()
    ]
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write("\n".join(["", *lines, ""]))
    return found


def accesses(one: Mapping[str, Any], *names: str) -> int:
    return sum(int(one["instructions"].get(name, 0)) for name in names)


def test_nothing_is_spilled_and_shared_memory_suffices(made: dict[str, dict[str, Any]]) -> None:
    assert len(made) == 4 * len(ARCHITECTURES) + 2
    for name, one in made.items():
        assert one["spilled_bytes"] == 0 == accesses(one, "LDL", "STL"), (name, one)
        assert one["shared_bytes"] <= SHARED_MAX[name.rpartition("_")[2]], (name, one)


@pytest.mark.parametrize("name", ["gather sm_80", "gather sm_90", "gather sm_100", "scatter sm_90"])
def test_copies_move_16_bytes_at_a_time(made: dict[str, dict[str, Any]], name: str) -> None:
    """A tile of 32 KiB by 8 warps: 8 loads of 16 bytes a thread, all in flight, then 8 stores."""
    one = made[name]
    assert accesses(one, "LDG.E.128") == 8 == accesses(one, "STG.E.128"), one
    assert one["registers"] <= 128, one


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_has_wide_loads_and_matrix_units(
    made: dict[str, dict[str, Any]], architecture: str
) -> None:
    for name, one in made.items():
        if not name.endswith(f"sm_{architecture}") or name.split()[0] not in ("decode", "prefill"):
            continue
        asynchronous = accesses(one, "LDGSTS.E.BYPASS.128")
        assert asynchronous + accesses(one, "LDG.E.128") >= 8, (name, one)
        assert asynchronous >= 8 or "float32" in name, (name, one)
        if "float32" not in name:
            assert accesses(one, *MATRIX_UNITS[architecture].split("|")) > 0, (name, one)
