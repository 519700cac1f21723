"""Compile hopper.py's kernels for sm_90 where there is no GPU, and print what came out as JSON: run by test_hopper.py.

A process of its own, because where Triton interprets kernels it compiles none.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from logitless.torch_impl.kernels import hopper
from logitless.torch_impl.kernels.architecture import ARCHITECTURES
from logitless.torch_impl.kernels.tiles import HIDDEN, HIDDEN_SUM, LOGITS, WEIGHT, WEIGHT_SUM, Tiles, WeightKind

(HOPPER,) = (found for found in ARCHITECTURES if found.name == "hopper")

# The constants that a WeightKind is made of, in its order.
KIND = ("FINAL", "PARTED", "ADD", "SMOOTH", "TARGETS", "LENT", "TURNED", "LOW_BITS")
# What the launch of a WeightKind chooses beside its tile's constants.
UNLIKE = ("PIECES", "PARTS", "SLOTS")
NO_CALL = SimpleNamespace(describe_matrix=lambda *block: None)
FLAGS = ("BIAS", "SCALE", "CAP", "CLASS", "ALPHA", "GAMMA", "DELTA", "SIGMA")
HAS = tuple(f"HAS_{flag}" for flag in FLAGS)
# The pointer that an option reads, for those that read one; it is None without the option.
READS = {
    "HAS_BIAS": ("bias_ptr",),
    "HAS_CLASS": ("class_weight_ptr",),
    "HAS_ALPHA": ("alpha_ptr",),
    "HAS_GAMMA": ("gamma_ptr",),
    "HAS_DELTA": ("delta_ptr",),
    "HAS_SIGMA": ("sigma_ptr",),
    "ENTROPY": ("gap_ptr",),
    "STATISTICS": ("highest_ptr", "argmax_ptr", "lowest_ptr", "squares_ptr"),
    "SUM_LOGITS": ("logit_sum_ptr",),
    "ROWS": ("factor_ptr", "target_value_ptr"),
    "SMOOTH": ("smooth_ptr", "weighted_rows_ptr", "smooth_x_ptr"),
    "TARGETS": ("key_ptr", "token_ptr", "value_ptr", "bounds_ptr", "hidden_ptr"),
    "SPLIT": ("parts_ptr",),
    "PACE": ("progress_ptr",),
    "LENT": ("counter_ptr",),
}


def block(dtype: str, rows: int, columns: int) -> str:
    bits = {"fp32": 32, "i32": 32, "i8": 8}.get(dtype, 16)
    layout = hopper.swizzled(bits, columns)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def turned(across: bool, rows: int, columns: int) -> tuple[int, int]:
    """A block of a matrix, or of its transpose where that is what lies in memory."""
    return (columns, rows) if across else (rows, columns)


def logits(dtype: str, mode: int, pieces: int, **chosen: bool) -> dict[str, Any]:
    t = HOPPER.tiles[LOGITS]
    options = dict.fromkeys(("ENTROPY", "STATISTICS", "SUM_LOGITS", "LENT", "TURNED", *HAS), False)
    options |= chosen
    known = ("log_total_ptr", "factor_ptr", "target_value_ptr")
    return {
        "kernel": hopper.logits_kernel,
        "tiles": t,
        "constants": options | {"MODE": mode, "PIECES": pieces},
        "none": (() if mode == 2 else known) + (("sum_ptr",) if mode == 2 else ()) + (("e_desc",) if mode == 0 else ()),
        "blocks": {
            "x_desc": block(dtype, t.block_rows, t.bk),
            "w_desc": block(dtype, *turned(options["TURNED"], t.bn, t.bk)),
            "e_desc": block(dtype, *turned(options["LENT"], t.block_rows, t.bn)),
        },
        "dtype": dtype,
    }


def gradient_tiles(narrow: bool) -> Mapping[str, Tiles]:
    """Those of dX and dW."""
    return HOPPER.narrow if narrow and HOPPER.narrow is not None else HOPPER.tiles


def hidden(dtype: str, final: bool, narrow: bool = False, **chosen: bool) -> dict[str, Any]:
    waits = chosen.get("WAITS", False)
    t = gradient_tiles(narrow)[HIDDEN if final or waits else HIDDEN_SUM]
    false = ("WAITS", "ROWS", "SMOOTH", "SPLIT", "LENT", "TURNED")
    options = {"ADD": False, "FINAL": final} | dict.fromkeys(false, False) | chosen
    return {
        "kernel": hopper.hidden_kernel,
        "tiles": t,
        "constants": options | {"PIECES": 4, "PARTS": t.bn // t.block_columns},
        "none": (("sum_desc",) if final or waits else ())
        + (() if final else ("scale_ptr",))
        + (() if waits else ("low_ptr",)),
        "blocks": {
            "e_desc": block(dtype, *turned(options["LENT"], t.block_rows, t.bk)),
            "w_desc": block(dtype, *turned(options["TURNED"], t.bk, t.bn)),
            "sum_desc": block("fp32", t.block_rows, t.block_columns),
        },
        "dtype": dtype,
    }


def weight(dtype: str, final: bool, narrow: bool = False, **chosen: bool) -> dict[str, Any]:
    into = chosen.get("INTO", False) and not chosen.pop("NARROW", False)  # a float32 buffer
    t = gradient_tiles(narrow)[WEIGHT if final and not into else WEIGHT_SUM]
    options = dict.fromkeys(("ADD", "INTO", "PARTED", "SMOOTH", "HAS_CLASS", "TARGETS", "LENT", "TURNED"), False)
    options |= {"FINAL": final, "LOW_BITS": 8} | chosen
    kind = WeightKind(*(options[flag] for flag in KIND))
    kind = dataclasses.replace(kind, reads=kind.reads and not into)
    own = hopper.PRODUCTS.weight(NO_CALL, t, kind, torch.empty((2, 2), dtype=torch.int8), True)
    parted, lent = kind.parted, kind.lent and not kind.turned
    out = turned(kind.turned, t.block_rows, own.columns)
    high, low = (block(bits, *out) for bits in (("i32", "i16") if own.pairs else ("i16", "i8")))
    if kind.low_bits == 4:
        low = block("i8", out[0], out[1] if own.pairs else out[1] // 2)
    summed = high if parted else block("fp32", *out)
    return {
        "kernel": hopper.weight_kernel,
        "tiles": t,
        "constants": options | {name: value for name, value in own.values.items() if name in UNLIKE},
        "none": (() if final else ("scale_ptr",)) + (() if parted else ("low_ptr",))
        + (() if parted and (own.pairs or not final) else ("low_desc",)),
        "blocks": {
            "e_desc": block(dtype, *turned(lent, t.bk, t.block_rows)),
            "x_desc": block(dtype, t.bk, t.bn),
            "low_desc": low,
            "out_desc": block(dtype, *out) if final and not (into or own.pairs) else summed,
        },
        "dtype": dtype,
    }  # fmt: skip


CONFIGURATIONS = {
    "sums": lambda: logits("bf16", 0, 2),
    "anchored": lambda: logits("bf16", 1, 2),
    "anchored, lent": lambda: logits("bf16", 1, 2, LENT=True),
    "anchored, lent, all": lambda: logits(
        "bf16", 1, 4, LENT=True, ENTROPY=True, STATISTICS=True, HAS_BIAS=True, HAS_SCALE=True, HAS_CAP=True
    ),
    "held, entropy": lambda: logits("bf16", 3, 4, ENTROPY=True),
    "held, statistics, softcap": lambda: logits(
        "bf16", 3, 4, ENTROPY=True, STATISTICS=True, HAS_SCALE=True, HAS_CAP=True
    ),
    "held, turned": lambda: logits("bf16", 3, 4, ENTROPY=True, TURNED=True),
    "known": lambda: logits("bf16", 2, 1),
    "known fp16": lambda: logits("fp16", 2, 1),
    "entropy": lambda: logits("bf16", 0, 4, ENTROPY=True),
    "statistics": lambda: logits("bf16", 0, 4, ENTROPY=True, STATISTICS=True),
    "anchored, all": lambda: logits(
        "bf16",
        1,
        4,
        ENTROPY=True,
        STATISTICS=True,
        SUM_LOGITS=True,
        HAS_BIAS=True,
        HAS_SCALE=True,
        HAS_CAP=True,
        HAS_CLASS=True,
    ),
    "known, all": lambda: logits("bf16", 2, 4, **{f"HAS_{flag}": True for flag in FLAGS}),
    "hidden": lambda: hidden("bf16", True, ROWS=True),
    "hidden, lent": lambda: hidden("bf16", True, ROWS=True, LENT=True),
    "hidden, lent, split": lambda: hidden("bf16", True, ROWS=True, LENT=True, SPLIT=True),
    "hidden, split": lambda: hidden("bf16", True, ROWS=True, SPLIT=True),
    "hidden, all": lambda: hidden("bf16", True, ROWS=True, ADD=True, SMOOTH=True),
    "hidden, waiting": lambda: hidden("bf16", False, ROWS=True, WAITS=True),
    "hidden, waiting, split": lambda: hidden("bf16", False, ROWS=True, WAITS=True, SPLIT=True),
    "hidden, waiting, turned": lambda: hidden("bf16", False, ROWS=True, WAITS=True, TURNED=True),
    "hidden sum": lambda: hidden("bf16", False, ROWS=True),
    "hidden sum, add": lambda: hidden("bf16", False, ADD=True),
    "weight": lambda: weight("bf16", True),
    "weight and targets": lambda: weight("bf16", True, TARGETS=True),
    "weight and targets, all": lambda: weight("bf16", True, TARGETS=True, SMOOTH=True, HAS_CLASS=True),
    "weight in place": lambda: weight("bf16", True, TARGETS=True, LENT=True),
    "weight in place, all": lambda: weight("bf16", True, TARGETS=True, LENT=True, SMOOTH=True, HAS_CLASS=True),
    "anchored, turned": lambda: logits("bf16", 1, 2, TURNED=True),
    "hidden, turned": lambda: hidden("bf16", True, ROWS=True, TURNED=True),
    "weight, turned": lambda: weight("bf16", True, TARGETS=True, TURNED=True),
    "weight in place, turned": lambda: weight("bf16", True, TARGETS=True, LENT=True, TURNED=True),
    "weight sum, turned, add": lambda: weight("bf16", False, ADD=True, TURNED=True),
    "weight, all": lambda: weight("bf16", True, ADD=True, SMOOTH=True, HAS_CLASS=True),
    "weight into, add": lambda: weight("bf16", True, ADD=True, INTO=True),
    "weight into narrow": lambda: weight("bf16", True, ADD=True, INTO=True, NARROW=True),
    "weight sum": lambda: weight("bf16", False),
    "weight sum, add": lambda: weight("bf16", False, ADD=True),
    "weight parted": lambda: weight("bf16", False, PARTED=True),
    "weight parted, added": lambda: weight("bf16", False, PARTED=True, ADD=True),
    "weight parted, turned, added": lambda: weight("bf16", False, PARTED=True, ADD=True, TURNED=True),
    "weight narrowly parted": lambda: weight("bf16", False, PARTED=True, TARGETS=True, LOW_BITS=4),
    "weight narrowly parted, added": lambda: weight("bf16", False, PARTED=True, ADD=True, TARGETS=True, LOW_BITS=4),
    "weight from narrow parts": lambda: weight("bf16", True, PARTED=True, ADD=True, TARGETS=True, LOW_BITS=4),
    "weight from wide parts": lambda: weight("bf16", True, PARTED=True, ADD=True, TARGETS=True),
    "hidden, narrow": lambda: hidden("bf16", True, True, ROWS=True),
    "hidden, narrow, waiting, split": lambda: hidden("bf16", False, True, ROWS=True, WAITS=True, SPLIT=True),
    "hidden, narrow, lent, turned": lambda: hidden("bf16", True, True, ROWS=True, LENT=True, TURNED=True),
    "hidden sum, narrow, add": lambda: hidden("bf16", False, True, ADD=True),
    "weight, narrow": lambda: weight("bf16", True, True, TARGETS=True),
    "weight, narrow, turned": lambda: weight("bf16", True, True, TARGETS=True, TURNED=True),
    "weight sum, narrow, add": lambda: weight("bf16", False, True, ADD=True),
    "weight parted, narrow, added": lambda: weight("bf16", False, True, PARTED=True, ADD=True),
    "weight from narrow parts, narrow": lambda: weight(
        "bf16", True, True, PARTED=True, ADD=True, TARGETS=True, LOW_BITS=4
    ),
    "weight from parts": lambda: weight("bf16", True, PARTED=True, ADD=True, SMOOTH=True, TARGETS=True),
}


def compile_one(what: dict[str, Any]) -> dict[str, Any]:
    kernel, t, names = what["kernel"], what["tiles"], what["kernel"].arg_names
    flags = (what["constants"].get(flag, False) for flag in KIND)
    launched = hopper.PRODUCTS.constants(t) | hopper.PRODUCTS.registers(WeightKind(*flags))
    constants = {k: v for k, v in launched.items() if k in names} | what["constants"] | {"GROUP": 8, "PROGRAMS": 132}
    if "PACE" in names:
        constants["PACE"] = t.pace
    unread = [pointer for option, pointers in READS.items() if not constants.get(option, True) for pointer in pointers]
    fixed = {"anchor_ptr", "row_target_ptr"}
    constants |= {name: None for name in (*unread, *what["none"]) if name in names and name not in fixed}
    own = {name: "*" + what["dtype"] for name in ("w_ptr", "target_w_ptr", "bias_ptr", "hidden_ptr")}
    whole = ("row_target_ptr", "argmax_ptr", "count_ptr", "order_ptr", "progress_ptr")
    whole += ("counter_ptr", "key_ptr", "token_ptr", "bounds_ptr")
    narrow = constants.get("FINAL") and t not in (HOPPER.tiles[WEIGHT_SUM], gradient_tiles(True)[WEIGHT_SUM])
    out = {"out_ptr": "*" + what["dtype"] if narrow else "*fp32"}
    if constants.get("INTO"):
        out["sum_ptr"] = out["out_ptr"]
    if constants.get("PARTED"):
        out |= {"sum_ptr": "*i16", "low_ptr": "*i8"} | ({} if narrow else {"out_ptr": "*i16"})
    if constants.get("WAITS"):
        out = {"out_ptr": "*i16", "low_ptr": "*i8"}
    kinds = own | dict.fromkeys(whole, "*i32") | out | what["blocks"]
    kinds |= {"scale": "fp32", "cap": "fp32"}
    signature = {
        n: "constexpr" if n in constants else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names
    }
    paths = {(names.index(name),): value for name, value in constants.items()}
    even = [n for n in names if signature[n].startswith("*") or n in ("size", "hidden_stride")]
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    source = GluonASTSource(kernel, signature, paths, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx, sass = made.asm["ptx"], made.asm["sass"]
    return {
        "shared": made.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "reductions": ptx.count("cp.reduce.async.bulk"),
        "spills": sass.count("STL") + sass.count("LDL"),
    }


if __name__ == "__main__":
    json.dump({name: compile_one(make()) for name, make in CONFIGURATIONS.items()}, sys.stdout)
