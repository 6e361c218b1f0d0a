"""Compiles the kernels for real GPUs without one, and prints what the compiler made, as JSON.

A program of its own: a process that interprets kernels cannot compile them. Arguments: compute
capabilities, such as 80 90 100.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ebbtide.kernels.paged_attention import Tiling
from ebbtide.kernels.staged_copy import WARPS
from ebbtide.kernels.triton_attention import attend_pages, merge_splits
from ebbtide.kernels.triton_copy import copy_fragments

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COUNTED = (
    "LDG.E.128",
    "STG.E.128",
    "LDG.E.64",
    "STG.E.64",
    "LDGSTS.E.BYPASS.128",
    "LDGSTS",
    "UTMALDG",
    "HMMA",
    "HGMMA",
    "UTCHMMA",
    "LDL",
    "STL",
)
KINDS = (
    ("decode", torch.bfloat16, 128),
    ("prefill", torch.bfloat16, 128),
    ("prefill", torch.float32, 64),
)
FULLY = 90  # where the kernels that hardly differ between architectures are compiled too
STRIDES = (
    "query_token_stride",
    "query_head_stride",
    "key_block_stride",
    "key_row_stride",
    "key_head_stride",
    "value_block_stride",
    "value_row_stride",
    "value_head_stride",
    "out_token_stride",
    "out_head_stride",
    "table_stride",
)


def resources(cubin: bytes) -> dict[str, Any]:
    """Registers, shared memory, spilled bytes, and how often each counted instruction occurs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = [
            subprocess.run(
                [TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "-sass")
        ]
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", out[0])
    assert found is not None, out[0]
    registers, stack, _, local = map(int, found.groups())
    counts = {name: len(re.findall(rf"\b{re.escape(name)}\b", out[1])) for name in COUNTED}
    return {
        "registers": registers,
        "spilled_bytes": local,
        "stack_bytes": stack,
        "instructions": {name: count for name, count in counts.items() if count},
    }


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], cc: int, warps: int, stages: int
) -> dict[str, Any]:
    """`types`: name to type, with a `!` behind it when it is a multiple of 16, as launches find."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types[name].removesuffix("!")
        if name not in constants and types[name].endswith("!"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", cc, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    return resources(made.asm["cubin"]) | {"shared_bytes": made.metadata.shared}


def copy(cc: int, *, gather: bool) -> dict[str, Any]:
    """8 fragments of 4 KiB at a time, 16-byte accesses."""
    tables = dict.fromkeys(("base", "block_stride", "record_offset", "length"), "*i64!")
    types = tables | {"block_ids": "*i64!", "records": "i64!", "jobs": "i32", "fragments": "i32"}
    types["record_bytes"] = "i64!"
    constants = {"GATHER": gather, "JOBS": 8, "WORDS": 512, "WORD": tl.int64, "VECTOR": 2}
    return compiled(copy_fragments, types, constants, cc, WARPS, 3)


def attention(cc: int, dtype: torch.dtype, dim: int, group: int, *, decode: bool) -> dict[str, Any]:
    """Pages of 16, as the wrapper would launch it."""
    short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    pointers = dict.fromkeys(("query", "key", "value", "out"), f"*{short}!")
    types = pointers | dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32!")
    types |= dict.fromkeys(("part_sum", "part_max", "part_weight"), "*fp32!")
    types |= dict.fromkeys(STRIDES, "i64!") | {"table_stride": "i32"}
    types |= {"scale_log2": "fp32", "heads": "i32", "splits": "i32"}
    tiling = Tiling.of(dtype, dim, group, decode=decode)
    constants = {
        "GROUP": group,
        "DIM": dim,
        "PAGE": 16,
        "TOKENS": tiling.tokens,
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "SPLIT": decode,
        "EXACT": dtype == torch.float32,
        "UPCAST": False,
    }
    return compiled(attend_pages, types, constants, cc, tiling.warps, tiling.stages)


def merge(cc: int) -> dict[str, Any]:
    """Eight parts of one row."""
    types = dict.fromkeys(("part_sum", "part_max", "part_weight"), "*fp32!") | {"out": "*bf16!"}
    types |= {
        "out_token_stride": "i64!",
        "out_head_stride": "i64!",
        "heads": "i32",
        "splits": "i32",
    }
    return compiled(merge_splits, types, {"SPLITS": 8, "DIM": 128}, cc, 4, 3)


def main() -> None:
    """One JSON object: kernel and architecture to what was made of it."""
    found = {}
    for cc in map(int, sys.argv[1:]):
        found[f"gather sm_{cc}"] = copy(cc, gather=True)
        for kind, dtype, dim in KINDS:
            name = f"{kind} {str(dtype).removeprefix('torch.')} {dim} sm_{cc}"
            found[name] = attention(cc, dtype, dim, 4, decode=kind == "decode")
        if cc == FULLY:
            found[f"scatter sm_{cc}"] = copy(cc, gather=False)
            found[f"merge sm_{cc}"] = merge(cc)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
