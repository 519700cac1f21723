"""All results of one commit, on the machine that is here: ``python -m bench all``.

A task is one benchmark's call. Its results are stale if code that they depend on has changed since their commit:
Task.measures, and what files_of names in bench/. Every stale task that this machine can do runs as a
process of its own, the GPUs' tasks on as many GPUs as there are. A task that does not fit into ``--minutes`` any more
is left for the next call, which goes on with it. ``--list`` runs nothing.

A checkout without git history knows no older code: there all results of another commit are stale. ``--tasks`` names the
ones to run, by their numbers in a list that was made where the history is.

Results of another GPU or of other versions do not go into one file: keep a folder for each card (``--output``).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import machine
from bench.check import PEERS
from bench.checkout import ROOT
from bench.machine import gpus_here
from bench.registry import RESULTS, Results, register
from bench.shapes import SHAPES, SWEEPS

# What the loss and log-probabilities of a framework are made of: files and folders, as git names them.
CORE = tuple(
    f"core/{name}.py"
    for name in ("cost", "hardware", "numerics", "partition", "planning", "rounding", "saved", "scratch", "spec")
)
TORCH = (
    *CORE,
    ":(glob)torch_impl/*.py",
    *(f"torch_impl/{folder}" for folder in ("kernels", "compiled", "plain_loss", "given_logits")),
)
JAX = (*CORE, ":(glob)jax_impl/*.py", "jax_impl/kernels")
BOTH = (*TORCH, *JAX)
ALL = ("core", "torch_impl", "jax_impl", "interop")
# Files of bench/ that no figure depends on.
NO_FIGURES = tuple(
    f"bench/{name}.py" for name in ("__init__", "__main__", "all", "checkout", "machine", "plots", "registry", "report")
)
DISTILLATION = {name: ("core/objectives.py", f"{name}_impl/distillation") for name in ("torch", "jax")}


@dataclasses.dataclass(frozen=True)
class Task:
    """One call of a benchmark, and where its commit stands in the results file."""

    file: str
    command: tuple[str, ...]
    gpus: int
    """How many it needs."""
    minutes: float
    """About."""
    measures: tuple[str, ...]
    """What of the packages its results depend on, as git names files and folders."""
    machine: str = "machine"
    """The key of the machine that the rows were measured on."""
    shape: str | None = None
    """Rows of this shape alone: they may say their own commit."""
    rows: str = "rows"
    """The key of the list that they are in."""

    @property
    def name(self) -> str:
        return " ".join(self.command)

    def commits(self, folder: Path) -> set[str]:
        """Of the results in ``folder``; empty where there are none."""
        file = folder / self.file
        values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        own = (values.get(self.machine) or {}).get("commit")
        if own is None:
            return set()
        if self.shape is None:
            return {own}
        rows = [row for row in values.get(self.rows, []) if row["shape"] == self.shape]
        # A peer that was not installed keeps its row.
        return {row.get("commit", own) for row in rows if not row.get("variant", "").startswith(PEERS)}


def _check(*arguments: str) -> tuple[str, ...]:
    return ("check", "--tests", "", *arguments)


def _rows(shape: str, minutes: float, measures: tuple[str, ...], machine: str, rows: str, *arguments: str) -> Task:
    """Rows of one shape, beside those of the others."""
    command = _check("--rows-only", "--peers", "--rounds", "4", "--shapes", *arguments)
    return Task("gpu_check.json", command, 1, minutes, measures, machine, shape, rows)


JAX_SHAPES = ("liger", "gist", "gemma", "llama", "odd", "even", "small", "short", "wide")
TASKS = (
    *(_rows(name, 2.0, TORCH, "machine", "rows", name) for name in SHAPES),
    *(_rows(name, 1.0, TORCH, "machine", "sweeps", "--sweeps", name) for name in SWEEPS),
    *(_rows(name, 2.5, JAX, "jax_machine", "jax_rows", "--jax-shapes", name) for name in JAX_SHAPES),
    Task("gpu_check.json", _check("--shapes", "--per-token", "--peers"), 1, 4.0, TORCH, "token_machine"),
    Task("gpu_check.json", _check("--shapes", "--jax-per-token"), 1, 4.0, JAX, "jax_token_machine"),
    Task("gpu_check.json", _check("--shapes", "--first-calls", "3"), 1, 1.0, TORCH, "first_call_machine"),
    Task("gpu_check.json", _check("--shapes", "--jax-first-calls", "1"), 1, 3.0, JAX, "jax_first_call_machine"),
    Task("phases.json", ("phases",), 1, 3.0, TORCH),
    Task("accumulation.json", ("accumulation",), 1, 1.0, TORCH),
    Task("distillation.json", ("distillation", "--framework", "torch"), 1, 2.0, (*TORCH, *DISTILLATION["torch"])),
    Task("distillation_jax.json", ("distillation", "--framework", "jax"), 1, 2.0, (*JAX, *DISTILLATION["jax"])),
    Task("long.json", ("long", "--framework", "torch"), 1, 1.5, TORCH),
    Task("long_jax.json", ("long", "--framework", "jax"), 1, 2.5, JAX),
    Task("gist.json", ("gist",), 1, 2.0, TORCH),
    Task("log_probs.json", ("log_probs", "--framework", "torch"), 1, 3.0, TORCH),
    Task("log_probs_jax.json", ("log_probs", "--framework", "jax"), 1, 2.5, JAX),
    Task("small.json", ("small",), 1, 4.0, TORCH),
    Task("logits.json", ("logits",), 1, 2.0, (*BOTH, "torch_impl/given_logits", "jax_impl/given_logits")),
    Task("bridges.json", ("bridges",), 1, 2.0, (*BOTH, "interop")),
    Task("energy.json", ("energy",), 1, 3.0, TORCH),
    Task("hf.json", ("hf", "--largest"), 1, 8.0, (*TORCH, "torch_impl/huggingface")),
    Task("sanitizer.json", ("sanitize",), 1, 5.0, BOTH),
    Task("fuzz_gpu.json", ("fuzz", "--problems", "500", "--device", "cuda", "--processes", "14"), 1, 9.0, ALL),
    Task("sharded.json", ("sharded", "--framework", "torch"), 2, 4.0, (*TORCH, "torch_impl/distributed")),
    Task("sharded_jax.json", ("sharded", "--framework", "jax"), 2, 5.0, (*JAX, "jax_impl/distributed")),
    Task(
        "sharded_tokens.json", ("sharded", "--per-token", "--shapes", "8192x2048x131072", "llama"), 2, 2.0,
        (*TORCH, "torch_impl/distributed"),
    ),
    Task("portable.json", ("portable",), 0, 4.0, BOTH),
    Task("small_cpu.json", ("small", "--cpu"), 0, 0.5, BOTH),
    Task("architectures.json", ("architectures",), 0, 40.0, ALL),
    Task("tpu.json", ("tpu",), 0, 5.0, JAX),
    Task("rl.json", ("rl",), 0, 5.0, (*BOTH, "interop")),
    Task("grpo.json", ("grpo",), 0, 6.0, ALL),
    *(
        Task(f"fuzz_cpu_{k}_of_2.json", ("fuzz", "--problems", "20000", "--shard", f"{k}/2"), 0, 600.0, ALL)
        for k in range(2)
    ),
)  # fmt: skip


def files_of(name: str) -> set[str]:
    """The files of bench/ that a benchmark's figures depend on: its own, those that it imports, and all that belong to
    no other one. Some are imported by name alone."""
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "bench").rglob("*.py")}
    others = {f"bench/{task.command[0]}.py" for task in TASKS} | {f for f in files if f.startswith("bench/fuzzing/")}
    return ((files - others) | _imported(name)) - set(NO_FIGURES)


def _imported(name: str) -> set[str]:
    """bench/NAME.py, and the files of bench/ that it imports, and so on."""
    found, waiting = set(), [f"bench.{name}"]
    while waiting:
        file = Path(*waiting.pop().split("."))
        path = next((p for p in (file.with_suffix(".py"), file / "__init__.py") if (ROOT / p).exists()), None)
        if path is None or str(path) in found:
            continue
        found.add(str(path))
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bench"):
                waiting += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names if alias.name.startswith("bench.")]
    return found


def is_stale(task: Task, folder: Path, commit: str | None) -> bool:
    """Whether some results of the task are missing, or are older than what is measured now."""
    found, paths = task.commits(folder), (*task.measures, *sorted(files_of(task.command[0])))
    return not found or any(machine.has_changed(each, commit, paths) is not False for each in found)


def call(task: Task, folder: Path, commit: str | None) -> list[str]:
    """The task as a command. Parts of a file go beside what the file has, or what the committed one has."""
    command = [sys.executable, "-m", "bench", *task.command, "--output", str(folder)]
    if task.file == "gpu_check.json":
        if not (folder / task.file).exists():
            shutil.copy(RESULTS / task.file, folder)
        command += ["--update", str(folder / task.file)]
    return command + (["--commit", commit] if commit else [])


@register(
    "what is stale, once more: every benchmark that this machine can run",
    file=None,
    arguments={
        "--output": {"type": Path, "metavar": "DIR", "help": "folder of the results files", "default": RESULTS},
        "--commit": {"help": "commit of this checkout, where it has no git history"},
        "--minutes": {"type": float, "default": math.inf, "help": "begin nothing that would end later"},
        "--list": {"action": "store_true", "help": "only say what is stale"},
        "--tasks": {
            "type": int,
            "nargs": "+",
            "metavar": "NUMBER",
            "help": "those of --list that run; default: what is stale",
        },
    },
)
def run(options: argparse.Namespace, results: Results) -> int:
    """0 where all is done; 1 where something failed or is left."""
    del results
    options.output.mkdir(parents=True, exist_ok=True)
    here, begin, left = gpus_here(), time.monotonic(), 0
    for number, task in enumerate(TASKS, 1):
        told = f"{number} of {len(TASKS)}: {task.name}"
        if options.tasks and number not in options.tasks:
            continue
        if not options.tasks and not is_stale(task, options.output, options.commit):
            print(f"{told}: as it is now", flush=True)
        elif options.list or (task.gpus > 0) != (here > 0) or task.gpus > here:
            wants = f"{task.gpus} GPUs" if task.gpus else "a machine without a GPU"
            print(f"{told}: STALE, {', '.join(sorted(task.commits(options.output))) or 'none'}; {wants}", flush=True)
            left += options.list
        elif time.monotonic() - begin + 60 * task.minutes > 60 * options.minutes:
            print(f"{told}: STALE, left for the next call: about {task.minutes:g} minutes", flush=True)
            left += 1
        else:
            print(f"{told}: runs, about {task.minutes:g} minutes", flush=True)
            failed = subprocess.run(call(task, options.output, options.commit), cwd=ROOT, check=False).returncode
            left += failed != 0
            print(f"{told}: {'FAILED' if failed else 'done'}", flush=True)
    return int(left > 0)
