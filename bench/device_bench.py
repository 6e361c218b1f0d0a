"""`ebbtide bench device`: one prepared run for a machine with a GPU, in the order of what matters.

The first minute decides whether the design stands there at all: a memfd known to the device, and a
process that dies in the middle of a copy. Then what is exact, what the machine can do, and what the
parts reach of it. A stage that fails is a line, and the next one runs.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ebbtide.bench import device_attention, device_copies, device_layers, device_restore
from ebbtide.bench.device_rig import DeviceRig
from ebbtide.errors import ConfigError
from ebbtide.tiers.supervisor import outcome_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

BUDGET_S = 330.0
LEFT_MIN_S = 10.0
STAGES: dict[str, Callable[[DeviceRig], None]] = {
    "first_minute": device_copies.first_minute,
    "exactness": device_copies.exactness,
    "attention_exactness": device_attention.correctness,
    "ceilings": device_copies.ceilings,
    "copies": device_copies.copies,
    "decode": device_attention.decode,
    "prefill": device_attention.prefill,
    "interference": device_copies.interference,
    "restore": device_restore.restore,
    "layerwise": device_layers.layerwise,
}
NEED_TRITON = ("attention_exactness", "decode", "prefill")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's options."""
    parser.add_argument("--dry", action="store_true", help="on the CPU: the same code, tiny sizes")
    parser.add_argument("--only", help=f"stages, of {','.join(STAGES)}")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds (default 330)")


def run(args: argparse.Namespace) -> int:
    """Run the stages. 0 when all findings are as they should be, else 1."""
    names = args.only.split(",") if args.only else list(STAGES)
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise ConfigError(
            "There is no such stage", next_step=f"Known are {', '.join(STAGES)}.", stage=unknown[0]
        )
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
    rig = DeviceRig(dry=args.dry, budget_s=args.budget, as_json=args.json)
    rig.row(
        "device",
        name="cpu" if args.dry else torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=_version("triton"),
    )
    for name in names:
        if rig.left_s < LEFT_MIN_S:
            rig.row(f"{name}.skipped", left_s=rig.left_s)
            continue
        if name in NEED_TRITON and find_spec("triton") is None:
            rig.row(f"{name}.skipped", ok=args.dry, reason="Triton is not installed")
            continue
        started = time.monotonic()
        fault = outcome_of(STAGES[name], rig)
        if isinstance(fault, KeyboardInterrupt | SystemExit):
            raise fault
        if fault is not None:
            rig.row(f"{name}.failed", ok=False, error=f"{type(fault).__name__}: {fault}"[:600])
        rig.row(f"{name}.took", seconds=time.monotonic() - started)
    outcome = "all right" if rig.sound else "SOMETHING IS WRONG"
    dry = "; a dry run on a CPU, whose times say nothing about a device" if args.dry else ""
    print(f"ebbtide bench device: {outcome}{dry}", file=sys.stderr)
    return 0 if rig.sound else 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
