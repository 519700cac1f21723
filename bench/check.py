"""Everything that is judged on a GPU, in one call: ``python -m bench check --output DIR``.

Runs from a checkout without installing anything: first pytest on everything marked for the GPU (its output also in
DIR/tests.txt), then timings beside the floor, written as DIR/gpu_check.json.

There are two parts, PyTorch's (``--shapes``, ``--sweeps``) and JAX's (``--jax-shapes``). A part without a shape is left
out, as JAX's is by default. ``--first-calls N``, ``--jax-first-calls N``: first calls in N fresh processes each. JAX
alone, and both:

    python -m bench check --output DIR --peers --shapes --jax-shapes liger gist gemma llama --rounds 4
    python -m bench check --output DIR --peers --jax-shapes liger gist gemma llama

``--update FILE`` takes what this call does not run from an earlier results file: each part keeps the machine, versions
and commit that it was measured with (``machine``, ``token_machine``, ``jax_machine``, ``first_call_machine``, …;
``tests_commit``). More files may follow, of which ``FILE:tokens`` or ``FILE:torch,jax`` gives these parts alone, in
place of what came before. (With ``--tests "" --shapes`` nothing is run, and they are put together.) ``--rows-only``
keeps the other shapes of a part, too: the rows of this call's shapes (and with "small" the errors) take the place of
the earlier ones, and say their own commit; ``FILE:llama`` gives PyTorch's rows of that shape, ``FILE:memory``
those of that sweep alone. A peer that is not installed where a call is made keeps its earlier row.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.checkout import ROOT
from bench.machine import gpus_here
from bench.registry import RESULTS, SHARED, Results, register, write_json
from bench.shapes import SHAPES, SWEEPS, place

# What a results file holds of each part: first the machine that it was measured on.
PARTS = {
    "torch": ("machine", "rows", "sweeps", "errors"),
    "first_calls": ("first_call_machine", "first_call_s"),
    "tokens": ("token_machine", "token_rows"),
    "jax": ("jax_machine", "jax_rows", "jax_errors"),
    "jax_first_calls": ("jax_first_call_machine", "jax_first_calls"),
    "jax_tokens": ("jax_token_machine", "jax_token_rows"),
}
FIRST_CALLS = ("default", "lean", "forward")
"""Kinds of first calls: bench/gpu.py."""
# Implementations that may not be installed where a call is made.
PEERS = ("Liger-Kernel", "cut-cross-entropy", "QuACK", "tokamax", "jax-cce")
Part = Iterator[tuple[str, Any]]
"""(key, value) of a part as they become known; lists come in pieces."""


def run_tests(selection: list[str], log: Path) -> int:
    """pytest with the tests' folder on the path, its output also in ``log``; 0 when everything passed."""
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests")]))
    environment = os.environ | {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    plugins = ["-p", "no:cacheprovider", "-p", "bench.tracebacks"]
    command = [sys.executable, "-m", "pytest", *plugins, "--no-header", *selection]
    with (
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        log.open("w") as file,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            for out in (sys.stdout, file):
                print(line, end="", file=out, flush=True)
    return process.returncode


def rows_part(framework: str, shapes: list[str], rounds: int, peers: bool, errors: bool) -> Part:
    """The rows of these shapes, and the errors."""
    from bench import gpu

    prefix = "jax_" if framework == "jax" else ""
    for name in shapes:
        yield f"{prefix}rows", gpu.measure(framework, name, rounds, peers)
    if errors:
        yield f"{prefix}errors", gpu.errors(framework)


def sweeps_part(names: list[str], rounds: int, peers: bool) -> Part:
    """Rows for plots."""
    from bench import gpu

    for name in names:
        yield "sweeps", gpu.sweep("torch", name, max(2, rounds // 2), peers)


def torch_part(shapes: list[str], sweeps: list[str], rounds: int, peers: bool) -> Part:
    from bench import gpu

    yield from (("rows", []), ("sweeps", []))
    yield from rows_part("torch", shapes, rounds, peers, errors=False)
    yield from sweeps_part(sweeps, rounds, peers)
    yield "errors", gpu.errors("torch") if "small" in shapes else []  # they are taken at its sizes
    gpu.forget("torch")


def first_calls(framework: str, kind: str, environment: dict[str, str]) -> dict[str, float]:
    """Seconds of a fresh process's first calls: bench/gpu.py."""
    command = f"import json; from bench import gpu; print(json.dumps(gpu.first_call_seconds({framework!r}, {kind!r})))"
    run = [sys.executable, "-c", command]
    done = subprocess.run(run, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def first_call_part(processes: int) -> Part:
    """PyTorch's first calls, each time in a fresh process that finds nothing compiled."""
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as cache:
            yield "first_call_s", [first_calls("torch", "default", {"TRITON_CACHE_DIR": cache})]


def jax_first_call_part(processes: int) -> Part:
    """JAX's, each time in a fresh process: without a compilation cache, and with all that another process has left in
    one."""
    for kind in FIRST_CALLS * processes:
        with tempfile.TemporaryDirectory() as cache:
            kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            alone = first_calls("jax", kind, {"JAX_ENABLE_COMPILATION_CACHE": "0"})
            yield "jax_first_calls", [{"kind": kind, "cache": False, **alone}]
            first_calls("jax", kind, kept)
            yield "jax_first_calls", [{"kind": kind, "cache": True, **first_calls("jax", kind, kept)}]


def jax_part(shapes: list[str], rounds: int, peers: bool) -> Part:
    yield "jax_rows", []
    yield from rows_part("jax", shapes, rounds, peers, errors=True)


def token_part(rounds: int, peers: bool) -> Part:
    """PyTorch's values per token, then statistics beside what costs none."""
    from bench import gpu, gpu_torch

    rows = gpu.measure_tokens("torch", rounds, peers)
    gpu.forget("torch")
    yield "token_rows", rows + gpu_torch.measure_statistics(rounds)
    gpu.forget("torch")


def jax_token_part(rounds: int) -> Part:
    from bench import gpu

    yield "jax_token_rows", gpu.measure_tokens("jax", rounds, with_peers=False)


class Parts:
    """The results file: what earlier ones hold, and over it the parts of this call, written piece by piece."""

    def __init__(self, file: Path, update: list[str]) -> None:
        """``update``: earlier files, the first whole, of the others whole or the parts that are named after a colon."""
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.values: dict[str, Any] = {}
        for entry in update:
            name, _, parts = entry.partition(":")
            values = json.loads(Path(name).read_text())
            named = parts.split(",") if parts else []
            shapes = {"rows": set(named) & set(SHAPES), "sweeps": set(named) & set(SWEEPS) - set(PARTS)}
            whole = [part for part in named if part in PARTS]
            keys = [key for part in whole for key in PARTS[part]] if parts else list(values)
            self.values |= {key: values[key] for key in keys if key in values}
            for key, wanted in shapes.items():
                if not wanted:
                    continue
                there = values["machine"]
                self._compare("machine", there)
                # A row that does not say its commit has its own file's, which is no longer beside it.
                self._put_rows(
                    key, [{"commit": there["commit"]} | row for row in values[key] if row["shape"] in wanted]
                )
        self._write()

    def run(self, name: str, machine: dict[str, Any], part: Part) -> None:
        """A part instead of what there was of it."""
        for key in PARTS[name]:
            self.values.pop(key, None)
        self.add(PARTS[name][0], machine)
        for key, value in part:
            self.add(key, value)

    def replace_rows(self, machine_key: str, machine: dict[str, Any], part: Part) -> None:
        """The rows of some shapes alone, and errors; the others were measured on such a machine (``machine_key``)."""
        self._compare(machine_key, machine)
        for key, rows in part:
            self._put_rows(key, [row | {"commit": machine["commit"]} for row in rows])
            self._write()
            print(key, *{row.get("shape") for row in rows}, flush=True)

    def _compare(self, machine_key: str, machine: dict[str, Any]) -> None:
        """Rows beside others were measured on such a GPU and with the same versions. What was not installed here has no
        new rows."""
        earlier = self.values[machine_key]
        before = {name: earlier["versions"].get(name, version) for name, version in machine["versions"].items()}
        if (earlier["gpu"], before) != (machine["gpu"], machine["versions"]):
            raise ValueError(f"rows: got {machine}, allowed is what the other rows were measured with: {earlier}")

    def _put_rows(self, key: str, rows: list[dict[str, Any]]) -> None:
        """``rows`` in place of those of their shapes. A peer that this call did not measure keeps its earlier row."""
        shapes, new = {row.get("shape") for row in rows}, {(row.get("shape"), row.get("variant")) for row in rows}
        kept = []
        for row in self.values.get(key, []):
            shape, variant = row.get("shape"), row.get("variant", "")
            if shape not in shapes:
                kept.append(row)
            elif (shape, variant) not in new and variant.startswith((*PEERS, "torch")):  # full logits
                kept.append({"commit": self.values["machine"]["commit"]} | row)
        self.values[key] = sorted(rows + kept, key=lambda row: place(row.get("shape", "")))

    def add(self, key: str, value: Any) -> None:
        if isinstance(value, list):
            for row in value:
                print({k: v for k, v in row.items() if k not in ("hidden", "dtype")}, flush=True)
            value = self.values.get(key, []) + value
        else:
            print(key, value, flush=True)
        self.values[key] = value
        self._write()

    def _write(self) -> None:
        write_json(self.file, {"benchmark": "check"} | self.values)


@register(
    "everything that is judged on a GPU: its tests, time, scratch and error beside other implementations",
    file="gpu_check.json",
    rounds=5,
    shapes=list(SHAPES),
    peers=False,
    arguments={
        "--tests": {"default": "tests -m gpu", "help": "pytest's arguments in one string; empty: no tests"},
        "--jax-shapes": {**SHARED["shapes"], "default": [], "help": "of JAX's part; --shapes are of PyTorch's"},
        "--sweeps": {"nargs": "*", "default": [], "choices": list(SWEEPS), "help": "in half as many rounds"},
        "--first-calls": {"type": int, "default": 0, "metavar": "N", "help": "PyTorch's, in N fresh processes"},
        "--jax-first-calls": {"type": int, "default": 0, "metavar": "N", "help": "JAX's, in N fresh processes each"},
        "--per-token": {"action": "store_true", "help": "also log-probs, entropy and statistics"},
        "--jax-per-token": {"action": "store_true", "help": "also log-probs and entropy in JAX"},
        "--rows-only": {"action": "store_true", "help": "with --update: keep the other shapes' rows"},
        "--update": {"nargs": "*", "default": [], "metavar": "FILE[:PARTS]", "help": "earlier results to keep"},
    },
)
def run(options: argparse.Namespace, results: Results) -> int:
    if options.output == RESULTS and not gpus_here():
        raise argparse.ArgumentError(
            None, f"--output: got {RESULTS} without a GPU, allowed is another folder: those results are of GPUs"
        )
    others = (options.first_calls, options.jax_first_calls, options.per_token, options.jax_per_token)
    if options.rows_only and not options.update:
        raise argparse.ArgumentError(None, "--rows-only: got no --update FILE, allowed is one: its other rows are kept")
    if options.rows_only and any(others):
        raise argparse.ArgumentError(
            None, "--rows-only: allowed beside it are --shapes, --sweeps and --jax-shapes, whose rows it replaces"
        )
    parts = Parts(results.file, options.update)
    with tempfile.TemporaryDirectory() as cache:
        failed = run_tests(shlex.split(options.tests), options.output / "tests.txt") if options.tests else 0
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing is left behind
        if options.tests:
            parts.add("tests_exit_status", failed)
            parts.add("tests_commit", results.machine["commit"])
        (replace_rows if options.rows_only else run_parts)(parts, options, results.machine)
    return failed


def replace_rows(parts: Parts, options: argparse.Namespace, machine: dict[str, Any]) -> None:
    for framework, key, shapes in (("jax", "jax_machine", options.jax_shapes), ("torch", "machine", options.shapes)):
        if shapes:
            rows = rows_part(framework, shapes, options.rounds, options.peers, errors="small" in shapes)
            parts.replace_rows(key, machine, rows)
    if options.sweeps:
        parts.replace_rows("machine", machine, sweeps_part(options.sweeps, options.rounds, options.peers))


def run_parts(parts: Parts, options: argparse.Namespace, machine: dict[str, Any]) -> None:
    how = options.rounds, options.peers
    wanted: dict[str, tuple[Any, Part]] = {
        "first_calls": (options.first_calls, first_call_part(options.first_calls)),
        "jax_first_calls": (options.jax_first_calls, jax_first_call_part(options.jax_first_calls)),
        "torch": (options.shapes or options.sweeps, torch_part(options.shapes, options.sweeps, *how)),
        "tokens": (options.per_token, token_part(*how)),
        "jax_tokens": (options.jax_per_token, jax_token_part(options.rounds)),
        "jax": (options.jax_shapes, jax_part(options.jax_shapes, *how)),
    }
    for name, (asked, part) in wanted.items():
        if asked:
            parts.run(name, machine, part)
