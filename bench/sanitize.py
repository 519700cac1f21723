"""The kernels of both frameworks under compute-sanitizer: ``python -m bench sanitize --output DIR``.

Every call of CALLS runs forward and backward on a small problem: a process for every tool and dtype of PyTorch's, and,
because JAX takes its time to compile a call, one for every tool and call of JAX's; side by side. sanitizer.json holds
what each tool found, with the kernels that it names. No allocator keeps memory back, so that memcheck sees the end of
every array. A process begins no call after ``--seconds``; one that does not end within twice as long is left without a
summary.

Beside them run controls, in which nothing of logitless is: racecheck reports races in a kernel of several groups of
warps (warp_groups.py), and in a program that does no more than what dispatches such groups (barriers.cu, which nvcc
compiles), as soon as a group has met at a barrier of its own. So races between accesses of ``gl.warp_specialize``'s
dispatch alone are also counted apart.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.checkout import ROOT
from bench.registry import Results, register

TOOLS = ("memcheck", "racecheck")
# By default the tool follows a program's children, too, and while compilers come and go side by side, it crashes; and
# it waits ten seconds for a program's first use of the GPU, then leaves the program waiting for the tool.
OPTIONS = ("--target-processes", "application-only", "--launch-timeout", "0", "--print-limit", "200")
DTYPES = ("bfloat16", "float16", "float32")  # of PyTorch's programs; JAX's are in the first
PROCESSES = 32  # side by side
TOKENS, HIDDEN, VOCAB = 333, 136, 1111
# The sources with kernels of several groups of warps, by the names that a tool gives them.
SPECIALISED = {
    "hopper.py": ROOT / "torch_impl" / "kernels" / "hopper.py",
    "warp_groups.py": ROOT / "bench" / "warp_groups.py",
}
# Options; of them "plan" makes one of logitless.plan's and "recipe" belongs to the data.
CALLS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"plan": {"order": "tokens", "chunk": 128}},
    "slices": {"plan": {"order": "vocab", "chunk": 240}},  # of which dW lends the first, in PyTorch
    "everything": {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "return_stats": True},
    "smoothing in chunks": {"label_smoothing": 0.1, "plan": {"order": "tokens", "chunk": 128}},
    "per token": {"reduction": "none", "memory_budget": 2**40},
    "rescue": {"recipe": "confident_wrong"},
    "no gradient": {"return_stats": True, "wrt": ()},
}


def arguments(name: str, framework: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The data of a call, and its options."""
    from logitless import plan
    from logitless.problems import Problem

    options = dict(CALLS[name])
    recipe, wanted = options.pop("recipe", "random"), options.pop("plan", None)
    problem = Problem(
        name, (TOKENS,), HIDDEN, VOCAB, dtype, bias=True, ignored=0.2, class_weight="positive", recipe=recipe
    )
    if wanted is not None:
        sizes = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": dtype}
        options["plan"] = plan(**sizes, **wanted, fused=True, padded=framework == "jax")
    return problem.case(), options


def torch_call(case: Any, options: dict[str, Any], dtype: str) -> None:
    """Forward and backward; where there are no options, also from given logits."""
    import torch

    from logitless.torch_impl import cross_entropy, linear_cross_entropy

    wrt = options.pop("wrt", ("hidden", "weight", "bias"))
    low = getattr(torch, dtype)
    floats = {key: torch.tensor(getattr(case, key)).to("cuda", low) for key in ("hidden", "weight", "bias")}
    for key in wrt:
        floats[key].requires_grad_()
    target, k = torch.tensor(case.target).cuda(), torch.tensor(case.class_weight).cuda()
    result = linear_cross_entropy(**floats, target=target, class_weight=k, backend="triton", **options)
    loss = result[0] if isinstance(result, tuple) else result
    if wrt:
        loss.sum().backward()
    if not options:
        logits = torch.randn(TOKENS, VOCAB, device="cuda", dtype=low).requires_grad_()
        cross_entropy(logits, target, class_weight=k, backend="triton").backward()
    torch.cuda.synchronize()


def jax_call(case: Any, options: dict[str, Any], dtype: str) -> None:
    """As :func:`torch_call`."""
    import jax
    import jax.numpy as jnp

    from logitless.jax_impl import cross_entropy, linear_cross_entropy

    wrt = options.pop("wrt", ("hidden", "weight", "bias"))
    floats = {key: jnp.asarray(getattr(case, key), dtype) for key in ("hidden", "weight", "bias")}
    target, k = jnp.asarray(case.target, jnp.int32), jnp.asarray(case.class_weight)

    def loss(floats: Any) -> Any:
        result = linear_cross_entropy(**floats, target=target, class_weight=k, backend="pallas", **options)
        return (result[0] if isinstance(result, tuple) else result).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss) if wrt else loss)(floats))
    if not options:
        logits = jax.random.normal(jax.random.key(0), (TOKENS, VOCAB), jnp.dtype(dtype))
        whole = jax.grad(lambda z: cross_entropy(z, target, class_weight=k, backend="pallas"))
        jax.block_until_ready(jax.jit(whole)(logits))


