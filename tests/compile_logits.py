"""Compile the kernels of the loss on given logits for sm_90 where there is no GPU, and print what came out as JSON.

Run by test_logits_loss.py: a process of its own, because where Triton interprets kernels it compiles none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from logitless.torch_impl.given_logits import kernels as logits_kernels
from logitless.torch_impl.given_logits.fused import BLOCK, WARPS

# The pointers that an option reads; they are None without it.
READS = {
    "HAS_CLASS": ("k_ptr",),
    "SMOOTH": ("smooth_ptr",),
    "SUM_LOGITS": ("out_weighted_ptr",),
    "STATISTICS": ("out_entropy_ptr", "out_argmax_ptr", "out_highest_ptr", "out_lowest_ptr", "out_squared_ptr"),
}
KINDS = {"target_ptr": "*i64", "valid_ptr": "*i8", "inside_ptr": "*i8", "out_argmax_ptr": "*i32", "logits_ptr": "*bf16"}


def compile_one(kernel: Any, everything: bool) -> dict[str, int]:
    names = kernel.arg_names
    constants = {name: everything for name in names if name.isupper() and name != "BLOCK"} | {"BLOCK": BLOCK}
    if not everything:
        constants |= {pointer: None for pointers in READS.values() for pointer in pointers if pointer in names}
    kinds = KINDS | {"out_ptr": "*bf16", "scale": "fp32", "cap": "fp32"}
    signature = {
        n: "constexpr" if n in constants else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names
    }
    aligned = [n for n in names if signature[n].startswith("*") or signature[n] == "i32"]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    paths = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, paths, attributes), target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS}
    )
    sass = made.asm["sass"]
    return {
        "spills": sass.count("STL") + sass.count("LDL"),
        "wide_loads": made.asm["ptx"].count("ld.global.v4"),
        "shared": made.metadata.shared,
    }


if __name__ == "__main__":
    made = {
        "sums": compile_one(logits_kernels.sums_kernel, everything=False),
        "gradient, all": compile_one(logits_kernels.gradient_kernel, everything=True),
    }
    json.dump(made, sys.stdout)
