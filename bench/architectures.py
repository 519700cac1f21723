"""Every kernel that a call launches, compiled for chips that are not there: ``python -m bench architectures``.

For each chip its record (torch_impl/kernels/architecture.py) is chosen as on a machine that has it. CALLS are made with
launches that only write down what would run. Then Triton compiles each kernel for the chip. A row says whether it fits:
its shared memory and its threads within the chip's, and no register spilled to memory. Nothing runs.

Needs a Triton that is not interpreting, and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from bench.registry import Results, register

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU, as Triton and the kernels' launches know it."""

    backend: str
    target: int | str
    warp: int
    shared: int
    """Bytes of shared memory that a program may have."""
    multiprocessors: int


# Shared memory: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; AMD's CDNA 3 and
# CDNA 4 instruction set guides. Multiprocessors: of an A100, A40, L40S, H100, B200, RTX 5090, MI300X and MI355X.
CHIPS = {
    "8.0": Chip("cuda", 80, 32, 163 * KIB, 108),
    "8.6": Chip("cuda", 86, 32, 99 * KIB, 84),
    "8.9": Chip("cuda", 89, 32, 99 * KIB, 142),
    "9.0": Chip("cuda", 90, 32, 227 * KIB, 132),
    "10.0": Chip("cuda", 100, 32, 227 * KIB, 148),
    "12.0": Chip("cuda", 120, 32, 99 * KIB, 170),
    "gfx942": Chip("hip", "gfx942", 64, 64 * KIB, 304),
    "gfx950": Chip("hip", "gfx950", 64, 160 * KIB, 256),
}