def run_calls(framework: str, dtype: str, names: tuple[str, ...], seconds: float) -> None:
    """Every call for which there is time."""
    end = time.monotonic() + seconds
    call = torch_call if framework == "torch" else jax_call
    for name in names:
        if time.monotonic() < end:
            call(*arguments(name, framework, dtype), dtype)
            print(f"ran: {name}", flush=True)


def is_dispatch(kernel: str, name: str, line: int) -> bool:
    """Whether what the compiler writes for ``gl.warp_specialize`` is at this line: there or at the kernel's ``def``."""
    if name not in SPECIALISED:
        return False
    text = SPECIALISED[name].read_text().splitlines()[line - 1].strip()
    return text.startswith(f"def {kernel}(") or text == "gl.warp_specialize("


def races(lines: list[str]) -> dict[str, int]:
    """How many races are reported, and how many of them are of the dispatch's accesses alone."""
    reports: list[list[bool]] = []
    for line in lines:
        if "Race reported" in line:
            reports.append([])
        if place := re.search(r"(?:Read|Write) access at (.*)\+0x\w+ in (\S+):(\d+)", line):
            reports[-1].append(is_dispatch(place[1], place[2], int(place[3])))
    return {"races": len(reports), "races_of_dispatch": sum(map(all, reports))}


def findings(text: str) -> dict[str, Any]:
    """What a tool's output says: its summary, its races, how often it names which kernel, and its first report."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    summary = [line for line in lines if "SUMMARY" in line]
    kernels = Counter(kernel for line in lines for kernel in re.findall(r"(?:at|in) ([A-Za-z_]\w+)(?:\(|\+0x)", line))
    first = next((i for i, line in enumerate(lines) if re.match(r"(Error|Warning|Invalid|.*hazard)", line)), None)
    return {
        "summary": summary[-1] if summary else None,
        "ran": re.findall(r"^ran: (.*)$", text, re.MULTILINE),
        **races(lines),
        "kernels": dict(kernels),
        "first_report": [] if first is None else lines[first : first + 8],
    }


def programs(folder: Path, seconds: float) -> dict[str, list[str]]:
    """What runs under the tools, by name; ``folder`` is for what is compiled."""
    barriers = str(folder / "barriers")
    source = str(ROOT / "bench" / "barriers.cu")
    subprocess.run(["nvcc", "-arch=native", "-lineinfo", "-o", barriers, source], check=True)
    python = [sys.executable, "-c"]
    controls = {
        "control: barriers of all threads": [barriers],
        "control: a group's barrier before": [barriers, "group"],
        "control: groups of warps": [*python, "from bench import warp_groups; warp_groups.run()"],
    }

    def calls(framework: str, dtype: str, *names: str) -> list[str]:
        return [*python, f"from bench import sanitize; sanitize.run_calls{framework, dtype, names, seconds}"]

    in_torch = {f"torch, {dtype}": calls("torch", dtype, *CALLS) for dtype in DTYPES}
    return controls | in_torch | {f"jax, {DTYPES[0]}, {name}": calls("jax", DTYPES[0], name) for name in CALLS}


def run_tool(tool: str, program: str, command: list[str], seconds: float) -> tuple[dict[str, Any], str]:
    """A row of the results, and the tool's own output."""
    allocators = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS, *command]
    began = time.monotonic()
    with subprocess.Popen(
        command, env=os.environ | allocators, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=2 * seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the program under the tool, which would go on alone
            output, _ = process.communicate()
            status = None
    text = output.decode(errors="replace")
    row = {"tool": tool, "program": program, "exit_status": status}
    row |= {"seconds": round(time.monotonic() - began, 1)} | findings(text)
    print({key: value for key, value in row.items() if key not in ("kernels", "first_report")}, flush=True)
    return row, text


@register("the kernels of both frameworks under compute-sanitizer", file="sanitizer.json", seconds=240.0)
def run(options: argparse.Namespace, results: Results) -> None:
    """After ``--seconds`` a process begins no other call. The tools' own output is in sanitizer.txt."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        commands = programs(Path(folder), options.seconds)
        runs = [pool.submit(run_tool, tool, *one, options.seconds) for tool in TOOLS for one in commands.items()]
        rows, texts = zip(*(run.result() for run in runs), strict=True)
    results.write(sizes={"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB}, calls=CALLS, rows=list(rows))
    results.file.with_suffix(".txt").write_text("\n".join(texts))
