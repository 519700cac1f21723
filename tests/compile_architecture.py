"""Compile dW's product for an imaginary architecture where there is no GPU, and print what came out as JSON.

Run by test_architecture.py: a process of its own, because where Triton interprets kernels it compiles none.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from imaginary import Imaginary, imaginary
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from logitless.torch_impl.kernels import architecture
from logitless.torch_impl.kernels.tiles import WEIGHT, WeightKind

CAPABILITY = 80  # its code is like an Ampere GPU's


def compiled() -> dict[str, Any]:
    """The kernel that a bfloat16 call finds on such a GPU, compiled."""
    architecture.ARCHITECTURES.insert(0, imaginary(Imaginary(), "half", ("42.",)))
    architecture.chip_of = lambda index: "42.0"  # type: ignore[assignment]
    found = architecture.architecture_of(torch.bfloat16, 0, True)
    products, tiles = found.products(), found.tiles[WEIGHT]
    kind = WeightKind(final=True, parted=False, reads=False, smooth=False, targets=False, lent=False, turned=False)
    asked: Any = SimpleNamespace(tma=True, precision="ieee")
    own = products.weight(asked, tiles, kind, None, True)
    kernel = products.weight_kernel
    names = kernel.arg_names
    switches = {name: False for name in names if name.isupper()} | {"FINAL": True, "GROUP": 8, "PROGRAMS": 108}
    constants: dict[str, Any] = switches | {name: value for name, value in own.values.items() if name in names}
    unread = ("sum_ptr", "low_ptr", "low_desc", "class_weight_ptr", "smooth_x_ptr")
    unread += ("key_ptr", "token_ptr", "value_ptr", "bounds_ptr", "hidden_ptr")
    constants |= dict.fromkeys(unread)
    blocks = {
        "e_desc": (tiles.bk, tiles.bm),
        "x_desc": (tiles.bk, tiles.bn),
        "out_desc": (tiles.block_rows, tiles.block_columns),
    }
    kinds = {name: f"tensordesc<bf16[{rows}, {columns}]>" for name, (rows, columns) in blocks.items()}
    kinds |= {"out_ptr": "*bf16", "count_ptr": "*i32", "scale_ptr": "*fp32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    paths = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": own.values["num_warps"], "num_stages": own.values["num_stages"]}
    made = triton.compile(
        ASTSource(kernel, signature, paths), target=GPUTarget("cuda", CAPABILITY, 32), options=options
    )
    ptx = made.asm["ptx"]
    return {"architecture": found.name, "target": f"sm_{CAPABILITY}" in ptx, "products": ptx.count("mma.sync")}


if __name__ == "__main__":
    json.dump(compiled(), sys.stdout)