TOKENS, HIDDEN, VOCAB = 512, 256, 2048
PER_CHUNK, PER_SLICE = {"order": "tokens", "chunk": 128}, {"order": "vocab", "chunk": 512}
# A budget that a held gradient of a distillation does not fit.
SMALL = 7 * 2**19
EVERYTHING = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "logit_scale": 2.0, "return_stats": True}
# Options of linear_cross_entropy, or of another "function". Of them "plan" makes one of logitless.plan's,
# "class_weight" and "bias" make arrays, "into" a buffer of that dtype, "layout" a weight that lies so in memory, and
# "hidden" is another size of it.
CALLS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "in dW's rows": {"hidden": TOKENS, "bias": True},
    "chunks": {"plan": PER_CHUNK},
    "chunks, 20 bits": {"plan": PER_CHUNK | {"lends": True}},
    "slices": {"plan": PER_SLICE},
    "everything": {"class_weight": True, "bias": True, **EVERYTHING},
    "everything in chunks": {"class_weight": True, "bias": True, "plan": PER_CHUNK, **EVERYTHING},
    "everything in slices": {"class_weight": True, "bias": True, "plan": PER_SLICE, **EVERYTHING},
    "smoothing in chunks": {"label_smoothing": 0.1, "plan": PER_CHUNK},
    "per token": {"reduction": "none", "memory_budget": 2**40},
    "a weight [D, V]": {"layout": "dv", "bias": True},
    "a weight [D, V], in dW's rows": {"layout": "dv", "hidden": TOKENS},
    "a weight [D, V] in chunks": {"layout": "dv", "label_smoothing": 0.1, "plan": PER_CHUNK},
    "a weight [D, V] in slices": {"layout": "dv", "plan": PER_SLICE},
    "a weight [D, V], into float32": {"layout": "dv", "into": "float32"},
    "into float32": {"into": "float32"},
    "into its own dtype": {"into": "own"},
    "no gradient": {"return_stats": True, "gradients": False},
    "an odd hidden size": {"hidden": 251},
    "log-probs and entropy": {"function": "linear_log_probs", "with_entropy": True},
    "log-probs and entropy, from logits that wait": {
        "function": "linear_log_probs", "with_entropy": True, "memory_budget": 2**40,
    },
    "log-probs and statistics": {"function": "linear_log_probs", "return_stats": True},
    "a temperature per token": {"temperature": True},
    "a temperature per token, everything": {"temperature": True, "class_weight": True, "bias": True, **EVERYTHING},
    "log-probs and statistics from logits that wait, a temperature per token": {
        "function": "linear_log_probs", "return_stats": True, "softcap": 30.0, "temperature": True,
        "memory_budget": 2**40,
    },
    "log-probs and statistics, a temperature per token": {
        "function": "linear_log_probs", "return_stats": True, "softcap": 30.0, "temperature": True,
    },
    "given logits": {"function": "cross_entropy", "class_weight": True, **EVERYTHING},
    "a distillation": {"function": "distillation_loss", "nll_coef": 0.5},
    "a distillation, a temperature per token": {
        "function": "distillation_loss", "nll_coef": 0.5, "softcap": 30.0, "temperature": True,
    },
    "a distillation of a mixture": {"function": "distillation_loss", "beta": 0.5, "bias": True, "softcap": 30.0},
    "a distillation by reverse KL": {"function": "distillation_loss", "beta": 1.0, "teacher_softcap": 30.0},
    "a distillation made again": {"function": "distillation_loss", "nll_coef": 0.5, "memory_budget": SMALL},
    "a distillation from ids": {"function": "sparse_distillation_loss", "nll_coef": 0.5},
    "a distillation from ids made again": {
        "function": "sparse_distillation_loss", "softcap": 30.0, "temperature": True, "bias": True,
        "memory_budget": SMALL,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch that was written down."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        from logitless.torch_impl.kernels.launch import kind_of

        return kind_of(self.kernel, 0, self.arguments, self.options)

    @property
    def tiles(self) -> str:
        sizes = [str(self.options[name]) for name in ("BM", "BN", "BK") if name in self.options]
        return "×".join(sizes)


class Absent:
    """Triton's driver of a chip that is not there."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        chip = CHIPS[name]
        self.target = GPUTarget(chip.backend, chip.target, chip.warp)
        self.device = list(CHIPS).index(name)  # a kernel keeps what it was compiled to by device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return device


@contextlib.contextmanager
def on_chip(name: str) -> Iterator[None]:
    """Calls choose what they would on the chip."""
    from triton.runtime import driver

    from logitless.torch_impl.kernels import architecture, fused, kernel_call, rows

    chip = CHIPS[name]
    known = {
        (architecture, "chip_of"): name,
        (kernel_call, "multiprocessors"): chip.multiprocessors,
        (rows, "most_warps"): 1024 // chip.warp,
        (fused, "unavailable"): None,
    }
    with contextlib.ExitStack() as stack:
        for (module, function), value in known.items():
            stack.enter_context(mock.patch.object(module, function, lambda *_, value=value: value))
        driver.set_active(Absent(name))
        yield


@contextlib.contextmanager
def as_on(name: str, note: Callable[..., None]) -> Iterator[None]:
    """Calls choose what they would on the chip, and hand their launches to ``note``."""
    import torch

    from logitless.torch_impl.kernels import launch
    from logitless.torch_impl.kernels.rehearsal import IndexesAreZero

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.dict(os.environ, LOGITLESS_CHECK="0"))  # nothing is computed that could be checked
        patch(on_chip(name))
        patch(mock.patch.object(launch.instead, "run", note))
        patch(IndexesAreZero())
        torch.manual_seed(0)
        yield


def call(options: dict[str, Any], dtype: Any) -> None:
    """Forward and backward of one call on the CPU, whose kernels do nothing."""
    import torch

    from logitless import plan, torch_impl

    options = dict(options)
    name = options.pop("function", "linear_cross_entropy")
    size, wanted = options.pop("hidden", HIDDEN), options.pop("plan", None)
    gradients, into = options.pop("gradients", True), options.pop("into", None)
    new = functools.partial(torch.zeros, dtype=dtype, requires_grad=gradients)
    turned = options.pop("layout", "vd") == "dv"
    weight = new(size, VOCAB).T if turned else new(VOCAB, size)
    arrays = [new(TOKENS, VOCAB)] if name == "cross_entropy" else [new(TOKENS, size), weight]
    target = torch.zeros(TOKENS, dtype=torch.int64)
    if options.pop("bias", False):
        options["bias"] = new(VOCAB)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.ones(VOCAB)
    if options.pop("temperature", False):
        options["temperature"] = torch.ones(TOKENS)
    if into is not None:
        options["accumulate_into"] = torch.zeros_like(weight, dtype=dtype if into == "own" else torch.float32)
    if wanted is not None:
        sizes = {"tokens": TOKENS, "hidden": size, "vocab": VOCAB, "dtype": str(dtype).removeprefix("torch.")}
        options["plan"] = plan(**sizes, **wanted, fused=True)
    if "distillation" not in name:
        arrays.append(target)
    else:  # a teacher, and a target where there is a hard loss
        ids = torch.arange(8).expand(TOKENS, 8)
        arrays += [ids, ids / 32] if "sparse" in name else [array.detach() for array in arrays]
        options |= {"target": target} if "nll_coef" in options else {}
    result = getattr(torch_impl, name)(*arrays, backend="triton", **options)
    results = result if isinstance(result, tuple) else (result,)
    values = [value for part in results for value in (part if isinstance(part, tuple) else (part,))]
    if gradients:
        sum(value.sum() for value in values if torch.is_tensor(value) and value.requires_grad).backward()


def launches(name: str, precision: str, calls: tuple[str, ...]) -> list[tuple[str, Launch]]:
    """What the calls launch on the chip, each kind once, with the first call that does. precision: "half", or that of
    float32 products."""
    import torch

    found: dict[tuple[Any, ...], tuple[str, Launch]] = {}
    running = ""

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        launch = Launch(kernel, grid, arguments, options)
        found.setdefault(launch.kind, (running, launch))

    dtype = torch.bfloat16 if precision == "half" else torch.float32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    try:
        with as_on(name, note):
            for running in calls:
                call(CALLS[running], dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    return list(found.values())


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, and bytes of them that it spills."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def noted(name: str) -> int:
            found = re.search(rf"\.{name}:\s*(\d+)", text)
            assert found is not None, name
            return int(found[1])

        return {"registers": noted("vgpr_count"), "spill_bytes": 4 * noted("vgpr_spill_count")}
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        asked = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None, text
    assert stack is not None, text
    spills = int(stack[1]) > 0 and "STL" in compiled.asm["sass"]  # a kernel may have a stack for something else
    return {"registers": int(registers[1]), "spill_bytes": int(stack[1]) if spills else 0}


def compiled_row(name: str, precision: str, of: str, launch: Launch) -> tuple[Any, dict[str, Any]]:
    """What tells a compiled kernel from the others, and a row of the results."""
    row = {"architecture": name, "kernel": launch.kernel.fn.__name__, "call": of, "precision": precision}
    row |= {"tiles": launch.tiles, "warps": launch.options.get("num_warps", 4)}
    try:
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
        row |= {"shared_bytes": compiled.metadata.shared, **resources(compiled)}
    except Exception as failure:  # whatever a compiler raises; the row says what
        return launch.kind, row | {"ok": False, "failure": f"{type(failure).__name__}: {failure}"[:300]}
    fits = row["shared_bytes"] <= CHIPS[name].shared and row["warps"] * CHIPS[name].warp <= 1024
    return compiled.hash, row | {"ok": fits and row["spill_bytes"] == 0}


def compile_all(name: str, precision: str, calls: tuple[str, ...] = tuple(CALLS)) -> list[dict[str, Any]]:
    """The rows of one chip: the kernels that calls of this precision launch."""
    rows: dict[Any, dict[str, Any]] = {}
    for of, launch in launches(name, precision, calls):
        key, row = compiled_row(name, precision, of, launch)
        rows.setdefault(key, row)
    return list(rows.values())


@register(
    "every kernel compiled for chips that are not there",
    arguments={
        "--chips": {"nargs": "*", "choices": list(CHIPS), "default": list(CHIPS), "metavar": "CHIP",
                    "help": ", ".join(CHIPS)},
        "--precisions": {"nargs": "*", "choices": ("half", "tf32", "ieee"), "default": ["half", "tf32", "ieee"]},
        "--calls": {"nargs": "*", "choices": list(CALLS), "default": list(CALLS), "metavar": "CALL",
                    "help": ", ".join(CALLS)},
        "--processes": {"type": int, "default": 1, "help": "chips that are compiled for side by side"},
    },
)  # fmt: skip
def run(options: argparse.Namespace, results: Results) -> int:
    """Ends with 1 if a kernel does not fit."""
    results.write(sizes={"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB}, calls=CALLS)
    bad = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for rows in pool.map(
            functools.partial(compile_all, calls=tuple(options.calls)),
            [name for name in options.chips for _ in options.precisions],
            options.precisions * len(options.chips),
        ):
            results.add(rows)
            bad += sum(not row["ok"] for row in rows)
    return int(bad > 0)
